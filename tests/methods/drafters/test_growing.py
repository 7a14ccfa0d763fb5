"""The tree that draft models and feature heads grow on a model's sequence, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from foretoken.core import Budget, Context, Kind, Rng
from foretoken.core.costs import TargetCost
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.dynamic import DynamicTree, beliefs
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.levels import choose_together
from foretoken.methods.trees.base import Candidates
from foretoken.methods.trees.counts import Levels
from foretoken.methods.trees.eagle2 import Eagle2

TEXT = [4, 5, 6]


def growing(budget: Budget | None = None, *, candidates: Candidates | None = None, **params: Any) -> Growing:
    sequence: Any = SimpleNamespace(scratch_tokens=[6])
    context = Context(0, list(TEXT), len(TEXT), Sampler(SamplingParams(**params)), Rng(0))
    limit = Budget(4, 16) if budget is None else budget
    return Growing(context, Levels((2, 1)), limit, 16, sequence, draws=False, candidates=candidates)


def test_nodes_have_their_places_paths_and_distributions() -> None:
    tree = growing(repetition_penalty=1.1)
    drawn = torch.tensor([0.5, 0.5])
    assert list(tree.add(0, [7, 8], drawn)) == [1, 2] and list(tree.add(2, [9], drawn)) == [3]
    assert tree.choices == [(), (0,), (1,), (1, 0)] and tree.path_of == [(), (7,), (8,), (8, 9)]
    assert tree.length(0) == 3 and tree.length(3) == 5
    assert tree.prefixes([1, 3]) == [[4, 5, 6, 7], [4, 5, 6, 8, 9]]
    assert growing().prefixes([0]) is None, "no distribution depends on the text"
    finished = tree.finished(Kind.IID)
    assert finished.tokens == (6, 7, 8, 9) and finished.parents == (-1, 0, 0, 2) and finished.kind is Kind.IID
    assert finished.q is not None and len(finished.q) == 2 and finished.q_rows == (-1, 0, 0, 1)


def test_points_carry_no_distribution() -> None:
    tree = growing()
    tree.add(0, [7])
    finished = tree.finished()
    assert finished.kind is Kind.POINT and finished.q is None and finished.tokens == (6, 7)


def test_the_frontier_enters_the_scratch_behind_its_parents() -> None:
    tree = growing()
    tree.add(0, [7, 8])
    tree.frontier = [1, 2]
    assert tree.enter(root=0) == [0, 0] and tree.scratch_of == {1: 1, 2: 2}
    tree.sequence.scratch_tokens = [6, 7, 8]  # type: ignore[misc]
    tree.add(2, [9])
    tree.frontier = [3]
    assert tree.enter(root=0) == [2] and tree.scratch_of[3] == 3


def test_growth_by_confidence_reads_the_best_and_keeps_what_pays() -> None:
    for costs, kept in ((None, 4), (TargetCost({1: 1.0, 2: 1.0, 64: 200.0}), 1)):
        tree = growing(candidates=Candidates([TEXT[-1]]))
        assert tree.candidates is not None
        grows = DynamicTree(Eagle2(), costs, width=2)
        assert grows.grow(tree, tree.candidates, [[7, 8]], [[-0.1, -2.0]], None, 2) == (
            [0, 0] if costs is None else [0]
        )
        assert tree.path_of == [(), (7,), (8,)] and tree.frontier == ([1, 2] if costs is None else [1])
        below = len(tree.frontier)
        rows = grows.grow(tree, tree.candidates, [[9]] * below, [[-0.5]] * below, None, 2)
        assert not rows and not tree.frontier, "the second of two levels is the last"
        assert grows.finished(tree, tree.candidates).num_drafts == kept


def test_a_stop_rule_ends_a_path_by_confidence_and_keeps_its_token() -> None:
    tree = growing(Budget(4, 16, min_confidence=0.5), candidates=Candidates([TEXT[-1]]))
    assert tree.candidates is not None
    sure = torch.log_softmax(torch.tensor([[0.0] * 7 + [3.0, 1.0]]), -1)
    values, tokens = sure.topk(2)
    DynamicTree(Eagle2(), None, 2).grow(tree, tree.candidates, tokens.tolist(), values.tolist(), sure, 4)
    assert tree.tokens == [6, 7, 8] and tree.frontier == [1]


def test_impossible_tokens_are_no_candidates() -> None:
    tree = growing(candidates=Candidates([TEXT[-1]]))
    assert tree.candidates is not None
    DynamicTree(Eagle2(), None, 2).grow(tree, tree.candidates, [[7, 8]], [[0.0, -float("inf")]], None, 4)
    assert tree.tokens == [6, 7]


def test_a_device_level_races_only_where_a_ranker_does() -> None:
    """With ``draw=greedy`` a request with noise gets the likeliest tokens, and once got the winners of the race."""
    logits, sampler = torch.linspace(0, 1, 12)[None], Sampler(SamplingParams(temperature=1.0), len(TEXT), Noise(3))
    sequence: Any = SimpleNamespace(scratch_tokens=[6])
    context, best = Context(0, list(TEXT), len(TEXT), sampler, Rng(0)), []
    for ranker in (None, sampler):
        tree = Growing(
            context, Levels((2, 1)), Budget(4, 16), 16, sequence,
            draws=False, ranker=ranker, candidates=Candidates([TEXT[-1]]),
        )  # fmt: skip
        choose_together([tree], [logits], lambda tree, node: 4, False)
        assert tree.ranked is not None
        assert torch.allclose(beliefs(tree, logits), tree.ranked[0].to(beliefs(tree, logits)))
        best.append(tree.ranked[1][0])
    assert best[0] == [11, 10, 9, 8] != best[1]
