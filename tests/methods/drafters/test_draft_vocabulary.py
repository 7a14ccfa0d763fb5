"""Heads that guess only the tokens which were frequent in their training text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core import TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.loading.drafters import LoadingContext
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch, frequent_tokens
from foretoken.training.recipes.labels import Labels, mask_of
from toys import engine, llamas, serve

IDS = [3, 1, 4, 15, 9, 2, 6, 5, 30, 8, 7, 20]
PROMPT = [3, 1, 4, 1, 5]


def trained(method: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recipe of random weights whose drafter guesses :data:`IDS`."""
    monkeypatch.setattr("foretoken.training.recipes.base.LARGE_VOCABULARY", 1)
    monkeypatch.setattr("foretoken.training.recipes.base.FREQUENT", len(IDS))
    target = llamas()[0]
    recipe = find_recipe(method)(target, TargetParts(target), {}, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in recipe.net.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    recipe.prepare(np.repeat(IDS, np.arange(len(IDS), 0, -1)))
    return recipe


def test_logits_are_those_of_the_ids() -> None:
    parts = TargetParts(llamas()[0])
    states = torch.randn(3, parts.hidden_size, generator=torch.Generator().manual_seed(0))
    head = DraftHead(parts, torch.tensor(IDS))
    whole = parts.draft_logits(states)
    assert head.size == len(IDS) and torch.allclose(head(states), whole[:, IDS], atol=1e-2)
    wide = head.widened(head(states))
    assert wide.shape == whole.shape and wide.isinf().sum() == 3 * (32 - len(IDS))
    best = head.mapped(head(states).argmax(-1))  # of equal ones any
    assert torch.equal(wide.gather(1, best[:, None])[:, 0], wide.max(-1).values)
    everything = DraftHead(parts)
    assert everything.size == 32 and torch.equal(everything(states), everything.widened(whole))
    for wrong in ([], [1, 32], [-1]):
        with pytest.raises(ValueError, match="outside the target's vocabulary of 32: copy the drafter again"):
            DraftHead(parts, torch.tensor(wrong, dtype=torch.int64))


def test_how_many_of_the_stored_ids_are_guessed() -> None:
    context = LoadingContext(llamas()[0], "x")
    for nothing in ("", "0"):
        assert chosen_ids(nothing, context, 32, IDS).tolist() == IDS  # type: ignore[union-attr]
    assert chosen_ids("3", context, 32, IDS).tolist() == IDS[:3]  # type: ignore[union-attr]
    assert chosen_ids("32", context, 32, IDS) is None and chosen_ids("0", context, 32) is None
    for vocab in (-1, 13, 33):
        with pytest.raises(ValueError, match=f"up to the 12 that were stored, or 32 for all; not {vocab}"):
            chosen_ids(str(vocab), context, 32, IDS)


def test_a_file_may_name_tokens_that_were_rare_in_training(tmp_path: Path) -> None:
    """A head with the target's projection can draft them; one with a projection of its own cannot."""
    context, file = LoadingContext(llamas()[0], "x"), tmp_path / "ids.json"
    file.write_text("[4, 25, 3, 26]")
    assert chosen_ids(str(file), context, 32, IDS, others=True).tolist()[:4] == [4, 25, 3, 26]  # type: ignore[union-attr]
    own = chosen_ids(str(file), context, 32, IDS)
    assert own is not None and own.tolist() == [4, 3]


def test_frequent_tokens_make_up_nearly_all_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.training.recipes.base.FREQUENT", 2)
    text = np.repeat([7, 3, 9, 4], [600, 300, 96, 4])
    assert frequent_tokens(text, 64).tolist() == [7, 3, 9]
    assert frequent_tokens(text, 10).tolist() == [7, 3]  # never more than a quarter


class Watched(Drafter):
    """Remembers what was drafted."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.drafted = inner, list[int]()
        self.taps, self.max_depth, self.max_nodes = inner.taps, inner.max_depth, inner.max_nodes
        self.traits, self.name = inner.traits, inner.name  # type: ignore[misc]

    def __getattribute__(self, name: str) -> Any:
        if name in ("start", "observe", "finish", "rewind"):
            return getattr(super().__getattribute__("inner"), name)
        return super().__getattribute__(name)

    def propose(self, context: Any, budget: Any) -> TokenTree:
        tree = self.inner.propose(context, budget)
        self.drafted += tree.tokens[1:]
        return tree


ASKED = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.0)}


@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("method", ["eagle", "medusa", "hydra"])
def test_only_these_tokens_are_drafted_and_the_text_stays(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = trained(method, monkeypatch)
    assert isinstance(recipe.drafter({}), EagleDrafter | MedusaDrafter | HydraDrafter)
    drafter = Watched(recipe.drafter({}))
    request = Request(PROMPT, ASKED[mode], 24, seed=3)
    run = serve(engine(recipe.target, drafter), [request])[0]
    plain = serve(engine(recipe.target), [request])[0]
    assert run.output == plain.output
    assert drafter.drafted and set(drafter.drafted) <= set(IDS)


@pytest.mark.parametrize("method", ["eagle", "medusa", "hydra"])
def test_the_ids_are_stored_with_the_drafter(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foretoken.methods.drafters.nets.store import save_drafter

    recipe = trained(method, monkeypatch)
    measured = {"frequent": recipe.frequent.tolist()}
    save_drafter(tmp_path, method, recipe.stored_config(), recipe.net, recipe.parts.fingerprint(), measured)
    assert json.loads((tmp_path / "drafter.json").read_text())["measured"]["frequent"] == IDS

    def size(options: str = "") -> int:
        drafter: Any = build_drafter(f"{method}:{tmp_path}{options}", recipe.target)
        count: int = (drafter.model.project if method == "eagle" else drafter.head).size
        return count

    assert (size(), size(",vocab=5"), size(",vocab=32")) == (12, 5, 32)
    with pytest.raises(ValueError, match="vocab is the number of tokens that can be drafted"):
        size(",vocab=20")
    (tmp_path / "ids.json").write_text(json.dumps([25, 26, *IDS]))
    assert size(f",vocab={tmp_path}/ids.json") == 14


def test_labels_over_few_tokens_are_the_targets_distribution_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = trained("medusa", monkeypatch)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], ("last",)), recipe.parts)
    texts, columns = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 4, 0, 5, 7])
    logits = torch.randn(5, len(IDS), generator=torch.Generator().manual_seed(2))
    labels = Labels(batch, mask_of(batch, texts, columns), torch.tensor(IDS))

    def distance(row: int) -> tuple[Tensor, bool]:
        whole = batch.teacher(texts[row : row + 1], columns[row : row + 1])[0]
        among = whole[IDS] / whole[IDS].sum()
        return -(among * torch.log_softmax(logits[row], -1)).sum(), int(whole.argmax()) in IDS

    distances = [value for value, counts in map(distance, range(5)) if counts]
    assert 0 < len(distances) < 5
    assert float(labels.distance(logits, texts, columns)) == pytest.approx(
        float(torch.stack(distances).mean()), rel=1e-4
    )


@pytest.mark.parametrize("mode", ["frozen", "joint"])
def test_casts_of_the_labels_are_not_reused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.9 and 2.10 would give the loss of a trained target its projection without gradients."""
    recipe = trained("medusa", monkeypatch)
    recipe.parts.network.requires_grad_(mode == "joint")
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], ("last",)), recipe.parts)
    cleared: list[bool] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    Labels(batch, torch.ones(2, 8, dtype=torch.bool), torch.tensor(IDS))
    assert bool(cleared) == (mode == "joint")
