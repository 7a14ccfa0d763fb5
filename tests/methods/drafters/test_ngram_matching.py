"""``ngram`` against a plain search, Transformers' candidate generator and vLLM's rule."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.ngram import NgramDrafter


def drafts(drafter: NgramDrafter, text: list[int], step: int) -> dict[int, list[int]]:
    """The draft at every ``step`` tokens of a text that grows."""
    context = Context(0, text[:1], 1, Sampler(SamplingParams(), 1), Rng(0))
    chains = {}
    for end in range(1, len(text) + 1, step):
        context.tokens[:] = text[:end]
        chains[end] = list(drafter.propose(context, Budget(max_depth=64)).tokens[1:])
    return chains


def plain(text: list[int], sizes: range, k: int, recent: bool) -> list[int]:
    """Longest n-gram first, every place tried."""
    for n in reversed(sizes):
        ends = [end for end in range(n, len(text)) if n < len(text) and text[end - n : end] == text[-n:]]
        if ends:
            end = ends[-1] if recent else ends[0]
            return text[end : end + k]
    return []


def random_text(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2 + 3 * seed) for _ in range(160)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "min_n"), [(3, 1), (2, 2), (5, 3)])
@pytest.mark.parametrize("match", ["recent", "first"])
def test_against_a_plain_search(seed: int, n: int, min_n: int, match: str) -> None:
    text = random_text(seed)
    drafter = NgramDrafter(n=n, min_n=min_n, k=4, match=match)
    for end, draft in drafts(drafter, text, step=1 + seed).items():
        assert draft == plain(text[:end], range(min_n, n + 1), 4, match == "recent"), end


@pytest.mark.parametrize("seed", range(4))
def test_against_transformers(seed: int) -> None:
    reference = PromptLookupCandidateGenerator(max_matching_ngram_size=2, num_output_tokens=10, max_length=10_000)
    text, count = random_text(seed), 0
    for end, draft in drafts(NgramDrafter(n=2, k=10, match="first"), text, step=3).items():
        if end > 1:
            ids = torch.tensor([text[:end]])
            candidates = reference.get_candidates(ids)[0][0, end:].tolist()
            assert draft == candidates, end
            count += len(candidates)
    assert count > 20


def vllm_rule(text: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    """vLLM's ``ngram`` proposer: longest suffix of min_n..max_n tokens that occurs before, earliest place.

    By the prefix function of the reversed text, as vLLM does it.
    """
    backwards, best, place = text[::-1], 0, 0
    prefix = [0] * len(backwards)
    length = 0
    for i in range(1, len(backwards)):
        while length and backwards[i] != backwards[length]:
            length = prefix[length - 1]
        if backwards[i] == backwards[length]:
            length += 1
        if length >= best:  # later in the reversed text is earlier in the text
            best, place = length, i
        if i < max_n:
            prefix[i] = length
        if length == max_n:
            length = prefix[max_n - 1]
    if best < min_n:
        return []
    start = len(text) - 1 - place + best
    return text[start : start + k]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("min_n", "max_n"), [(5, 5), (2, 4), (1, 3)])
def test_against_vllm(seed: int, min_n: int, max_n: int) -> None:
    text = random_text(seed)
    for end, draft in drafts(NgramDrafter(n=max_n, min_n=min_n, k=5, match="first"), text, step=3).items():
        assert draft == vllm_rule(text[:end], min_n, max_n, 5), end
