"""Static tree shapes, from measured accuracies.

A shape is a list of nodes, each a tuple of ranks from the root downwards: ``(0, 2)`` is the third candidate of depth 2
below the first one of depth 1. Parents come before children, and any first n nodes are a tree themselves.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.io.hub_ids import expanded

Choice = tuple[int, ...]


def medusa_choices(accuracies: Sequence[Sequence[float]], nodes: int) -> list[Choice]:
    """The ``nodes`` best rank paths when head i's candidate of rank r is right with probability ``accuracies[i][r]``.

    A node's value is the product along its path (heads guess independently). The best node whose parent is in the tree
    is added until there are enough (Medusa, arXiv 2401.10774, section 2.3.3).

    Args:
        accuracies: [K][R] probability per head and rank.
        nodes: number of nodes (fewer when all ranks are used up).

    Raises:
        ValueError: no accuracies, or fewer than one node.
    """
    if nodes < 1 or not accuracies or not accuracies[0]:
        raise ValueError(f"a tree needs at least one node and one head, not {nodes} and {len(accuracies)}")
    # Ties go to the shallower and then the earlier path, so that the shape is deterministic.
    waiting: list[tuple[float, int, Choice]] = [(-accuracies[0][0], 1, (0,))]
    chosen: list[Choice] = []
    while waiting and len(chosen) < nodes:
        value, depth, path = heapq.heappop(waiting)
        chosen.append(path)
        if depth < len(accuracies):
            heapq.heappush(waiting, (value * accuracies[depth][0], depth + 1, (*path, 0)))
        rank, row = path[-1] + 1, accuracies[depth - 1]
        if rank < len(row):
            parent = value / row[path[-1]] if row[path[-1]] > 0 else 0.0
            heapq.heappush(waiting, (parent * row[rank], depth, (*path[:-1], rank)))
    return chosen


def choice_parents(choices: Sequence[Choice]) -> list[int]:
    """Parent index of every choice in the tree whose node 0 is the root (choice i is node i + 1).

    Raises:
        ValueError: a choice before its parent, a duplicate, or the root.
    """
    node_of: dict[Choice, int] = {(): 0}
    parents = []
    for node, choice in enumerate(choices, 1):
        if choice[:-1] not in node_of:
            raise ValueError(f"the tree lacks the parent of {choice}: list parents before children")
        if choice in node_of:
            raise ValueError(f"the tree has {choice} twice: list every node once, and the root () not at all")
        parents.append(node_of[choice[:-1]])
        node_of[choice] = node
    return parents


def fitting_nodes(
    choices: Sequence[Choice], parents: Sequence[int], max_depth: int, max_nodes: int, ranks: int
) -> list[int]:
    """Nodes of a shape (choice i is node i + 1) within a budget, which form a tree.

    Args:
        choices: the shape, parents first.
        parents: result of :func:`choice_parents`.
        max_depth: most levels.
        max_nodes: most nodes; the first ones that fit are kept.
        ranks: candidates per position.
    """
    nodes = {0}
    for node, (choice, parent) in enumerate(zip(choices, parents, strict=True), 1):
        if len(nodes) > max_nodes:
            break
        if parent in nodes and len(choice) <= max_depth and choice[-1] < ranks:
            nodes.add(node)
    return sorted(nodes - {0})


def read_tree(file: str | Path, method: str, heads: int | None = None) -> list[Choice]:
    """The shape in a file of ``foretoken tune tree``.

    Args:
        file: JSON with ``method`` and ``choices``.
        method: registry name of the drafter that fills it.
        heads: most levels that the drafter can fill; any number by default.

    Raises:
        ValueError: no such file, another method's, or no tree that ``heads`` heads can fill.
    """
    try:
        content = json.loads(expanded(file).read_text(encoding="utf-8"))
        stored = content["method"]
        choices = [tuple(choice) for choice in content["choices"]]
        if not all(type(rank) is int for choice in choices for rank in choice):
            raise TypeError("a rank is a whole number")
    except OSError as error:
        raise ValueError(f"cannot read the tree {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} contains no tree: make one with `foretoken tune tree`") from None
    if stored != method:
        raise ValueError(f"the tree in {file} was made for {stored!r}, not for {method!r}")
    choice_parents(choices)
    if not choices or min(map(min, choices)) < 0 or (heads is not None and max(map(len, choices)) > heads):
        heads_of = "this drafter" if heads is None else f"{heads} heads"
        raise ValueError(f"the tree in {file} does not fit {heads_of}: make it for this drafter")
    return choices


def values_of(choices: Sequence[Choice], accuracies: Sequence[Sequence[float]]) -> list[float]:
    """Probability that a node and all before it are right, from the accuracies [K][R] of its ranks."""
    return [math.prod(accuracies[depth][rank] for depth, rank in enumerate(choice)) for choice in choices]


def expected_length(choices: Sequence[Choice], accuracies: Sequence[Sequence[float]]) -> float:
    """Expected tokens per round of a shape, the target's own included, by these accuracies."""
    return 1.0 + sum(values_of(choices, accuracies))
