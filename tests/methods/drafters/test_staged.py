"""The staged drafter: a spine, its siblings, and how the budget is shared out.

Its distribution is tested in tests/methods/verifiers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.staged import StagedDrafter
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import LanguageModel
from foretoken.models.other.table import TableModel
from toys import next_logits, tables

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SamplingParams(temperature=1.0)


def propose(drafter: Drafter, params: SamplingParams = T1, budget: Budget | None = None, seed: int = 0) -> TokenTree:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(params, len(PROMPT)), Rng(seed))
    drafter.start(context)
    tree = drafter.propose(context, budget or Budget(32, 64))
    drafter.finish(context)
    return tree


def staged(draft: LanguageModel | None = None, inner: Drafter | None = None, **options: Any) -> StagedDrafter:
    return StagedDrafter(draft or tables()[1], inner or NgramDrafter(n=2), inner_rule, **options)


def test_a_spine_with_leaves() -> None:
    tree = propose(staged(k=3, width=3))
    assert tree.parents == (-1, 0, 1, 2, 0, 0, 1, 1, 2, 2)
    assert tree.q_rows == (-1, 0, 1, 2, 0, 0, 1, 1, 2, 2)
    assert tree.kind is Kind.WITHOUT_REPLACEMENT
    for children in tree.children:
        assert len({tree.tokens[child] for child in children}) == len(children)


@pytest.mark.parametrize(
    ("budget", "parents"),
    [
        (Budget(9, 9), (-1, 0, 1, 2, 0, 0, 1, 1, 2, 2)),
        (Budget(9, 8), (-1, 0, 1, 2, 0, 0, 1, 1, 2)),
        (Budget(9, 4), (-1, 0, 1, 2, 0)),
        (Budget(9, 3), (-1, 0, 1, 2)),
        (Budget(9, 2), (-1, 0, 1)),
        (Budget(2, 9), (-1, 0, 1, 0, 0, 1, 1)),
        (Budget(1, 1), (-1, 0)),
        (Budget(0, 9), (-1,)),
    ],
)
@pytest.mark.parametrize("params", [T1, SamplingParams()], ids=["sampled", "greedy"])
def test_the_spine_comes_before_its_siblings(params: SamplingParams, budget: Budget, parents: tuple[int, ...]) -> None:
    assert propose(staged(k=3, width=3), params, budget).parents == parents


def test_the_spine_is_the_cascades_chain() -> None:
    for seed in range(5):
        chain = propose(CascadeDrafter(tables()[1], NgramDrafter(n=2), inner_rule, k=4), seed=seed)
        tree = propose(staged(k=4, width=2), seed=seed)
        assert tree.tokens[:5] == chain.tokens
        torch.testing.assert_close(tree.q, chain.q)
        assert propose(staged(k=4, width=1), seed=seed).tokens == chain.tokens
    narrow = staged(k=4, width=1)
    assert (narrow.traits.kind, narrow.traits.draws_trees, propose(narrow).kind) == (Kind.IID, False, Kind.IID)


def test_a_stop_ends_the_spine_and_what_would_hang_from_it() -> None:
    """How many siblings a place gets does not depend on where the spine was stopped."""
    seen = set()
    for seed in range(60):
        whole = propose(staged(k=4, width=2), budget=Budget(9, 6), seed=seed)
        cut = propose(staged(k=4, width=2), budget=Budget(9, 6, min_confidence=0.3), seed=seed)
        assert whole.parents == (-1, 0, 1, 2, 3, 0, 1)
        length = max(cut.depths)
        assert cut.tokens[: length + 1] == whole.tokens[: length + 1]
        assert cut.parents == (*range(-1, length), *range(min(2, length)))
        seen.add(length)
    assert seen == {1, 2, 3, 4}


def test_greedy_siblings_are_the_next_best_tokens() -> None:
    draft = tables()[1]
    tree = propose(staged(draft, k=3, width=3), SamplingParams())
    assert (tree.kind, tree.q) == (Kind.POINT, None)
    for place in range(3):
        logits = next_logits(draft, [*PROMPT, *tree.tokens[1 : place + 1]])
        assert [tree.tokens[child] for child in tree.children[place]] == logits.topk(3).indices.tolist()


def test_greedy_siblings_beside_a_token_that_penalties_chose() -> None:
    """The pipeline's best token is not the logits' best one: neither comes twice."""
    draft = TableModel(lambda prefix: [0.5, 0.3, 0.15, 0.05], 4)
    tree = propose(staged(draft, k=1, width=9), SamplingParams(logit_bias={2: 5.0}))
    assert tree.tokens[1:] == (2, 0, 1, 3)


def test_siblings_are_drawn_without_replacement() -> None:
    distribution = [0.5, 0.3, 0.2]
    draft = TableModel(lambda prefix: distribution, 3)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(3000):
        pair = tuple(propose(staged(draft, ScriptedDrafter(), k=1, width=2), seed=seed).tokens[1:])
        counts[pair] = counts.get(pair, 0) + 1
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    expected = [3000 * distribution[a] * distribution[b] / (1 - distribution[a]) for a, b in pairs]
    assert set(counts) == set(pairs)
    assert chisquare([counts[pair] for pair in pairs], expected).pvalue > 1e-4


def test_no_more_siblings_than_possible_tokens() -> None:
    draft = TableModel(lambda prefix: [0.6, 0.4, 0.0, 0.0], 4)
    assert sorted(propose(staged(draft, k=1, width=4)).tokens[1:]) == [0, 1]


@pytest.mark.parametrize(
    ("options", "words"), [({"width": 0}, "staged needs width >= 1, not 0"), ({"k": 0}, "staged needs k >= 1, not 0")]
)
def test_wrong_options(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        staged(**options)
