"""Sampled output of a seed equals plain decoding with that seed: every drafter x tree x sampler x controller x batch.

No statistics: one token that differs fails a cell.  Everything is in float64, where rounding does not move a race.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import CASES, Case
from matrix import SEEDED_MODES, rows

from foretoken import registry
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.loading import build_controller
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.models.base import LanguageModel
from toys import engine, llamas, outputs, serve

PROMPTS = [
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],  # repetitive: n-grams match
    [3],  # one token
    [0, 0, 31, 0],  # token 0
    [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12, 9, 1],
]
LENGTHS = [24, 9, 17, 30]
SEEDS = [0, 1, 2**63, 2**64 - 1, 7, 7, 12345, 99]


def requests() -> list[Request]:
    """Every mode once, every prompt twice; of different lengths, so that requests leave and others join."""
    return [
        Request(PROMPTS[i % 4], params, LENGTHS[i % 3], seed=SEEDS[i]) for i, params in enumerate(SEEDED_MODES.values())
    ]


@cache
def plain(dtype: torch.dtype = torch.float64) -> list[list[int]]:
    """Each request alone, without any drafter."""
    return [outputs(engine(llamas(dtype)[0]), [request])[0] for request in requests()]


def all_cases() -> list[tuple[str, Case]]:
    return list(rows())


each_case = pytest.mark.parametrize(
    "case", [case for _, case in all_cases()], ids=[f"{name}.{case.label}" for name, case in all_cases()]
)


@each_case
@pytest.mark.parametrize("batch", [1, 4])
def test_every_drafter_writes_the_text_of_the_seed(case: Case, batch: int) -> None:
    """Eight requests through a batch of four; the third to the sixth of them one at a time."""
    target, draft = llamas()
    chosen = slice(0, 8) if batch > 1 else slice(2, 6)
    speculative = engine(target, case.build(target, draft), max_batch=batch)
    assert outputs(speculative, requests()[chosen]) == plain()[chosen]


@pytest.mark.parametrize("name", ["model", "eagle", "medusa", "cascade", "ensemble", "ngram"])
def test_in_float32_too(name: str) -> None:
    target, draft = llamas(torch.float32)
    speculative = engine(target, CASES[name][0].build(target, draft), max_batch=3)
    assert outputs(speculative, requests()) == plain(torch.float32)


def drafters(target: LanguageModel, draft: LanguageModel) -> dict[str, Drafter]:
    return {
        "chain": ModelDrafter(draft, k=4),
        "tree": ModelDrafter(draft, tree="3x2x1"),
        "dynamic": next(case for case in CASES["eagle"] if case.label == "race-eagle2").build(target, draft),
        "group": RouterDrafter([ModelDrafter(draft, k=3), NgramDrafter(n=2)]),
        "union": EnsembleDrafter([ModelDrafter(draft, k=2), NgramDrafter(n=2, k=3)]),
    }


def controllers() -> list[str]:
    """Every controller that needs no trained weights."""
    return [row.name for row in registry.rows("controller") if not row.needs_training]


@pytest.mark.parametrize("drafter", ["chain", "tree", "dynamic", "group", "union"])
@pytest.mark.parametrize("controller", controllers())
def test_every_controller_leaves_the_text_of_the_seed(controller: str, drafter: str) -> None:
    """The text does not depend on how much is drafted, nor on the clock or bandit that decides it."""
    target, draft = llamas()
    built: Controller = build_controller(controller)
    speculative = engine(target, drafters(target, draft)[drafter], None, built, max_batch=4)
    assert outputs(speculative, requests()) == plain()


class Erratic(ConstantController):
    """Another length in every round: 0 to 5 levels, by a count that knows nothing of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def budget(self, context, batch_size):  # type: ignore[no-untyped-def]
        self.calls += 1
        usual = super().budget(context, batch_size)
        return replace(usual, max_depth=self.calls * 7 % 6, max_nodes=1 + self.calls * 5 % 9)


@pytest.mark.parametrize("drafter", ["chain", "tree", "dynamic", "union"])
def test_any_lengths_and_sizes_give_the_text_of_the_seed(drafter: str) -> None:
    target, draft = llamas()
    speculative = engine(target, drafters(target, draft)[drafter], None, Erratic(), max_batch=3)
    assert outputs(speculative, requests()) == plain()


def joined_one_by_one(speculative: Engine, seeded: list[Request]) -> list[list[int]]:
    """A request joins every second round, beside greedy and unseeded ones, one of which is cancelled half-way."""
    finished: dict[int, Running] = {}
    ids: list[int] = []
    others = [Request(PROMPTS[0], SamplingParams(), 12), Request(PROMPTS[3], SamplingParams(temperature=1.0), 40)]
    cancelled = [speculative.add(request) for request in others][-1]
    waiting, turn = list(seeded), 0
    while waiting or speculative.busy:
        if waiting and turn % 2 == 0:
            ids.append(speculative.add(waiting.pop(0)))
        if turn == 5:
            speculative.cancel(cancelled)
        for run, emission in speculative.step():
            if emission.finish_reason is not None:
                finished[run.id] = run
        turn += 1
    return [finished[request_id].output for request_id in ids]


@pytest.mark.parametrize("drafter", ["chain", "tree", "dynamic", "group", "union"])
def test_joining_and_leaving_beside_others(drafter: str) -> None:
    target, draft = llamas()
    speculative = engine(target, drafters(target, draft)[drafter], max_batch=5)
    assert joined_one_by_one(speculative, requests()) == plain()


def test_drafts_are_accepted_in_these_cells() -> None:
    """Or equality would say little."""
    target, draft = llamas()
    runs = serve(engine(target, ModelDrafter(draft, k=4), max_batch=4), requests())
    accepted = sum(run.stats.num_accepted_tokens for run in runs)
    assert accepted > 0.2 * sum(len(run.output) for run in runs)


def test_seeds_and_modes_make_different_texts() -> None:
    """Equal seeds with one prompt and one sampler agree; nothing else does."""
    texts = plain()
    assert len({tuple(text) for text in texts}) == len(texts)
    target, _ = llamas()
    sampled = SamplingParams(temperature=1.0)
    first, same, other = outputs(engine(target), [Request(PROMPTS[0], sampled, 20, seed=seed) for seed in (4, 4, 5)])
    assert first == same != other
