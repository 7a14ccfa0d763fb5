"""Static shapes against brute force, and the buffers of the worked example."""

from __future__ import annotations

import itertools
import random

import pytest

from foretoken.methods.trees.shapes import choice_parents, medusa_choices


def value(path: tuple[int, ...], accuracies: list[list[float]]) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= accuracies[depth][rank]
    return product


def is_tree(choices: list[tuple[int, ...]]) -> bool:
    paths = {()} | set(choices)
    return all(choice[:-1] in paths for choice in choices)


@pytest.mark.parametrize("seed", range(5))
def test_no_tree_of_the_same_size_expects_more(seed: int) -> None:
    rng = random.Random(seed)
    accuracies = [sorted((rng.random() * 0.5 for _ in range(3)), reverse=True) for _ in range(3)]
    everything = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    for nodes in (1, 2, 3, 4):
        best = max(
            sum(value(p, accuracies) for p in chosen)
            for chosen in itertools.combinations(everything, nodes)
            if is_tree(list(chosen))
        )
        choices = medusa_choices(accuracies, nodes)
        assert len(choices) == nodes and is_tree(choices)
        assert sum(value(p, accuracies) for p in choices) == pytest.approx(best)


def test_every_beginning_is_a_tree_of_its_own() -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.1, 0.05]]
    long = medusa_choices(accuracies, 20)
    for nodes in range(1, 20):
        assert medusa_choices(accuracies, nodes) == long[:nodes] and is_tree(long[:nodes])


def test_parents_of_the_worked_example() -> None:
    """Choices [0], [1], [0,0]: nodes 1, 2, 3, and node 3 hangs from node 1."""
    assert choice_parents([(0,), (1,), (0, 0)]) == [0, 0, 1]


def test_all_ranks_used_up() -> None:
    assert medusa_choices([[0.5, 0.2]], 9) == [(0,), (1,)]
    assert len(medusa_choices([[0.5, 0.0], [0.0, 0.0]], 9)) == 6


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        medusa_choices([[0.5]], 0)
    with pytest.raises(ValueError, match="at least one node"):
        medusa_choices([], 4)
    with pytest.raises(ValueError, match="lacks the parent"):
        choice_parents([(0, 0), (0,)])
