"""What drafters know of a request."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretoken.core import Context, Rng, Scores, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams


def test_the_samplers_old_name_works_and_says_so() -> None:
    context = Context(0, [1, 2], 2, Sampler(SamplingParams(), 0), Rng(0))
    with pytest.warns(DeprecationWarning, match=r"context\.sampler"):
        assert context.maker is context.sampler
    scores = Scores(torch.zeros(1, 4), TokenTree.root_only(2), [1, 2], context.sampler)
    with pytest.warns(DeprecationWarning, match=r"scores\.sampler"):
        assert scores.maker is scores.sampler


def test_copies_of_a_protected_context_can_be_changed() -> None:
    context = Context(0, [1, 2], 2, Sampler(SamplingParams(), 0), Rng(0))
    context.salt = "a"
    context.protect()
    with pytest.raises(TypeError, match=r"context\.tokens is read-only: only the engine sets it"):
        context.tokens = [*context.tokens, 3]
    context.source = "grammar"
    for other in (copy.copy(context), copy.deepcopy(context), replace(context, request_id=0)):
        assert (other.salt, other.source) == ("a", "grammar")
        other.tokens = [*other.tokens, 3]
    assert context.tokens == [1, 2]


def test_all_bits_of_a_seed_count() -> None:
    seeds = [7, 8, 7 + 2**32, 7 + 2**63, 2**64 - 1]
    assert len({tuple(Rng(seed).uniforms(3)) for seed in seeds}) == len(seeds)
    assert Rng(2**63).uniforms(300) == Rng(2**63).uniforms(300)


def test_coins_are_no_noise() -> None:
    """They come from the same kind of generator: with the same numbers a draft's coins would depend on its tokens."""
    coins = set(Rng(7).uniforms(Rng.BLOCK))
    raw = np.random.Philox(key=7, counter=[0, 0, 0, 0]).random_raw(4 * Rng.BLOCK)
    assert not coins & {float(bits >> np.uint64(11)) * 2.0**-53 for bits in raw}


@pytest.mark.parametrize("before", [0, 1, Rng.BLOCK - 1, Rng.BLOCK, Rng.BLOCK + 1, 3 * Rng.BLOCK])
@pytest.mark.parametrize("after", [0, 1, Rng.BLOCK, 2 * Rng.BLOCK + 5])
def test_uniforms_are_handed_out_again(before: int, after: int) -> None:
    rng = Rng(7)
    rng.tests = [(0.5, 0.25, 1)]
    rng.uniforms(before)
    mark = rng.mark()
    expected = rng.uniforms(after)
    rng.tests += [(0.1, 0.2, None)] * after
    rng.back_to(mark)
    assert rng.uniforms(after) == expected and rng.tests == [(0.5, 0.25, 1)]
    assert rng.uniforms(9) == Rng(7).uniforms(before + after + 9)[-9:]
