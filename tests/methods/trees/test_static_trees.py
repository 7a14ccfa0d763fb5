"""Fixed trees: full levels, Medusa's published shape, Sequoia's programme against brute force and against time."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from foretoken.methods.trees.counts import Levels, Ranks
from foretoken.methods.trees.expansion import Expansion, expansion_choices
from foretoken.methods.trees.medusa_tree import MedusaTree
from foretoken.methods.trees.sequoia import Sequoia, best_shape, by_value, solve
from foretoken.methods.trees.shapes import Choice, choice_parents, expected_length, medusa_choices
from foretoken.registry import find, make

PUBLISHED = {1: 10, 2: 28, 3: 23, 4: 2}
"""Nodes per depth of Medusa's tree of 63 nodes (mc_sim_7b_63)."""
ACCURACIES = [
    [first * fall ** (rank**0.61) for rank in range(10)]
    for first, fall in ((0.642, 0.559), (0.669, 0.5), (0.369, 0.681), (0.401, 0.589))
]
"""Made for this test, not measured: accuracies of four heads that give the published shape."""


def is_closed(choices: Sequence[Choice]) -> bool:
    """Parents and earlier siblings come first."""
    places: set[Choice] = {()}
    for choice in choices:
        if choice[:-1] not in places or (choice[-1] and (*choice[:-1], choice[-1] - 1) not in places):
            return False
        places.add(choice)
    return True


def every_tree(nodes: int, depth: int, width: int) -> list[list[Choice]]:
    """All closed sets of ``nodes`` places within ``depth`` levels and ``width`` ranks."""
    trees: set[frozenset[Choice]] = {frozenset()}
    for _ in range(nodes):
        larger = set()
        for tree in trees:
            for parent in [(), *tree]:
                if len(parent) < depth:
                    rank = sum(choice[:-1] == parent for choice in tree if choice)
                    if rank < width:
                        larger.add(tree | {(*parent, rank)})
        trees = larger
    return [sorted(tree, key=lambda choice: (len(choice), choice)) for tree in trees]


# -- Medusa ----------------------------------------------------------------------------------------------------------


def test_the_published_shape() -> None:
    """63 nodes and the root, 10/28/23/2 per depth, 42 leaves, prefix- and sibling-closed."""
    choices = medusa_choices(ACCURACIES, 63)
    assert len(set(choices)) == 63 and Counter(map(len, choices)) == PUBLISHED
    parents = {choice[:-1] for choice in choices} - {()}
    assert len([choice for choice in choices if choice not in parents]) == 42
    assert is_closed(choices)
    assert max(choice[-1] for choice in choices) == 9
    assert len(choice_parents(choices)) == 63


def test_other_accuracies_give_another_shape() -> None:
    assert Counter(map(len, medusa_choices(ACCURACIES[::-1], 63))) != PUBLISHED


def test_the_method_is_the_construction() -> None:
    assert MedusaTree(63, 4, ACCURACIES).choices() == medusa_choices(ACCURACIES, 63)
    assert max(map(len, MedusaTree(40, 2).choices())) == 2
    with pytest.raises(ValueError, match="nodes >= 1 and depth >= 1"):
        MedusaTree(depth=0)


# -- expansion -------------------------------------------------------------------------------------------------------


def test_full_levels() -> None:
    assert expansion_choices((2, 2)) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    specinfer = Expansion("1x1x3x1x1x1x1x1").choices()
    assert Counter(map(len, specinfer)) == {1: 1, 2: 1, **dict.fromkeys(range(3, 9), 3)} and is_closed(specinfer)
    with pytest.raises(ValueError, match="positive child counts per level"):
        Expansion("3x0")


# -- Sequoia ---------------------------------------------------------------------------------------------------------


def vector(seed: int, width: int, falling: bool) -> list[float]:
    rng = random.Random(seed)
    weights = [rng.random() for _ in range(width)]
    chances = [weight / (sum(weights) + rng.random()) for weight in weights]
    return sorted(chances, reverse=True) if falling else chances


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_programme_equals_brute_force(seed: int, falling: bool) -> None:
    """Every size up to six, every depth up to three; also for chances that do not fall with the rank."""
    acceptance = vector(seed, 3, falling)
    solved = solve(acceptance, 6, 3)
    rows = [acceptance] * 3
    for nodes, depth in itertools.product(range(1, 7), (1, 2, 3)):
        trees = every_tree(nodes, depth, 3)
        exact = max((expected_length(tree, rows) for tree in trees), default=-math.inf)
        assert solved.best[depth][nodes + 1] == pytest.approx(exact)
        choices = solved.choices(nodes, depth)
        assert is_closed(choices) and len(choices) <= nodes and max(map(len, choices)) <= depth
        assert expected_length(choices, rows) == pytest.approx(solved.expected_length(nodes, depth))


def test_a_rank_that_was_never_right_does_not_hide_those_behind_it() -> None:
    """A measured chance of 0 (the third one's) once became NaN, and what lies behind it got no tree."""
    acceptance = (0.4, 0.2, 0.0, 0.2, 0.1)
    solved, nearly = (solve([chance or least for chance in acceptance], 30, 3) for least in (0.0, 1e-300))
    for nodes, depth in itertools.product((8, 16, 20, 30), (1, 2, 3)):
        assert solved.expected_length(nodes, depth) == pytest.approx(nearly.expected_length(nodes, depth))
    tree = solved.choices(30, 2)
    assert is_closed(tree) and expected_length(tree, [acceptance] * 2) == pytest.approx(2.71)


def test_falling_chances_make_it_medusas_tree() -> None:
    """With one falling vector for all levels the greedy construction is optimal too: two ways to one number."""
    acceptance = vector(9, 5, True)
    solved = solve(acceptance, 30, 6)
    for nodes in (1, 5, 12, 30):
        greedy = expected_length(medusa_choices([acceptance] * 6, nodes), [acceptance] * 6)
        assert solved.expected_length(nodes, 6) == pytest.approx(greedy)


def test_the_worked_example() -> None:
    """p = (.6, .2, .1): two nodes as a chain 1.96, as siblings 1.8; three: .6 + .36 + .216 against .6 + .36 + .2."""
    solved = solve((0.6, 0.2, 0.1), 4, 4)
    assert solved.expected_length(2, 4) == pytest.approx(1.96) and solved.expected_length(2, 1) == pytest.approx(1.8)
    assert solved.choices(3, 4) == [(0,), (0, 0), (0, 0, 0)]
    assert solved.choices(4, 4) == [(0,), (0, 0), (0, 0, 0), (1,)]
    assert solved.choices(4, 1) == [(0,), (1,), (2,)]  # there is no fourth rank
    assert solved.best[1][5] == -math.inf


def test_no_chain_and_no_full_tree_expects_more() -> None:
    acceptance = (0.55, 0.2, 0.1, 0.05)
    solved = solve(acceptance, 21, 21)
    rows = [acceptance] * 21
    for rival in ([(0,) * d for d in range(1, 22)], expansion_choices((4, 4))[:21], expansion_choices((3, 3, 3))[:21]):
        assert solved.expected_length(21, 21) >= expected_length(rival, rows)


def test_values_come_true() -> None:
    """Simulation: at every node the child tried k-th is the accepted one with chance p_k."""
    acceptance, rng = (0.5, 0.2, 0.1), random.Random(0)
    tree = set(solve(acceptance, 8, 4).choices(8, 4))
    total, runs = 0, 20000
    for _ in range(runs):
        place: Choice = ()
        while True:
            total += 1
            u, rank = rng.random(), 0
            while rank < 3 and u >= acceptance[rank]:
                u, rank = u - acceptance[rank], rank + 1
            if (*place, rank) not in tree:
                break
            place = (*place, rank)
    assert total / runs == pytest.approx(expected_length(list(tree), [acceptance] * 4), abs=0.03)  # 4 sigma


def flat(nodes: int) -> float:
    return 1.0


def steep(nodes: int) -> float:
    return float(nodes)


def stairs(nodes: int) -> float:
    return 1.0 + (nodes - 1) // 8


@pytest.mark.parametrize("step", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("cost", [flat, steep, stairs])
def test_size_and_depth_follow_the_costs(cost: Callable[[int], float], step: float) -> None:
    solved = solve((0.6, 0.2, 0.1), 20, 8)
    nodes, depth, rate = best_shape(solved, cost, step)
    every = [solved.expected_length(n, d) / (cost(n + 1) + step * d) for n in range(1, 21) for d in range(1, 9)]
    assert rate == pytest.approx(max([1.0, *every]))
    if nodes:
        assert solved.expected_length(nodes, depth) / (cost(nodes + 1) + step * depth) == pytest.approx(rate)


def test_free_nodes_and_expensive_nodes() -> None:
    solved = solve((0.6, 0.2, 0.1), 20, 8)
    assert best_shape(solved, flat, 0.0)[:2] == (20, 6)  # two more levels would add nothing
    assert solved.expected_length(20, 6) == solved.expected_length(20, 8)
    assert best_shape(solved, steep, 0.1) == (0, 0, 1.0)
    assert best_shape(solved, stairs, 0.0)[0] == 7
    assert best_shape(solved, flat, 0.4)[1] < 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sequoia,nodes=0", "nodes >= 1"),
        ("sequoia,acceptance=0.5 x", "separated by spaces"),
        ("sequoia,acceptance=0.9 0.3", "at most 1"),
        ("sequoia,acceptance=0.5 -0.1", "at most 1"),
        ("sequoia,acceptance=nan 0.2", "at most 1"),
        ("sequoia,acceptance=0.2 nan", "at most 1"),
        ("sequoia,width=3", "valid ones: nodes, depth, acceptance"),
        ("medusa_tree,nodes=0", "nodes >= 1"),
        ("expansion,widths=1000x1000x1000", "1001001000 nodes: at most 65536"),
        ("expansion,widths=1_0x2", "positive child counts per level"),
        ("expansion,widths=+3x2", "positive child counts per level"),
        ("oak", "unknown tree 'oak': choose one of expansion"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make("tree", spec)


def test_more_than_was_solved_for() -> None:
    with pytest.raises(ValueError, match="trees of 1 to 4 nodes and 2 levels"):
        solve((0.5,), 4, 2).choices(5, 2)


def test_a_spec_is_the_tree() -> None:
    tree = make("tree", "sequoia,nodes=4,depth=4,acceptance=0.6 0.2 0.1")
    assert isinstance(tree, Sequoia) and tree.choices() == [(0,), (0, 0), (0, 0, 0), (1,)]
    assert find("tree", "sequoia").load() is Sequoia


# -- child counts ----------------------------------------------------------------------------------------------------


def counted(counts: Callable[[Choice], int]) -> set[Choice]:
    """The places that counts describe."""
    places: set[Choice] = set()
    level: list[Choice] = [()]
    while level:
        level = [(*place, rank) for place in level for rank in range(counts(place))]
        places |= set(level)
    return places


def test_counts_describe_the_tree() -> None:
    choices = solve((0.5, 0.25, 0.2), 12, 4).choices(12, 4)
    ranks = Ranks(choices)
    assert counted(ranks.within(9, 99)) == set(choices)
    assert counted(ranks.within(2, 99)) == {choice for choice in choices if len(choice) <= 2}
    assert counted(ranks.within(9, 5)) == set(choices[:5])
    assert counted(ranks.within(0, 5)) == counted(ranks.within(5, 0)) == set()
    assert counted(Levels((2, 1)).within(9, 99)) == {(0,), (1,), (0, 0), (1, 0)}
    assert counted(Levels((2, 1)).within(1, 99)) == {(0,), (1,)}
    assert ranks.branches and not Ranks([(0,), (0, 0)]).branches and Levels((1, 2)).branches


def test_siblings_need_the_ranks_before_them() -> None:
    for choices in ([(1,)], [(1,), (0,)], [(0,), (0, 1), (0, 0)]):
        with pytest.raises(ValueError, match="without rank 0 before it"):
            Ranks(choices)


def test_order_by_value_never_breaks_the_tree() -> None:
    acceptance = (0.2, 0.5, 0.1)  # the second trial is the better one
    choices = expansion_choices((3, 2))
    ordered = by_value(random.Random(0).sample(choices, len(choices)), acceptance)
    assert sorted(ordered) == sorted(choices) and is_closed(ordered)
