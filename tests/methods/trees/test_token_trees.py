"""Token trees: what is refused, and the pure operations on them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foretoken.core import Kind, TokenTree
from foretoken.methods.trees.operations import (
    first_nodes,
    from_paths,
    merge,
    select,
    truncate,
)

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
#       |
#       6
TREE = TokenTree((9, 0, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2, 4))


def random_tree(seed: int, nodes: int = 12, probes: bool = False) -> TokenTree:
    generator = random.Random(seed)
    parents = (-1, *(generator.randrange(i) for i in range(1, nodes)))
    tokens = tuple(generator.randrange(5) for _ in range(nodes))
    flags = (False, *(generator.random() < 0.3 for _ in range(1, nodes))) if probes else ()
    q = torch.rand(nodes, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return TokenTree(tokens, parents, Kind.IID, q, (-1, *range(1, nodes)), flags)


# -- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ((), (), "needs a root"),
        ((1, 2), (-1,), "one parent per token"),
        ((1, 2), (0, 0), "needs a root"),
        ((1, 2, 3), (-1, 2, 0), "node 1 has parent 2"),
        ((1, 2), (-1, -1), "node 1 has parent -1"),
        ((1, 2), (-1, 1), "node 1 has parent 1"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenTree(tokens, parents)


@pytest.mark.parametrize("kind", [Kind.IID, Kind.WITHOUT_REPLACEMENT])
def test_drawn_trees_must_carry_their_distributions(kind: Kind) -> None:
    with pytest.raises(ValueError, match="must carry the distributions"):
        TokenTree((1, 2), (-1, 0), kind)
    with pytest.raises(ValueError, match="must carry the distributions"):
        TokenTree((1, 2), (-1, 0), kind, torch.ones(1, 3))
    assert len(TokenTree((1,), (-1,), kind)) == 1


def test_views() -> None:
    assert TREE.depths == (0, 1, 1, 2, 2, 2, 3)
    assert TREE.children == ((1, 2), (3, 4), (5,), (), (6,), (), ())
    assert TREE.path(6) == [0, 1, 4, 6] and TREE.path(0) == [0]
    assert (len(TREE), TREE.num_drafts, TREE.is_chain) == (7, 6, False)
    assert TREE.distribution(3) is None


def test_chains() -> None:
    q = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    chain = TokenTree.chain(7, [0, 1], q)
    assert (chain.tokens, chain.parents, chain.kind) == ((7, 0, 1), (-1, 0, 1), Kind.IID)
    assert chain.distribution(0) is None
    assert [chain.distribution(node).tolist() for node in (1, 2)] == q.tolist()  # type: ignore[union-attr]
    assert TokenTree.chain(7, [], q[:0]) == TokenTree.root_only(7)
    assert TokenTree.chain(7, [3]).kind is Kind.POINT
    assert chain.is_chain and TokenTree.root_only(7).is_chain


def test_probes_are_no_drafts() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 1, 0), probes=(False, False, False, True))
    assert tree.num_drafts == 2
    assert tree.children == ((1,), (2,), (), ())
    assert not tree.is_chain


# -- operations ------------------------------------------------------------------------------------------------------


def test_truncate() -> None:
    assert truncate(TREE, 3) is TREE
    assert truncate(TREE, 2) == TokenTree((9, 0, 1, 2, 3, 4), (-1, 0, 0, 1, 1, 2))
    assert truncate(TREE, 1) == TokenTree((9, 0, 1), (-1, 0, 0))
    assert truncate(TREE, 0) == TokenTree.root_only(9)


def test_first_nodes() -> None:
    assert first_nodes(TREE, 3) == TokenTree((9, 0, 1, 2), (-1, 0, 0, 1))
    assert first_nodes(TREE, 0) == TokenTree.root_only(9)
    assert first_nodes(TREE, 6) is TREE and first_nodes(TREE, 60) is TREE


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_cut_tree_keeps_paths_and_distributions(seed: int, depth: int) -> None:
    tree = random_tree(seed, probes=seed % 2 == 1)
    cut = truncate(tree, depth)

    def described(of: TokenTree, node: int) -> tuple[object, ...]:
        distribution = of.distribution(node)
        path = tuple(of.tokens[n] for n in of.path(node))
        return (
            *path,
            bool(of.probes and of.probes[node]),
            None if distribution is None else tuple(distribution.tolist()),
        )

    probes = tree.probes or (False,) * len(tree)
    above = {n: tree.path(n) for n in range(len(tree))}  # a probe stays if all that it hangs from stays
    kept = [n for n in above if all(probes[m] or tree.depths[m] <= depth for m in above[n])]
    assert [described(cut, n) for n in range(len(cut))] == [described(tree, n) for n in kept]


def test_select_keeps_owners() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 0, 2), drafters=(-1, 0, 1, 1))
    assert select(tree, [0, 2, 3]) == TokenTree((9, 2, 3), (-1, 0, 1), drafters=(-1, 1, 1))


def test_a_tree_with_the_name_of_who_guessed_it() -> None:
    tree = TokenTree((9, 2, 0, 1), (-1, 0, 1, 0), probes=(False, False, False, True))
    assert tree.depths == (0, 1, 2, 1)
    signed = tree.guessed_by(3)
    assert signed == replace(tree, drafters=(-1, 3, 3, 3)) and tree.drafters == ()
    assert (signed.depths, signed.children, signed.is_chain) == (tree.depths, ((1,), (2,), (), ()), False)


def test_from_paths_shares_prefixes() -> None:
    tree = from_paths(9, [(1, 2), (1, 3, 1), (4,), (1, 2)])
    assert tree == TokenTree((9, 1, 2, 3, 1, 4), (-1, 0, 1, 1, 3, 0))
    assert from_paths(9, []) == TokenTree.root_only(9)


def test_paths_of_a_trie_come_back() -> None:
    paths = {(0, 0), (0, 1, 2), (3,), (0, 1, 0)}
    tree = from_paths(5, sorted(paths))
    assert {
        tuple(tree.tokens[n] for n in tree.path(leaf)[1:]) for leaf, below in enumerate(tree.children) if not below
    } == paths


# -- merging ---------------------------------------------------------------------------------------------------------


def test_deterministic_trees_merge_into_a_trie() -> None:
    both, _ = merge([from_paths(9, [(1, 2)]), from_paths(9, [(1, 3), (4,)])])
    assert both == replace(from_paths(9, [(1, 2), (1, 3), (4,)]), drafters=(-1, 0, 0, 1, 1))


def test_drawn_trees_keep_every_node_and_its_distribution() -> None:
    first = TokenTree.chain(9, [1, 2], torch.tensor([[0.1, 0.9, 0.0], [0.3, 0.3, 0.4]]))
    second = TokenTree.chain(9, [1], torch.tensor([[0.5, 0.5, 0.0]]))
    both, _ = merge([first, second])
    assert (both.tokens, both.parents, both.kind) == ((9, 1, 2, 1), (-1, 0, 1, 0), Kind.IID)
    assert both.drafters == (-1, 0, 0, 1)
    for node, distribution in ((1, first.distribution(1)), (2, first.distribution(2)), (3, second.distribution(1))):
        assert both.distribution(node).tolist() == distribution.tolist()  # type: ignore[union-attr]


def test_a_point_tree_beside_a_drawn_one() -> None:
    drawn = TokenTree.chain(9, [1], torch.tensor([[0.5, 0.5, 0.0]]))
    both, _ = merge([TokenTree.chain(9, [2, 0]), drawn, TokenTree.root_only(9)])
    assert (both.tokens, both.parents, both.q_rows) == ((9, 2, 0, 1), (-1, 0, 1, 0), (-1, -1, -1, 0))
    assert both.kind is Kind.IID and both.distribution(1) is None


def test_places_lead_from_every_tree_to_the_merged_one() -> None:
    trees = [from_paths(9, [(1, 2), (3,)]), from_paths(9, [(1, 3), (3, 1)]), TokenTree.root_only(9)]
    both, places = merge(trees)
    assert places == [[0, 1, 2, 3], [0, 1, 4, 3, 5], [0]]
    for tree, place in zip(trees, places, strict=True):
        assert [both.tokens[n] for n in place] == list(tree.tokens)
        assert [both.parents[n] for n in place[1:]] == [place[p] for p in tree.parents[1:]]


def test_probes_are_merged_with_nothing() -> None:
    window = TokenTree((9, 1, 1, 2), (-1, 0, 0, 2), probes=(False, False, True, True))
    both, places = merge([TokenTree.chain(9, [1, 2]), window, window])
    assert both.tokens == (9, 1, 2, 1, 2, 1, 2) and both.parents == (-1, 0, 1, 0, 3, 0, 5)
    assert both.probes == (False, False, False, True, True, True, True)
    assert places == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 5, 6]]
    assert both.num_drafts == 2 and both.drafters == (-1, 0, 0, 1, 1, 2, 2)


def test_independent_siblings_beside_draws_without_replacement_are_sequences_of_their_own() -> None:
    distribution = torch.tensor([[0.5, 0.3, 0.2]])
    iid = TokenTree((9, 1, 1), (-1, 0, 0), Kind.IID, distribution, (-1, 0, 0))
    wor = TokenTree((9, 0, 1), (-1, 0, 0), Kind.WITHOUT_REPLACEMENT, distribution, (-1, 0, 0))
    both, _ = merge([iid, wor])
    assert both.kind is Kind.WITHOUT_REPLACEMENT
    assert both.q_rows == (-1, 0, 1, 2, 2)
    assert merge([iid, iid])[0].q_rows == (-1, 0, 0, 1, 1)
    assert merge([iid], Kind.WITHOUT_REPLACEMENT)[0].q_rows == (-1, 0, 1)
    with pytest.raises(ValueError, match="draws without replacement cannot"):
        merge([wor], Kind.IID)


def test_trees_with_different_roots_do_not_merge() -> None:
    with pytest.raises(ValueError, match="different roots"):
        merge([TokenTree.root_only(1), TokenTree.root_only(2)])


def test_how_far_a_tree_says_what_was_written() -> None:
    tree = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 2, 3))
    assert [tree.matched(tokens) for tokens in ([], [5], [1], [1, 3], [2, 3, 4, 7], [2, 4])] == [0, 0, 1, 1, 3, 1]
    assert TokenTree.root_only(9).matched([9]) == 0
    assert TokenTree((9, 1, 1, 2), (-1, 0, 0, 2)).path_along([1, 2]) == (2, 3), "the second of equal siblings goes on"
