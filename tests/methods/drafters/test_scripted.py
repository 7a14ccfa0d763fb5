"""The scripted drafter proposes what it was told."""

from __future__ import annotations

import pytest

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.scripted import ScriptedDrafter


def context(tokens: list[int], prompt_length: int) -> Context:
    return Context(0, tokens, prompt_length, Sampler(SamplingParams()), Rng(0))


def test_the_same_tokens_every_round() -> None:
    drafter = ScriptedDrafter("5 0 7")
    assert drafter.propose(context([1, 2], 2), Budget()).tokens == (2, 5, 0, 7)
    assert drafter.propose(context([1, 2, 3], 2), Budget()).tokens == (3, 5, 0, 7)
    assert not drafter.traits.draws_trees


def test_the_budget_limits_the_script() -> None:
    drafter = ScriptedDrafter("5 0 7")
    assert drafter.propose(context([2], 1), Budget(2, 64)).tokens == (2, 5, 0)
    assert drafter.propose(context([2], 1), Budget(64, 1)).tokens == (2, 5)


def test_a_script_of_the_output_goes_on_where_the_output_stands() -> None:
    drafter = ScriptedDrafter(script=[10, 11, 12, 13, 14], as_output=True)
    assert drafter.propose(context([1, 2], 2), Budget(2)).tokens == (2, 10, 11)
    assert drafter.propose(context([1, 2, 10, 11, 12], 2), Budget(8)).tokens == (12, 13, 14)
    assert drafter.propose(context([1, 2, *range(10, 15)], 2), Budget(8)).tokens == (14,)


def test_a_function() -> None:
    drafter = ScriptedDrafter(propose=lambda context, budget: TokenTree((context.root, 3, 4), (-1, 0, 0)))
    assert drafter.traits.draws_trees
    assert drafter.propose(context([9], 1), Budget()).tokens == (9, 3, 4)


def test_tokens_must_be_numbers() -> None:
    with pytest.raises(ValueError, match="ids separated by spaces, not '1 two'"):
        ScriptedDrafter("1 two")
