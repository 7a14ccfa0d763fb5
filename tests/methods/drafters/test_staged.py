"""The staged drafter: a spine, its siblings, and how the budget is shared out.

Its distribution is tested in tests/methods/verifiers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.staged import StagedDrafter
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import LanguageModel
from foretoken.models.other.table import TableModel
from toys import next_logits, tables

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SamplingParams(temperature=1.0)


def propose(
    drafter: Drafter, params: SamplingParams = T1, budget: Budget | None = None, seed: int = 0, noise: bool = False
) -> TokenTree:
    sampler = Sampler(params, len(PROMPT), Noise(seed)) if noise else Sampler(params, len(PROMPT))
    context = Context(0, list(PROMPT), len(PROMPT), sampler, Rng(seed))
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


# -- below the siblings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("params", "noise"), [(T1, False), (SamplingParams(), False), (T1, True)])
def test_siblings_go_on(params: SamplingParams, noise: bool) -> None:
    """Every place of the shape is filled, each chain of first children in one piece, its siblings behind it."""
    tree = propose(staged(tree="2x2x1"), params, noise=noise)
    assert tree.parents == (-1, 0, 1, 2, 0, 1, 4, 6, 4, 5, 8)
    assert tree.kind is (Kind.WITHOUT_REPLACEMENT if params.temperature and not noise else Kind.POINT)
    for children in tree.children:
        assert len({tree.tokens[child] for child in children}) == len(children)


@pytest.mark.parametrize("shape", ["3x2x1", "2x2x2", "sequoia,nodes=12,depth=4,acceptance=0.5 0.25 0.2"])
@pytest.mark.parametrize("inner", [lambda: NgramDrafter(n=1), lambda: ModelDrafter(tables()[0], k=3)])
@pytest.mark.parametrize("few", [Budget(32, 64), Budget(2, 64), Budget(32, 7), Budget(0, 9)])
def test_what_every_node_was_drawn_from_is_the_models_own(
    shape: str, inner: Callable[[], Drafter], few: Budget
) -> None:
    """Whatever guesses for the model, below siblings as along the spine."""
    draft = tables()[1]
    for seed in range(4):
        tree = propose(staged(draft, inner(), tree=shape), budget=few, seed=seed)
        assert len(tree) > 1 or not few.max_depth
        for node in range(1, len(tree)):
            logits = next_logits(draft, [*PROMPT, *(tree.tokens[n] for n in tree.path(tree.parents[node])[1:])])
            torch.testing.assert_close(tree.distribution(node), torch.softmax(logits, -1))


def test_greedy_trees_are_the_draft_models_own() -> None:
    draft = tables()[1]
    for shape in ("3x2x1", "2x1x2x1"):
        staged_tree, model_tree = (
            propose(staged(draft, tree=shape), SamplingParams()),
            propose(ModelDrafter(draft, tree=shape, draw="greedy"), SamplingParams()),
        )
        assert paths(staged_tree) == paths(model_tree)


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}


def test_tokens_below_a_sibling_are_drawn_for_that_one() -> None:
    """The first child of a sibling follows the model's distribution after it: counted, with an inner drafter that is
    always wrong or right."""
    rows = [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.7, 0.1]]
    draft = TableModel(lambda prefix: rows[prefix[-1]], 3)
    for guess in ("0 0 0", "1 1 1"):
        counts = torch.zeros(3, 3)
        for seed in range(1500):
            tree = propose(staged(draft, ScriptedDrafter(guess), tree="2x1"), seed=seed)
            below = tree.tokens[tree.children[tree.children[0][1]][0]]
            counts[tree.tokens[tree.children[0][1]], below] += 1
        for token in range(3):
            expected = torch.tensor(rows[token]) * counts[token].sum()
            assert chisquare(counts[token].numpy(), expected.numpy()).pvalue > 1e-4


def test_stages_take_fewer_forwards_than_levels() -> None:
    """An inner drafter that is right writes every chain of a stage in one round."""
    draft = TableModel(lambda prefix: [0.9 if t == (prefix[-1] + 1) % 4 else 0.1 / 3 for t in range(4)], 4)
    calls: list[int] = []
    forward = draft.forward
    draft.forward = lambda feeds, *rest: calls.append(len(feeds)) or forward(feeds, *rest)  # type: ignore[method-assign, func-returns-value]
    knows = ScriptedDrafter(
        propose=lambda context, budget: TokenTree.chain(
            context.root, [(context.root + i) % 4 for i in range(1, budget.max_depth + 1)]
        )
    )
    tree = propose(staged(draft, knows, tree="2x1x1x1x1"), SamplingParams())
    assert max(tree.depths) == 5 and len(tree) == 11
    assert len(calls) == 2


def test_a_stop_ends_what_is_below_a_sibling() -> None:
    """Its token stays; what a stop does not concern keeps its shape."""
    cut = 0
    for seed in range(40):
        whole = propose(staged(tree="2x2x1"), budget=Budget(9, 64), seed=seed)
        tree = propose(staged(tree="2x2x1"), budget=Budget(9, 64, min_confidence=0.3), seed=seed)
        assert len(whole) == 11
        cut += 11 - len(tree)
        for node in range(1, len(tree)):
            sure = float(tree.distribution(node)[tree.tokens[node]])
            assert sure >= 0.3 or not tree.children[node]
    assert cut


def test_shapes_that_are_none() -> None:
    for tree, words in (
        ("0x2", "positive child counts per level"),
        ("eagle2", "tree='eagle2' must be positive child counts"),
        ("4x4x4x4", "staged needs a tree of at most 256 nodes"),
    ):
        with pytest.raises(ValueError, match=words):
            staged(tree=tree)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, "staged needs width >= 1, not 0"),
        ({"k": 0}, "staged needs k >= 1, not 0"),
        ({"k": 16, "width": 17}, "staged needs a tree of at most 256 nodes, not k=16 times width=17"),
    ],
)
def test_wrong_options(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        staged(**options)
