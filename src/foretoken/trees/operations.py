"""Pure operations on token trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.types import Kind, TokenTree


def select(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The sub-tree of ``nodes`` (ascending, the root first, every parent included)."""
    if len(nodes) == len(tree):
        return tree
    place = {node: i for i, node in enumerate(nodes)}
    return replace(
        tree,
        tokens=tuple(tree.tokens[n] for n in nodes),
        parents=tuple(-1 if n == 0 else place[tree.parents[n]] for n in nodes),
        law_of=tuple(tree.law_of[n] for n in nodes) if tree.law_of else (),
        probes=tuple(tree.probes[n] for n in nodes) if tree.probes else (),
        drafters=tuple(tree.drafters[n] for n in nodes) if tree.drafters else (),
    )


def truncate(tree: TokenTree, max_depth: int) -> TokenTree:
    """Drop draft nodes deeper than ``max_depth``.  Depth does not depend on drawn tokens, so this is always exact.

    Probes emit nothing: they stay, unless they hang from a node that goes.
    """
    if len(tree) - 1 <= max_depth or max(tree.depths) <= max_depth:
        return tree
    probes = tree.probes or (False,) * len(tree)
    kept = {0}
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and (probes[node] or tree.depths[node] <= max_depth):
            kept.add(node)
    return select(tree, sorted(kept))


def first_nodes(tree: TokenTree, max_nodes: int) -> TokenTree:
    """The root and the first ``max_nodes`` draft nodes (parents come first, so this is a tree; later siblings go)."""
    return select(tree, range(min(len(tree), max_nodes + 1)))


def from_paths(root: int, paths: Sequence[Sequence[int]]) -> TokenTree:
    """The trie of deterministic token paths below ``root``, in order of first appearance."""
    tokens, parents = [root], [-1]
    known: dict[tuple[int, int], int] = {}
    for path in paths:
        parent = 0
        for token in path:
            node = known.get((parent, token))
            if node is None:
                node = known[(parent, token)] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node
    return TokenTree(tuple(tokens), tuple(parents))


def leaves(tree: TokenTree) -> list[int]:
    """Nodes without children, probes left out."""
    probes = tree.probes or (False,) * len(tree)
    return [n for n in range(len(tree)) if not probes[n] and not tree.children[n]]


def path_table(tree: TokenTree) -> list[list[int]]:
    """One row per leaf: node indices from the root, padded with ``-1`` (never with a token or node that exists)."""
    rows = [tree.path(leaf) for leaf in leaves(tree)]
    width = max(map(len, rows))
    return [row + [-1] * (width - len(row)) for row in rows]


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The union of several drafters' trees under their common root.

    Point trees are merged into a trie.  As soon as a tree was sampled, every node stays its own trial with its own law
    (removing duplicates of independent draws is biased).
    """
    if any(t.tokens[0] != trees[0].tokens[0] for t in trees):
        raise ValueError("trees with different roots cannot be merged")
    if all(t.kind is Kind.POINT for t in trees):
        return from_paths(
            trees[0].tokens[0], [[t.tokens[n] for n in t.path(leaf)[1:]] for t in trees for leaf in leaves(t)]
        )
    tokens, parents, law_of, owners = [trees[0].tokens[0]], [-1], [-1], [-1]
    laws: list[Tensor] = []
    for owner, tree in enumerate(trees):
        offset, shift = len(tokens) - 1, sum(map(len, laws))
        for node in range(1, len(tree)):
            tokens.append(tree.tokens[node])
            parents.append(0 if tree.parents[node] == 0 else tree.parents[node] + offset)
            row = tree.law_of[node] if tree.law_of else -1
            law_of.append(-1 if row < 0 else row + shift)
            owners.append(owner)
        if tree.q is not None:
            laws.append(tree.q)
    return TokenTree(tuple(tokens), tuple(parents), Kind.IID, torch.cat(laws), tuple(law_of), drafters=tuple(owners))
