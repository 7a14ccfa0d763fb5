"""Target and draft model of one tokenizer whose vocabularies are padded to different widths."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from checkpoints import new_model, prompt_of, save
from scipy.stats import chi2_contingency

import foretoken as ft
from foretoken.core import TokenTree
from foretoken.core.noise import unseeded_from
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.loading import check_vocabularies
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.other.table import TableModel

NARROW, WIDE = 100, 112


def drafter_options() -> list[str]:
    return ["k=4", "tree=3x2", "tree=2x2,draw=iid", "tree=2x2,draw=greedy"]


@pytest.mark.parametrize(("target_width", "draft_width"), [(NARROW, WIDE), (WIDE, NARROW)])
@pytest.mark.parametrize("options", drafter_options())
def test_checkpoints_of_other_widths_draft(target_width: int, draft_width: int, options: str, tmp_path: Path) -> None:
    target = save(new_model("llama", vocab_size=target_width), tmp_path / "target")
    # Another seed draws other weights; ids that only one of the two has do occur in either.
    draft = save(new_model("llama", vocab_size=draft_width, seed=1), tmp_path / "draft")
    prompt = [*prompt_of(6), target_width - 1, 4]
    llm = ft.load(target, drafter=f"model:{draft},{options}", controller="constant", dtype="float32")
    expected = llm.plain.generate(prompt, max_new_tokens=40, ignore_eos=True)
    greedy = llm.generate(prompt, max_new_tokens=40, ignore_eos=True)
    assert greedy.token_ids == expected.token_ids
    assert greedy.stats.num_draft_tokens > 0
    for seed in range(5):
        biased = {target_width - 1: 2.0, 5: -1.0}
        sampled = llm.generate(
            prompt,
            max_new_tokens=40,
            ignore_eos=True,
            temperature=1.0,
            seed=seed,
            logit_bias=biased,
            repetition_penalty=1.2,
        )
        assert len(sampled.token_ids) == 40
        assert max(sampled.token_ids) < target_width


@pytest.mark.parametrize(("target_width", "draft_width"), [(4, 6), (6, 4)])
@pytest.mark.parametrize("draw", ["iid", "without_replacement"])
def test_the_distribution_is_the_targets(target_width: int, draft_width: int, draw: str) -> None:
    """Three sampled tokens, 1500 times: the same distribution as plain decoding (false alarm below 1e-4, the seed is
    fixed)."""
    target, draft = TableModel.random(target_width, seed=1), TableModel.random(draft_width, seed=2, sharpness=0.5)
    drafter = ModelDrafter(draft, tree="2x2", draw=draw, target=target)
    counts = [Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()]
    for count, engine in zip(
        counts, (Engine(target, drafter, None, ConstantController()), Engine(target)), strict=True
    ):
        for _ in range(1500):  # without seeds: drafts are drawn
            engine.add(Request([0, target_width - 1], SamplingParams(temperature=1.0), 3))
        with unseeded_from(7):
            while engine.busy:
                for run, emission in engine.step():
                    if emission.finish_reason:
                        count[tuple(run.output)] += 1
    outputs = sorted(set(counts[0]) | set(counts[1]))
    if target_width > draft_width:
        assert any(max(tokens) >= draft_width for tokens in counts[0])
    common = [o for o in outputs if counts[0][o] + counts[1][o] >= 15]
    table = [[c[o] for o in common] + [sum(c[o] for o in outputs if o not in common)] for c in counts]
    assert chi2_contingency([row if row[-1] or table[0][-1] else row[:-1] for row in table]).pvalue > 1e-4


def test_draft_distributions_have_the_targets_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for target_width, draft_width in ((4, 6), (6, 4)):
        target, draft = TableModel.random(target_width), TableModel.random(draft_width, seed=3)
        trees: list[TokenTree] = []
        engine = Engine(target, ModelDrafter(draft, k=3, target=target), None, ConstantController())
        feed = engine._feed
        monkeypatch.setattr(
            engine, "_feed", lambda run, tree, feed=feed, trees=trees: trees.append(tree) or feed(run, tree)
        )
        engine.add(Request([0, 1], SamplingParams(temperature=1.0), 20))  # with a seed nothing would be drawn
        while engine.busy:
            engine.step()
        drawn = [tree.q for tree in trees if tree.q is not None]
        assert drawn
        for q in drawn:
            assert q.shape[-1] == target_width
            assert torch.allclose(q.sum(-1), torch.ones(len(q), dtype=q.dtype))
            assert not q[:, min(4, target_width) :].any()


def test_vocabularies_that_are_not_one_are_refused() -> None:
    small, padded, other = (TableModel.random(v) for v in (5000, 5128, 8000))
    check_vocabularies(small, padded, "draft")
    check_vocabularies(padded, small, "draft")
    with pytest.raises(ValueError, match="vocabulary of 8000, the target one of 5000"):
        check_vocabularies(small, other, "draft")
