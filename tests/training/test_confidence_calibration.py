"""Calibration of DSpark's confidence head: planted temperatures come back, and a true head is left alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from test_block_recipes import toy_batch, toy_recipe
from torch import Tensor

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.training.calibration import (
    GRID,
    LEAST_ROUNDS,
    calibration_error,
    calibration_errors,
    fit_temperatures,
    survivals,
)
from foretoken.training.recipes.base import Batch

STEP = 2.0 ** (1 / 8) * 1.0001
"""Ratio of neighbours in the grid."""


def rounds(count: int, positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """True log-odds [n, b], and whether the draft survived each position."""
    generator = torch.Generator().manual_seed(seed)
    log_odds = 2.0 + 1.5 * torch.randn(count, positions, generator=generator)
    accepted = torch.rand(count, positions, generator=generator) < torch.sigmoid(log_odds)
    return log_odds, accepted.cumprod(-1).float()


def test_the_error_by_hand() -> None:
    predicted, outcomes = torch.tensor([0.9, 0.91, 0.1, 0.11]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert calibration_error(predicted, outcomes) == pytest.approx((0.81 + 0.21) / 4, abs=1e-6)
    assert calibration_error(torch.full((10,), 0.3), torch.tensor([1.0] * 3 + [0.0] * 7)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0])
def test_planted_temperatures_come_back(scale: float) -> None:
    """Log-odds that were multiplied by a factor are divided by it, within a step of the grid, at every position."""
    log_odds, survived = rounds(60_000, 3)
    for temperature in fit_temperatures(log_odds * scale, survived):
        assert scale / STEP**2 <= temperature <= scale * STEP**2


def test_a_different_temperature_at_every_position() -> None:
    log_odds, survived = rounds(60_000, 3, seed=1)
    planted = torch.tensor([2.0, 0.5, 1.5])
    temperatures = fit_temperatures(log_odds * planted, survived)
    assert all(max(t / p, p / t) <= STEP**2 for t, p in zip(temperatures, planted.tolist(), strict=True))


def test_temperatures_rise_with_the_miscalibration_and_the_error_falls() -> None:
    log_odds, survived = rounds(20_000, 2, seed=2)
    fitted = [fit_temperatures(log_odds * scale, survived) for scale in (0.5, 0.7, 1.0, 1.4, 2.0, 3.0)]
    for column in zip(*fitted, strict=True):
        assert list(column) == sorted(column) and column[0] < column[-1]
    before, after = (calibration_errors(log_odds * 2, survived, t) for t in ([1.0, 1.0], fitted[4]))
    assert all(a < 0.4 * b for a, b in zip(after, before, strict=True))
    predicted = survivals(log_odds * 2, fitted[4])
    assert bool((predicted[:, 1:] <= predicted[:, :-1]).all())


def test_expected_outcomes_give_the_temperatures_of_drawn_ones() -> None:
    log_odds, _ = rounds(20_000, 2, seed=3)
    expected = torch.sigmoid(log_odds).cumprod(-1)
    assert fit_temperatures(log_odds, expected) == [1.0, 1.0]
    assert fit_temperatures(log_odds * 2, expected) == [2.0, 2.0]


def test_a_position_keeps_1_unless_other_rounds_agree() -> None:
    """Both positions seem too sure by 4 in the fitted rounds; in the others only the second is."""
    log_odds, survived = rounds(20_000, 2, seed=4)
    other_odds, other_survived = rounds(20_000, 2, seed=5)
    others = other_odds * torch.tensor([1.0, 4.0]), other_survived
    first, second = fit_temperatures(log_odds * 4, survived, others)
    assert first == 1.0 and second > 2.0
    assert fit_temperatures(log_odds * 4, survived)[0] == pytest.approx(4.0, rel=0.2)
    temperatures = fit_temperatures(log_odds * 4, survived, (other_odds * 4, other_survived))
    assert temperatures == fit_temperatures(log_odds * 4, survived)


def test_few_rounds_fit_nothing() -> None:
    log_odds, survived = rounds(LEAST_ROUNDS - 1, 2)
    assert fit_temperatures(log_odds * 4, survived) == [1.0, 1.0] and GRID[0] == 1.0


# -- the recipe --------------------------------------------------------------------------------------------------------


def teach_confidence(recipe: Any, batch: Batch, anchors: Tensor) -> None:
    """Fit the confidence head alone to the end, on blocks after these anchors."""
    from foretoken.training.recipes.labels import Labels, mask_of

    drafts = recipe.config.drafts
    for name, weight in recipe.net.named_parameters():
        weight.requires_grad_("confidence" in name)
    columns = anchors[..., None] + torch.arange(drafts)
    rows = torch.arange(len(anchors)).repeat_interleave(columns[0].numel())
    labels = Labels(batch, mask_of(batch, rows, columns.flatten()), None)
    weights = [p for p in recipe.net.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(weights, lr=1.0, max_iter=2000, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure() -> Any:
        optimizer.zero_grad()
        states, memory, total = recipe.states(batch, anchors), None, torch.zeros(())
        for position in range(drafts):
            part = recipe.position_losses(batch, labels, states[:, :, position], columns[..., position], memory)
            total, memory = total + part.losses.mean(), part.memory
        total.backward()
        return total

    optimizer.step(closure)


def test_a_taught_confidence_is_the_true_acceptance_probability() -> None:
    """Five tokens, blocks of two: the head can represent every acceptance probability, ``sum_v min(p, q)``, and after
    every first token it is that of the distributions by which drafts are drawn and verified."""
    recipe = toy_recipe("dspark", {"block": "2", "from_anchor": "true", "top": "5"}, vocab=5)
    recipe.net.eval()
    prompt = [3, 1, 4, 1, 0, 2, 2]
    tokens = torch.tensor([[*prompt, first, 0, 0] for first in range(5)])
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)
    teach_confidence(recipe, batch, torch.full((5, 1), len(prompt) - 1))
    drafter = recipe.drafter({})
    drafter.width = 1
    taps = recipe.parts.features(torch.tensor([prompt[:-1]]), drafter.taps)
    seen: dict[int, list[float]] = {}
    for seed in range(60):
        sampler = Sampler(SamplingParams(temperature=1.0), len(prompt))
        context = Context(0, list(prompt), len(prompt), sampler, Rng(seed))
        context.hidden = {name: rows[0] for name, rows in taps.items()}
        drafter.start(context)
        tree = drafter.propose(context, Budget(2, 2, survival=True))
        assert tree.q is not None and len(tree) == 3
        truth, product = [1.0], 1.0
        for node in (1, 2):
            path = torch.tensor([[*prompt, *tree.tokens[1:node]]])
            with torch.no_grad():
                states = recipe.parts.features(path, ("last",))["last"][0, -1:]
                p = torch.softmax(recipe.parts.logits(states), -1)[0]
            product *= float(torch.minimum(p, tree.q[node - 1]).sum())
            truth.append(product)
        assert list(tree.survival) == pytest.approx(truth, abs=2e-3)
        seen[tree.tokens[1]] = truth
    assert len(seen) > 3 and len({round(truth[2], 3) for truth in seen.values()}) > 2


@torch.no_grad()
def test_with_a_draft_vocabulary_drafts_are_accepted_by_the_whole_distribution() -> None:
    """The outcomes are ``sum_v min(p, q)`` with p over all tokens, also where the likeliest cannot be drafted."""
    recipe = toy_recipe("dspark", {"block": "2", "from_anchor": "true"})
    recipe.net.eval()
    recipe.frequent = torch.tensor([3, 0, 17, 9, 30, 21])
    batch, guesses, outside = toy_batch(recipe, 12), list[Any](), 0
    compute = recipe._position
    recipe._position = lambda *given: guesses.append(compute(*given)) or guesses[-1]
    _, survived = recipe._rounds(batch)
    first = guesses[0]
    for index, (text, column) in enumerate((text, column) for text in range(2) for column in range(1, 11)):
        whole = batch.teacher(torch.tensor([text]), torch.tensor([column]))[0]
        outside += int(whole.argmax()) not in recipe.frequent
        by_hand = torch.minimum(whole[recipe.frequent], first.log_guess[index].exp()).sum()
        assert float(survived[index, 0]) == pytest.approx(float(by_hand), rel=1e-4)
    assert 0 < outside < len(survived)
    assert torch.equal(first.accepted, survived[:, 0])  # which the confidence head learns


def test_the_recipe_measures_its_head() -> None:
    recipe = toy_recipe("dspark", {"block": "3"})
    recipe.net.eval()
    measured = recipe.measure([toy_batch(recipe, 40, texts=4)])
    calibration = measured["calibration"]
    drafts = recipe.config.drafts
    assert calibration["rounds"] == 4 * (40 - drafts) and len(measured["confidence_temperatures"]) == drafts
    assert all(after <= before for before, after in zip(calibration["before"], calibration["after"], strict=True))
    assert recipe.reported(measured) == json.loads(json.dumps(measured))
    assert recipe.drafter(measured).temperatures == measured["confidence_temperatures"]
    assert recipe.drafter({}).temperatures == [1.0] * drafts
    assert toy_recipe("dspark", {"confidence": ""}).measure([toy_batch(recipe, 40)]) == {}
    assert recipe.measure([toy_batch(recipe, drafts)]) == {}


@pytest.mark.parametrize("blocks", [4, 1])
def test_the_error_is_measured_on_rounds_that_were_not_fitted(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = toy_recipe("dspark", {"block": "3"})  # drafts of two tokens
    planted = [rounds(1600 // blocks, 2, seed=seed) for seed in range(blocks)]
    planted = [(odds * 2, survived) for odds, survived in planted]
    given = iter(planted)
    monkeypatch.setattr(recipe, "_rounds", lambda batch: next(given))
    measured = recipe.measure([toy_batch(recipe, 40)] * blocks)
    if blocks == 1:  # its first and its second half
        planted = [
            (odds[half], survived[half]) for odds, survived in planted for half in (slice(800), slice(800, None))
        ]
    fitted, others = ([torch.cat(parts) for parts in zip(*planted[i::2], strict=True)] for i in range(2))
    temperatures = fit_temperatures(*fitted, others)
    assert measured["confidence_temperatures"] == temperatures and all(t > 1.2 for t in temperatures)
    assert measured["calibration"] == {
        "rounds": 1600,
        "before": calibration_errors(*others, [1.0, 1.0]),
        "after": calibration_errors(*others, temperatures),
    }


def test_rounds_of_tokens_that_are_not_learned_are_left_out() -> None:
    recipe = toy_recipe("dspark", {"block": "3"})
    batch = toy_batch(recipe, 40, texts=4)
    batch.learned = torch.zeros_like(batch.tokens, dtype=torch.bool)
    batch.learned[:2, 20:] = True
    drafts = recipe.config.drafts
    assert recipe.measure([batch])["calibration"]["rounds"] == 2 * (40 - drafts - 18)


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0, 1.0], [1.0, math.nan, 2.0], "abc", 3])
def test_damaged_temperatures(temperatures: Any) -> None:
    recipe = toy_recipe("dspark", {"block": "3", "from_anchor": "true"})
    with pytest.raises(ValueError, match="confidence_temperatures must be 3 numbers above 0"):
        recipe.drafter({"confidence_temperatures": temperatures})
