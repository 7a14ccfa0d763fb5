"""Drafts from few tokens: requests that allow none of them, and a q over all tokens is caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from cases import few_tokens, guessing_few
from exact_cells import BATCH, CAUGHT, TINY, differences, reference
from torch import Tensor

from foretoken.core import TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import Feed, Rows
from toys import engine, llamas, outputs

PROMPTS = [[0, 1, 2, 3, 0, 1], [3], [2, 2, 1]]


class OverAll(ModelDrafter):
    """Tells the verifier a q that gives tokens a chance which could not be drawn."""

    def _finished(self, tree: Growing) -> TokenTree:
        finished = super()._finished(tree)
        return finished if finished.q is None else replace(finished, q=0.5 * finished.q + 0.5 / self.vocab_size)


@pytest.mark.parametrize("tree", ["", "2x2"])
def test_a_distribution_over_all_tokens_is_caught(tree: str) -> None:
    target, draft = llamas(vocab=4)
    right = reference(target, ["T=1"])

    def difference(drafter: Drafter) -> float:
        speculative = engine(target, guessing_few(drafter, draft), max_batch=BATCH)
        return differences(speculative, right, ["T=1"])["T=1"].difference

    assert difference(ModelDrafter(draft, k=3, tree=tree)) < TINY
    assert difference(OverAll(draft, k=3, tree=tree)) > CAUGHT


def even_tokens_only(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that allows nothing that the drafts could be."""
    filtered = scores.clone()
    filtered[:, 1::2] = -torch.inf
    return filtered


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["", "2x2", "eagle2"])
def test_requests_that_allow_none_of_the_tokens(tree: str, temperature: float) -> None:
    target, draft = llamas(vocab=8)
    modes = [
        SamplingParams(temperature=temperature, processors=(even_tokens_only,)),
        SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(1, 8, 2), -1e30)),
        SamplingParams(temperature=temperature),
    ]

    def texts(drafter: Drafter | None, seeds: bool) -> list[list[int]]:
        requests = [Request(p, params, 12, seed=5 if seeds else None) for params in modes for p in PROMPTS]
        return outputs(engine(target, drafter, max_batch=9), requests)

    drafter = guessing_few(ModelDrafter(draft, k=3, tree=tree, target=target), draft)
    assert texts(drafter, seeds=True) == texts(None, seeds=True)
    for text in texts(drafter, seeds=False)[:6]:
        assert len(text) == 12 and not any(token % 2 for token in text)


def test_the_models_own_projection_is_not_asked_for() -> None:
    target, draft = llamas()
    drafter = guessing_few(ModelDrafter(draft, k=3), draft)
    counts: list[int | None] = []
    forward = draft.forward

    def watched(feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        counts.extend(feed.wanted for feed in feeds)
        return forward(feeds, taps)

    draft.forward = watched  # type: ignore[method-assign]
    outputs(engine(target, drafter), [Request(PROMPTS[0], SamplingParams(), 12)])
    assert counts and set(counts) == {0}
    assert drafter.cost_beside(10**6) < ModelDrafter(draft, k=3).cost_beside(10**6)
    assert few_tokens(draft).size == 16
