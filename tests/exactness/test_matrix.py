"""The exactness matrix: every drafter of the registry x every lossless verifier x sampling modes x batch sizes.

Greedy output is compared token by token with plain decoding through the same loop and with ``transformers.generate``;
the distribution of sampled output, which is enumerated, with the target's; sampled output with itself in other batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cases import CASES
from exact_cells import BATCH, TINY, Reference, differences, reference
from matrix import (
    AUTO,
    GREEDY_MODES,
    SAMPLED_BATCH,
    SAMPLED_MODES,
    Pair,
    ban,
    pairs,
    rows,
    rows_by_name,
    sampled_chance,
    toy_models,
)
from transformers import LogitsProcessorList

from foretoken import registry
from foretoken.engine.request import Request
from toys import FALSE_ALARM, engine, llama, llamas, outputs, tables

NEW_TOKENS = 44
PROMPTS = [
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],  # repetitive: n-grams match
    [3],  # one token
    [0, 0, 31, 0],  # token 0
    [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12, 9, 1],
]
TEST_PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
TABLE_TOKENS = 4

GREEDY_PAIRS, SAMPLED_PAIRS = pairs(greedy=True), pairs(greedy=False)
AUTO_PAIRS = [pair for pair in SAMPLED_PAIRS if pair.auto]


def each(cells: list[Pair]) -> Any:
    return pytest.mark.parametrize("pair", cells, ids=lambda pair: pair.id)


@pytest.mark.parametrize("name", [row.name for row in registry.rows("drafter")])
def test_every_drafter_is_in_the_matrix(name: str) -> None:
    assert CASES.get(name), f"add drafter {name!r} to the matrix: one line in tests/exactness/cases.py"


def test_no_case_without_a_registry_row() -> None:
    assert set(CASES) == {row.name for row in registry.rows("drafter")}


def test_the_matrix_covers_every_lossless_verifier() -> None:
    covered = {pair.verifier for pair in GREEDY_PAIRS + SAMPLED_PAIRS}
    assert covered == {AUTO} | {row.name for row in registry.rows("verifier") if row.lossless}


def test_only_drafts_that_other_requests_change_are_not_tested_with_seeds() -> None:
    assert {pair.drafter for pair in SAMPLED_PAIRS if not pair.seeded} == {"online"}
    assert all(pair.seeded for pair in AUTO_PAIRS)


# -- greedy ----------------------------------------------------------------------------------------------------------


def greedy_requests() -> list[Request]:
    return [Request(prompt, GREEDY_MODES[mode], NEW_TOKENS) for mode in GREEDY_MODES for prompt in PROMPTS]


@cache
def plain_greedy(dtype: torch.dtype) -> list[list[int]]:
    return outputs(engine(llamas(dtype)[0]), greedy_requests())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_plain_greedy_equals_transformers(dtype: torch.dtype) -> None:
    keywords: dict[str, dict[str, Any]] = {
        "greedy": {},
        "repetition": {"repetition_penalty": 1.3},
        "processor": {"logits_processor": LogitsProcessorList([ban])},  # type: ignore[list-item]
    }
    for request, tokens in zip(greedy_requests(), plain_greedy(dtype), strict=True):
        mode = next(name for name, params in GREEDY_MODES.items() if params is request.params)
        if mode in keywords:
            ids = torch.tensor([list(request.prompt)])
            generated = llama(dtype=dtype).generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, **keywords[mode]
            )
            assert tokens == generated[0, ids.shape[1] :].tolist(), (mode, request.prompt)


def test_the_greedy_texts_are_not_trivial() -> None:
    assert all(len(set(tokens)) > 5 for tokens in plain_greedy(torch.float64))


@each([pair for pair in GREEDY_PAIRS if pair.auto])
def test_greedy_in_a_ragged_batch(pair: Pair) -> None:
    """Every prompt plainly and every other mode with one of them, 44 tokens, through a batch of four."""
    target, draft = llamas()
    speculative = engine(target, pair.case.build(target, draft), max_batch=4)
    chosen = [0, 1, 2, 3, 5, 10, 15]
    requests, plain = greedy_requests(), plain_greedy(torch.float64)
    assert outputs(speculative, [requests[i] for i in chosen]) == [plain[i] for i in chosen]


@each([pair for pair in GREEDY_PAIRS if not pair.auto])
def test_greedy_under_every_verifier(pair: Pair) -> None:
    """Every mode once and every prompt once, sixteen tokens."""
    target, draft = llamas()
    speculative = engine(target, pair.case.build(target, draft), pair.make_verifier(), max_batch=4)
    requests = [replace(request, max_new_tokens=16) for request in greedy_requests()[::5]]
    assert outputs(speculative, requests) == [tokens[:16] for tokens in plain_greedy(torch.float64)[::5]]


@each([pair for pair in GREEDY_PAIRS if pair.auto])
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float64, 1), (torch.float32, 1), (torch.float32, 4)])
def test_greedy_in_other_precisions_and_alone(pair: Pair, dtype: torch.dtype, batch: int) -> None:
    target, draft = llamas(dtype)
    speculative = engine(target, pair.case.build(target, draft), max_batch=batch)
    assert outputs(speculative, greedy_requests()[::5]) == plain_greedy(dtype)[::5]


# -- sampled ---------------------------------------------------------------------------------------------------------


@cache
def own_distributions(network: bool) -> Reference:
    case = next(case for _, case in rows() if case.network == network)
    return reference(toy_models(case)[0])


@each([pair for pair in SAMPLED_PAIRS if not pair.races and not pair.learns])
def test_the_distribution_is_exactly_the_targets(pair: Pair) -> None:
    """Every outcome of drafting, verification and plain draws, with its probability: nothing is sampled."""
    target, draft = toy_models(pair.case)
    speculative = engine(target, pair.case.build(target, draft), pair.make_verifier(), max_batch=BATCH)
    results = differences(speculative, own_distributions(pair.case.network))
    assert max(result.difference for result in results.values()) < TINY, results


@cache
def raced(network: bool) -> list[list[int]]:
    case = next(case for _, case in rows() if case.network == network)
    return outputs(engine(toy_models(case)[0]), race_requests())


def race_requests() -> list[Request]:
    return [Request(TEST_PROMPT, params, 12, seed=seed) for seed in range(4) for params in SAMPLED_MODES.values()]


@each([pair for pair in SAMPLED_PAIRS if pair.races])
def test_a_race_writes_what_plain_decoding_writes(pair: Pair) -> None:
    """Where noise decides, a seed has one text.  ``test_seeds.py`` has longer ones and larger vocabularies,
    ``test_planted_coupled_errors.py`` the distribution over seeds."""
    target, draft = toy_models(pair.case)
    speculative = engine(target, pair.case.build(target, draft), pair.make_verifier(), max_batch=4)
    assert outputs(speculative, race_requests()) == raced(pair.case.network)


@each([pair for pair in SAMPLED_PAIRS if pair.learns and not pair.races])
def test_sampled_distribution_while_the_drafter_learns(pair: Pair) -> None:
    """Its drafts depend on who came before, so that its outcomes cannot be enumerated."""
    target, draft = toy_models(pair.case)
    speculative = engine(target, pair.case.build(target, draft), pair.make_verifier(), max_batch=SAMPLED_BATCH)
    assert sampled_chance(speculative, target) > FALSE_ALARM


@pytest.mark.parametrize("name", ["plain", "model.chain", "model.iid-tree", "model.wor-tree", "jacobi.repeat"])
def test_sampled_distribution_with_the_engines_own_numbers(name: str) -> None:
    """Uniforms and noise of requests without a seed, which the cells above put others in the place of."""
    case = dict(rows_by_name()).get(name)
    target, draft = tables(closeness=0.1, seed=3)
    speculative = engine(target, case and case.build(target, draft), max_batch=SAMPLED_BATCH)
    assert sampled_chance(speculative, target) > FALSE_ALARM


@each([pair for pair in SAMPLED_PAIRS if pair.seeded])
def test_the_first_samples_are_the_same_alone(pair: Pair) -> None:
    """The distribution is enumerated in batches: what comes out four at a time is what comes out one at a time."""
    target, draft = toy_models(pair.case)
    requests = [
        Request(TEST_PROMPT, params, TABLE_TOKENS, seed=seed) for seed in range(2) for params in SAMPLED_MODES.values()
    ]
    together, alone = (
        outputs(engine(target, pair.case.build(target, draft), pair.make_verifier(), max_batch=size), requests)
        for size in (4, 1)
    )
    assert together == alone
