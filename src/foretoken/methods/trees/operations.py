"""Pure operations on token trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.core import Kind, TokenTree


def select(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The sub-tree of ``nodes`` (ascending, the root first, every parent included)."""
    if len(nodes) == len(tree):
        return tree
    new_index = {node: i for i, node in enumerate(nodes)}
    return replace(
        tree,
        tokens=tuple(tree.tokens[n] for n in nodes),
        parents=tuple(-1 if n == 0 else new_index[tree.parents[n]] for n in nodes),
        q_rows=tuple(tree.q_rows[n] for n in nodes) if tree.q_rows else (),
        probes=tuple(tree.probes[n] for n in nodes) if tree.probes else (),
        drafters=tuple(tree.drafters[n] for n in nodes) if tree.drafters else (),
        survival=tuple(tree.survival[n] for n in nodes) if tree.survival else (),
        cut_from=(tree, nodes),
    )


def truncate(tree: TokenTree, max_depth: int) -> TokenTree:
    """Drop draft nodes deeper than ``max_depth``. Depth does not depend on drawn tokens, so this is always exact.

    Probes emit nothing, so they stay unless their parent is dropped.
    """
    if len(tree) - 1 <= max_depth or max(tree.depths) <= max_depth:
        return tree
    probes = tree.probes or (False,) * len(tree)
    nodes = {0}
    for node in range(1, len(tree)):
        if tree.parents[node] in nodes and (probes[node] or tree.depths[node] <= max_depth):
            nodes.add(node)
    return select(tree, sorted(nodes))


def first_nodes(tree: TokenTree, max_nodes: int) -> TokenTree:
    """The root and the first ``max_nodes`` draft nodes (parents come first, so this is a tree)."""
    return select(tree, range(min(len(tree), max_nodes + 1)))


def from_paths(root: int, paths: Sequence[Sequence[int]]) -> TokenTree:
    """The trie of deterministic token paths below ``root``, in order of first appearance."""
    tokens, parents = [root], [-1]
    node_of: dict[tuple[int, int], int] = {}
    for path in paths:
        parent = 0
        for token in path:
            node = node_of.get((parent, token))
            if node is None:
                node = node_of[(parent, token)] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node
    return TokenTree(tuple(tokens), tuple(parents))


def merge(trees: Sequence[TokenTree], kind: Kind | None = None) -> tuple[TokenTree, list[list[int]]]:
    """The union of several drafters' trees, and for each tree the merged index of each node.

    Point masses that propose the same token at the same position become one node, because the second trial of a point
    mass is never accepted. A drawn node stays a separate trial with its own distribution (removing duplicates of
    independent draws is biased). Probes stay, each for its own drafter.

    Args:
        trees: at least one; siblings of an earlier tree come first.
        kind: kind of the result if anything was drawn; by default ``WITHOUT_REPLACEMENT`` if a tree is of that kind,
            else ``IID``. Independent draws are valid under either, because each is then a sequence of one draw.

    Returns:
        the merged tree, with owners in ``drafters``, and the indices.

    Raises:
        ValueError: different roots, or draws without replacement with ``kind`` ``IID``.
    """
    if any(t.tokens[0] != trees[0].tokens[0] for t in trees):
        raise ValueError("trees with different roots cannot be merged")
    kinds = {t.kind for t in trees if t.q is not None}
    if not kinds:
        kind = Kind.POINT
    elif kind is None:
        kind = Kind.WITHOUT_REPLACEMENT if Kind.WITHOUT_REPLACEMENT in kinds else Kind.IID
    elif kind is not Kind.WITHOUT_REPLACEMENT and Kind.WITHOUT_REPLACEMENT in kinds:
        raise ValueError("draws without replacement cannot be merged into a tree of independent draws")
    return _union(
        [_with_own_distributions(t) if kind is Kind.WITHOUT_REPLACEMENT and t.kind is Kind.IID else t for t in trees],
        kind,
    )


def _with_own_distributions(tree: TokenTree) -> TokenTree:
    """The tree with one row of ``q`` per drawn node: nodes that share a row would count as draws without
    replacement."""
    drawn = [n for n in range(len(tree)) if tree.distribution(n) is not None]
    if tree.q is None or len({tree.q_rows[n] for n in drawn}) == len(drawn):
        return tree
    row_of = {node: row for row, node in enumerate(drawn)}
    q_rows = tuple(row_of.get(n, -1) for n in range(len(tree)))
    return replace(tree, q=tree.q[[tree.q_rows[n] for n in drawn]], q_rows=q_rows)


def _union(trees: Sequence[TokenTree], kind: Kind) -> tuple[TokenTree, list[list[int]]]:
    tokens, parents, q_rows, probes, owners = [trees[0].tokens[0]], [-1], [-1], [False], [-1]
    certain: dict[tuple[int, int], int] = {}  # (parent, token) -> its point mass
    distributions: list[Tensor] = []
    node_maps: list[list[int]] = []
    for owner, tree in enumerate(trees):
        node_map, shift = [0], sum(map(len, distributions))
        for node in range(1, len(tree)):
            row = tree.q_rows[node] if tree.q_rows else -1
            key = (node_map[tree.parents[node]], tree.tokens[node])
            probe = bool(tree.probes and tree.probes[node])
            same = certain.get(key) if row < 0 and not probe else None
            node_map.append(len(tokens) if same is None else same)
            if same is not None:
                continue
            if row < 0 and not probe:
                certain[key] = len(tokens)
            tokens.append(key[1])
            parents.append(key[0])
            q_rows.append(-1 if row < 0 else row + shift)
            probes.append(probe)
            owners.append(owner)
        node_maps.append(node_map)
        if tree.q is not None:
            distributions.append(tree.q)
    drawn = kind is not Kind.POINT
    merged = TokenTree(
        tuple(tokens),
        tuple(parents),
        kind,
        torch.cat(distributions) if drawn else None,
        tuple(q_rows) if drawn else (),
        tuple(probes) if any(probes) else (),
        tuple(owners),
    )
    return merged, node_maps
