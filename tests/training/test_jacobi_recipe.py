"""Consistency training: the trajectories it learns from, its loss by hand, and that blocks converge in fewer rounds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import foretoken as ft
from foretoken.cli.train_drafter import held_out
from foretoken.models import wrap
from foretoken.models.base import CapabilityError
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.chains import joint_states
from foretoken.training.config import LmConfig, TrainConfig
from foretoken.training.joint import load_trainable
from foretoken.training.lm import build_model, train_lm
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.jacobi import JacobiRecipe, JacobiSettings
from foretoken.training.trainer import Trainer
from toys import tables

LENGTH = 20


def llama() -> HuggingFaceModel:
    """A small untrained target that is sure of what it says."""
    config = LmConfig(hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, context=64, vocab=300)
    network = build_model(config, 0)
    with torch.no_grad():
        network.lm_head.weight = torch.nn.Parameter(torch.randn(300, 16))  # untied: it does not repeat its input
    model = wrap(network, lean=False)
    assert isinstance(model, HuggingFaceModel)
    return model


def recipe_of(settings: dict[str, str] | None = None, model: HuggingFaceModel | None = None) -> JacobiRecipe:
    target = model or llama()
    return JacobiRecipe(target, TargetParts(target), settings or {}, seed=0)


def texts(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(300, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: HuggingFaceModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model.model(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits


def test_a_chain_below_a_place_is_read_as_the_text_with_it() -> None:
    model, tokens = llama(), texts()[:, :-1]
    columns, chains = torch.tensor([[3, 9, 3], [0, 19, 7]]), texts(6, 1)[:, :5].view(2, 3, 5)
    states, below = joint_states(model, tokens, columns, chains)
    for row in range(2):
        alone = model.model.model(input_ids=tokens[row : row + 1]).last_hidden_state[0]
        assert torch.allclose(states[row], alone, atol=1e-5)
        for group in range(3):
            ids = torch.cat([tokens[row, : columns[row, group] + 1], chains[row, group]])
            whole = model.model.model(input_ids=ids[None]).last_hidden_state[0, -5:]
            assert torch.allclose(below[row, group], whole, atol=1e-5)


def test_a_trajectory_is_the_jacobi_iteration_and_ends_in_greedy_text() -> None:
    recipe, tokens = recipe_of({"m": "6"}), texts()[:, :-1]
    columns = torch.tensor([[4, 12], [8, 19]])
    points, targets = recipe.trajectory(tokens, columns)
    assert len(points) > 2
    for row in range(2):
        for group in range(2):
            text = tokens[row, : columns[row, group] + 1].tolist()
            assert points[0, row, group].tolist() == text[-1:] * 6
            for before, after in pairwise(points):
                logits = logits_of(recipe.model, text + before[row, group].tolist())
                assert after[row, group].tolist() == logits[len(text) - 1 : -1].argmax(-1).tolist()
            greedy = list(text)
            for _ in range(6):
                greedy.append(int(logits_of(recipe.model, greedy)[-1].argmax()))
            assert points[-1, row, group].tolist() == greedy[-6:]
            probabilities = torch.softmax(logits_of(recipe.model, greedy)[-6:], -1)
            assert torch.allclose(targets[row, group], probabilities, atol=1e-4)


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions count from the first token that differs from the fixed point; the text has its own weight."""
    recipe, tokens = recipe_of({"m": "3", "blocks": "2", "text": "0"}), texts()
    final = torch.tensor([[[7, 8, 9], [1, 2, 3]], [[4, 5, 6], [7, 7, 7]]])
    first = torch.tensor([[[7, 5, 9], [1, 2, 3]], [[9, 5, 6], [7, 7, 1]]])
    targets = torch.softmax(torch.randn(2, 2, 3, 300), -1)
    monkeypatch.setattr(recipe, "trajectory", lambda *_: (torch.stack([first, final]), targets))
    seen: list[Tensor] = []
    monkeypatch.setattr(
        "foretoken.training.recipes.jacobi.some_rows",
        lambda *_: seen.append(torch.tensor([[2, 6], [5, 9]])) or seen[-1],  # type: ignore[func-returns-value]
    )
    batch = Batch(tokens, {}, recipe.parts)
    loss = recipe.loss(batch, torch.Generator().manual_seed(0))
    parts = []
    for row, group, places in ((0, 0, (1, 2)), (1, 0, (0, 1, 2)), (1, 1, (2,))):
        text = tokens[row, : int(seen[0][row, group]) + 2].tolist()  # up to the place behind it
        log_probs = torch.log_softmax(logits_of(recipe.model, text + first[row, group].tolist())[-3:], -1)
        parts += [float(-(targets[row, group, place] * log_probs[place]).sum()) for place in places]
    assert float(loss.detach()) == pytest.approx(sum(parts) / 6, rel=1e-4)
    assert loss.requires_grad
    other = recipe_of({"m": "3", "blocks": "2", "text": "2", "smoothing": "0.1"}, recipe.model)
    monkeypatch.setattr(other, "trajectory", lambda *_: (torch.stack([first, final]), targets))
    more = float((other.loss(batch, torch.Generator().manual_seed(0)) - loss).detach())
    assert 2 < more / 2 < 60


def test_a_block_that_is_fixed_from_the_start_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of({"m": "3", "blocks": "1", "text": "0"})
    final = torch.full((1, 2, 1, 3), 7)
    monkeypatch.setattr(recipe, "trajectory", lambda *_: (final, torch.full((2, 1, 3, 300), 1 / 300)))
    assert float(recipe.loss(Batch(texts(), {}, recipe.parts), torch.Generator()).detach()) == 0.0


def gpt2(context: int) -> HuggingFaceModel:
    """A target with learned positions, of which there are as many as its context has tokens."""
    shape = GPT2Config(vocab_size=300, n_positions=context, n_embd=16, n_layer=1, n_head=2, eos_token_id=None)
    model = wrap(GPT2LMHeadModel(shape), lean=False)
    assert isinstance(model, HuggingFaceModel)
    return model


def test_blocks_end_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text as long as the context: there are no learned positions for blocks behind its last tokens."""
    recipe = recipe_of({"m": "6", "blocks": "50"}, gpt2(LENGTH))
    seen: list[Tensor] = []
    compute = recipe.trajectory
    monkeypatch.setattr(recipe, "trajectory", lambda *given: seen.append(given[1]) or compute(*given))  # type: ignore
    loss = recipe.loss(Batch(texts(), {}, recipe.parts), torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(loss)) and sorted(set(seen[0].flatten().tolist())) == list(range(1, LENGTH - 6))
    with pytest.raises(ValueError, match=r"jacobi needs a context of m \+ 2 = 21 tokens, and the target's is 20"):
        recipe_of({"m": "19"}, gpt2(LENGTH))
    shortest = recipe_of({"m": "18"}, gpt2(LENGTH))
    assert bool(torch.isfinite(shortest.loss(Batch(texts(), {}, shortest.parts), torch.Generator())))


def test_casts_of_the_trajectory_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.9 and 2.10 would give the pass with gradients those without, and no weight would learn."""
    recipe, calls = recipe_of({"m": "3"}), list[str]()
    compute, clear = recipe.trajectory, torch.clear_autocast_cache
    monkeypatch.setattr(recipe, "trajectory", lambda *given: calls.append("trajectory") or compute(*given))  # type: ignore
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append("clear") or clear())  # type: ignore
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = recipe.loss(Batch(texts(), {}, recipe.parts), torch.Generator().manual_seed(0))
        assert calls == ["trajectory", "clear"]  # the context clears at its end, too
    loss.backward()
    assert all(weight.grad is not None for weight in recipe.parts.network.parameters())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each line has one continuation: the next token depends on those before it."""
    folder = tmp_path_factory.mktemp("data")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    rows = [" ".join(words[(i + j * (1 + i % 3)) % 12] for j in range(90)) + f"\nline {i}" for i in range(150)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return folder


@pytest.mark.slow
def test_training_makes_blocks_converge_in_fewer_rounds(data: Path, tmp_path: Path) -> None:
    """More tokens per round than before, and the text under ``jacobi`` is the trained target's own."""
    target = tmp_path / "target"
    shape = LmConfig(
        hidden=48, layers=4, heads=2, kv_heads=1, ffn=96, context=96, vocab=300, batch_size=4, steps=250, lr=1e-2
    )
    train_lm([data], target, shape)
    model: Any = load_trainable(target, None)
    recipe = JacobiRecipe(model, TargetParts(model), {"m": "6"}, seed=0)
    config = TrainConfig(steps=100, batch_size=4, context=64, lr=3e-3, seed=0)
    trainer = Trainer(recipe, [data], tmp_path / "out", config, AutoTokenizer.from_pretrained(target))
    prompts = trainer.held_prompts(4, 32)
    lengths: list[float] = []

    def evaluate(drafter: Any, served: Any) -> dict[str, Any]:
        measured = held_out(served, drafter, prompts)
        lengths.append(measured["mean_acceptance_length"])
        return measured

    report = trainer.run(evaluate=evaluate, eval_every=1000)
    assert report["drafter"] == "jacobi,m=6"
    assert lengths[-1] > 1.5 * lengths[0], lengths
    assert report["target_loss_nats"]["after"] < report["target_loss_nats"]["before"] + 0.15
    llm = ft.load(str(tmp_path / "out/target"), "jacobi,m=6", controller="constant", dtype="float32")
    spec, plain = (side.generate("one two three four", max_new_tokens=30) for side in (llm, llm.plain))
    assert spec.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"m": 1}, "jacobi needs m >= 2, not 1"),
        ({"blocks": 0}, "jacobi needs blocks >= 1, not 0"),
        ({"text": -1.0}, "jacobi needs text >= 0 and 0 <= smoothing < 1"),
        ({"smoothing": 1.0}, "jacobi needs text >= 0 and 0 <= smoothing < 1"),
        ({"rank": -1}, "rank must be 0, or above 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JacobiSettings(**settings)


def test_a_target_that_takes_no_trees_is_refused() -> None:
    table: Any = tables()[0]
    with pytest.raises(CapabilityError, match="jacobi needs a target that takes trees, and MarkovTable does not"):
        JacobiRecipe(table, TargetParts(llama()), {}, seed=0)
