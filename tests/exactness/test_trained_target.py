"""The rows of ``early_exit`` in the exactness matrix on a target that was trained for it by a low-rank update.

The other trained drafters have weights of their own, and stand beside the matrix's target; this training makes another
target, so that its plain output and its distributions are others too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from exact_cells import BATCH, CAUGHT, TINY, Reference, differences, reference
from matrix import GREEDY_MODES, SAMPLED_MODES, Pair, pairs
from test_matrix import NEW_TOKENS, PROMPTS, each, greedy_requests

from foretoken.engine.request import Request
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.low_rank import add_low_rank, merge_low_rank
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.early_exit import EarlyExitRecipe
from toys import engine, llama, outputs, serve

STEPS, TEXTS, LENGTH = 40, 4, 40
SETTINGS = {"layer": "1", "exits": "layer", "labels": "target", "dropout": "0", "rank": "2"}


@cache
def trained_llama(vocab: int, dtype: torch.dtype = torch.float64) -> Any:
    """The matrix's target after a short training on texts of its own, merged."""
    if dtype != torch.float64:
        return copy.deepcopy(trained_llama(vocab)).to(dtype)
    network = copy.deepcopy(llama(vocab))
    add_low_rank(network, 2)
    target = HuggingFaceModel(network, lean=False)
    recipe = EarlyExitRecipe(target, TargetParts(target), SETTINGS)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=2e-2)
    generator = torch.Generator().manual_seed(1)
    for step, tokens in enumerate(_written(vocab).split(TEXTS)):
        with torch.enable_grad():
            recipe.loss(Batch(tokens, {}, recipe.parts, step, STEPS), generator).backward()
        optimizer.step()
        optimizer.zero_grad()
    merge_low_rank(network, torch.float64)
    return network.requires_grad_(False)


def _written(vocab: int) -> torch.Tensor:
    """Texts that the untrained target draws, [STEPS * TEXTS, LENGTH + 1]."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        first = torch.randint(vocab, (STEPS * TEXTS, 1))
        texts: torch.Tensor = llama(vocab).generate(
            first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, max_new_tokens=LENGTH
        )
    return texts


def target(vocab: int = 32, dtype: torch.dtype = torch.float64) -> HuggingFaceModel:
    return HuggingFaceModel(trained_llama(vocab, dtype))


def rows(greedy: bool) -> list[Pair]:
    return [pair for pair in pairs(greedy) if pair.drafter == "early_exit"]


@cache
def plain(dtype: torch.dtype) -> list[list[int]]:
    return outputs(engine(target(dtype=dtype)), greedy_requests())


@cache
def distributions() -> Reference:
    return reference(target(4))


def test_training_made_another_target_whose_exits_guess_better() -> None:
    before, after = (HuggingFaceModel(network) for network in (llama(), trained_llama(32)))
    assert TargetParts(after).fingerprint().difference(TargetParts(before).fingerprint())
    assert plain(torch.float64) != outputs(engine(before), greedy_requests())
    requests = [Request(prompt, GREEDY_MODES["greedy"], NEW_TOKENS) for prompt in PROMPTS]
    untrained, trained = (
        sum(run.stats.num_accepted_tokens for run in serve(engine(model, EarlyExitDrafter(model, 1, k=3)), requests))
        for model in (before, after)
    )
    assert trained > untrained


def test_plain_output_is_that_of_transformers() -> None:
    for prompt, tokens in zip(PROMPTS, plain(torch.float64), strict=False):
        ids = torch.tensor([prompt])
        generated = trained_llama(32).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        assert tokens == generated[0, len(prompt) :].tolist()


AUTO_ROWS = [pair for pair in rows(greedy=False) if pair.auto]


@each(AUTO_ROWS)
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float64, 4), (torch.float64, 1), (torch.float32, 3)])
def test_greedy(pair: Pair, dtype: torch.dtype, batch: int) -> None:
    model = target(dtype=dtype)
    speculative = engine(model, pair.case.build(model, model), max_batch=batch)
    assert outputs(speculative, greedy_requests()[::5]) == plain(dtype)[::5]


@each([pair for pair in rows(greedy=True) if not pair.auto])
def test_greedy_under_every_verifier(pair: Pair) -> None:
    model = target()
    speculative = engine(model, pair.case.build(model, model), pair.make_verifier(), max_batch=4)
    requests = [replace(request, max_new_tokens=12) for request in greedy_requests()[::5]]
    assert outputs(speculative, requests) == [tokens[:12] for tokens in plain(torch.float64)[::5]]


@each([pair for pair in rows(greedy=False) if not pair.races])
def test_the_distribution_is_exactly_the_targets(pair: Pair) -> None:
    model = target(4)
    speculative = engine(model, pair.case.build(model, model), pair.make_verifier(), max_batch=BATCH)
    results = differences(speculative, distributions())
    assert max(result.difference for result in results.values()) < TINY, results


def test_the_distribution_is_not_that_of_the_base() -> None:
    """The negative control: the untrained target's distributions do not describe the texts."""
    model = target(4)
    base = reference(HuggingFaceModel(llama(4)))
    results = differences(engine(model, EarlyExitDrafter(model, 1, k=3), max_batch=BATCH), base, ["T=1"])
    assert results["T=1"].difference > CAUGHT


@each(AUTO_ROWS)
def test_the_batch_changes_no_sample(pair: Pair) -> None:
    requests = [
        Request(p, params, 24, seed=i)
        for i, (p, params) in enumerate(zip(PROMPTS, SAMPLED_MODES.values(), strict=True))
    ]
    together, alone = (
        outputs(engine(model, pair.case.build(model, model), max_batch=size), requests)
        for size, model in ((4, target()), (1, target()))
    )
    assert together == alone
