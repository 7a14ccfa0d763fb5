"""What trees promise: expected tokens of a tree.

Words and units are those of :mod:`foretoken.lab.plan.speedup`.  Sources: SpecInfer (https://arxiv.org/abs/2305.09781),
Medusa (2401.10774), Sequoia (2402.12374).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from foretoken.lab.plan.speedup import SUM_TOLERANCE, check_alpha


def branching_parents(widths: Sequence[int]) -> list[int]:
    """Parents of the tree in which every node of level i - 1 has ``widths[i]`` children (SpecInfer's expansion).

    Level by level; node 0 is the root and has parent -1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"a tree needs positive child counts per level, not {list(widths)}")
    parents, level = [-1], [0]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return parents


def positional_success(parents: Sequence[int], positional: Sequence[float] | Sequence[Sequence[float]]) -> list[float]:
    """Per node the chance that it is the child that is accepted, given that its parent did: by its rank among siblings.

    Args:
        parents: parent index per node, -1 for the root, siblings in the order in which they are tried.
        positional: chance of the first, second, ... sibling (Sequoia's positional acceptance), the same at all depths;
            or one such row per depth (Medusa's accuracies per head).

    Raises:
        ValueError: a rank or a depth without an entry, or parents that are no tree.
    """
    depths = _depths(parents)
    rows = list(positional)
    tables = rows if rows and isinstance(rows[0], Sequence) else [rows] * max(depths)
    if len(tables) < max(depths):
        raise ValueError(f"the tree is {max(depths)} deep, the acceptance table {len(tables)}: give a row per depth")
    tried = [0] * len(parents)
    success = [1.0]
    for node in range(1, len(parents)):
        row: Any = tables[depths[node] - 1]
        rank = tried[parents[node]]
        if rank >= len(row):
            raise ValueError(f"the tree tries {rank + 1} siblings, the acceptance table has {len(row)} places")
        success.append(float(row[rank]))
        tried[parents[node]] += 1
    return success


def trial_acceptance(alpha: float, width: int) -> list[float]:
    """alpha, alpha (1 - alpha), ...: positional acceptance if every sibling were a fresh trial like the first.

    An upper estimate: later siblings are the drafter's worse guesses, against what is left of the target's
    distribution.
    """
    check_alpha(alpha)
    return [alpha * (1.0 - alpha) ** rank for rank in range(width)]


def tree_expected_tokens(parents: Sequence[int], success: Sequence[float]) -> float:
    """Tokens per round of a tree: 1 + the sum over nodes of the product of ``success`` on the path to the node.

    Sequoia's F(T) (2402.12374), Medusa's expected length (2401.10774, section 2.3.3).  A chain with
    success alpha gives equation 1 again.

    Args:
        parents: parent index per node, -1 for the root.
        success: per node the chance that it is accepted, given its parent (the root's entry is not read).

    Raises:
        ValueError: no tree, or siblings whose chances sum to more than 1 (only one of them can be accepted).
    """
    _depths(parents)
    if len(success) != len(parents):
        raise ValueError(f"{len(parents)} nodes need as many chances, not {len(success)}")
    shares, reached = [0.0] * len(parents), [1.0] * len(parents)
    for node in range(1, len(parents)):
        check_alpha(success[node], f"the chance of node {node}")
        parent = parents[node]
        shares[parent] += success[node]
        if shares[parent] > 1.0 + SUM_TOLERANCE:
            raise ValueError(
                f"the children of node {parent} are accepted with chances that sum to {shares[parent]:g} > 1"
            )
        reached[node] = reached[parent] * success[node]
    return math.fsum(reached)


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0] * len(parents)
    if not parents or parents[0] != -1:
        raise ValueError("a tree needs a root (parent -1) first")
    for node in range(1, len(parents)):
        if not 0 <= parents[node] < node:
            raise ValueError(f"node {node} has parent {parents[node]}: parents come before their children")
        depths[node] = depths[parents[node]] + 1
    return depths
