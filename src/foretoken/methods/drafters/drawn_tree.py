"""Trees whose siblings are drawn without replacement, for requests that sample without noise.

The number of a node's children is fixed before any of them is drawn, by a static tree and by stop rules that depend on
the tokens above.  Where a limit on nodes cuts a shape by levels, it also depends on where earlier nodes stopped, which
leaves the rules exact, as enumeration shows.  Tokens below a node are drawn for that node alone and never shared:
traversal verification moves from one subtree to the next, and is exact only if it has not seen the next one.

Limits on nodes: a drafter passes its own as ``most``, :class:`DrawnTree` takes the smaller of it and the budget's, the
static tree plans the children within that, and :meth:`DrawnTree.width` holds it where a shape by levels does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, TokenTree
from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.base import Traits
from foretoken.methods.drafters.drawing import draw_iid, draw_without_replacement
from foretoken.methods.trees.cost_aware import paying_count
from foretoken.methods.trees.counts import Counts, Levels, Ranks, StaticTree
from foretoken.methods.trees.sequoia import TYPICAL, Sequoia, values_of_ranks
from foretoken.methods.trees.shapes import Choice
from foretoken.methods.trees.specs import static_tree_of

DRAWS = ("iid", "without_replacement", "greedy")
"""Proposals of requests that sample without noise: a drawn chain, a drawn tree, or the likeliest tokens."""


def check_draw(name: str, draw: str) -> None:
    """Raise ``ValueError`` unless ``draw`` is one of :data:`DRAWS`."""
    if draw not in DRAWS:
        raise ValueError(f"{name} needs draw={', '.join(DRAWS[:-1])} or {DRAWS[-1]}, not {draw!r}")


def drawn_shape(draw: str, tree: str, name: str, nodes: int, depth: int) -> StaticTree:
    """The shape of drawn proposals: a chain, or a tree of distinct siblings, by default Sequoia's.

    Raises:
        ValueError: a tree for another ``draw``, or no static tree.
    """
    if draw != "without_replacement":
        if tree:
            raise ValueError(f"{name} draws a tree with draw=without_replacement only: give that beside tree={tree}")
        return Levels((1,) * depth)
    return static_tree_of(tree, name) if tree else Ranks(Sequoia(nodes, depth).choices())


def paying_static_tree(shape: StaticTree, costs: TargetCost) -> StaticTree:
    """The part of a tree that pays off on this machine, by typical probabilities of its ranks; a shape by levels stays
    whole.

    The cost is that of a single request, because drawn tokens must not depend on the other requests of a call.
    """
    if not isinstance(shape, Ranks) or not shape.branches:
        return shape
    return Ranks(shape.choices[: paying_count(values_of_ranks(shape.choices, TYPICAL), costs, 1)])


def traits_of(draw: str, points_branch: bool, drawn_branch: bool) -> Traits:
    """Traits of a drafter with point proposals and, for requests that sample without noise, those of ``draw``."""
    points = (Kind.POINT, points_branch)
    if draw == "greedy":
        return Traits(*points, frozenset({points}))
    drawn = (Kind.WITHOUT_REPLACEMENT if drawn_branch else Kind.IID, drawn_branch)
    return Traits(drawn[0], points_branch or drawn_branch, frozenset({points, drawn}))


class DrawnTree:
    """A tree or chain under construction in a static shape; node 0 is the root.

    Args:
        shape: the static tree.
        most: the drafter's maximum number of nodes.

    Attributes:
        choices: ranks of every node below the root.
        path_of: tokens from below the root to every node.
        distributions: distributions [V] of drawn tokens; ``q_rows`` are each node's index in it.
    """

    def __init__(self, context: Context, shape: StaticTree, budget: Budget, most: int) -> None:
        self.context, self.budget, self.sampler = context, budget, context.sampler
        self.most = min(most, budget.max_nodes)
        self.counts: Counts = shape.within(budget.max_depth, self.most)
        self.branches = shape.branches
        self.tokens, self.parents, self.q_rows = [context.root], [-1], [-1]
        self.choices: list[Choice] = [()]
        self.path_of: list[tuple[int, ...]] = [()]
        self.distributions: list[Tensor] = []

    def width(self, node: int) -> int:
        return max(0, min(self.counts(self.choices[node]), self.most - (len(self.tokens) - 1)))

    def prefix(self, node: int) -> Sequence[int]:
        """The committed tokens and the path, if a distribution depends on them."""
        return () if self.sampler.context_free else [*self.context.tokens, *self.path_of[node]]

    def add(self, node: int, tokens: Sequence[int], distribution: Tensor | None = None) -> range:
        """Add children to a node, with their distribution [V] if they were drawn; return their indices."""
        if distribution is not None:
            self.distributions.append(distribution)
        row, first = -1 if distribution is None else len(self.distributions) - 1, len(self.tokens)
        for rank, token in enumerate(tokens):
            self.tokens.append(token)
            self.parents.append(node)
            self.q_rows.append(row)
            self.choices.append((*self.choices[node], rank))
            self.path_of.append((*self.path_of[node], token))
        return range(first, len(self.tokens))

    def draw(self, node: int, distribution: Tensor | None) -> list[int]:
        """Draw the children of a node from ``distribution`` [V] (``None``: the request allows no token); return those
        that will have children themselves."""
        width = self.width(node)
        if distribution is None or not width:
            return []
        draw = draw_iid if width == 1 else draw_without_replacement
        children = self.add(node, draw(distribution, width, self.context), distribution)
        # A stop may only suppress the tokens after a child, which itself stays in the draft.
        return [child for child in children if not self._ends(child, distribution) and self.width(child)]

    def _ends(self, node: int, distribution: Tensor) -> bool:
        confident = self.budget.asks_for_confidence
        return confident and self.budget.stops_after(distribution, float(distribution[self.tokens[node]]))

    def grow(self, distribution_after: Callable[[int], Tensor | None]) -> TokenTree:
        """Draw the whole tree, level by level, from the distribution [V] after every node."""
        frontier = [0] if self.width(0) else []
        while frontier:
            frontier = [child for node in frontier for child in self.draw(node, distribution_after(node))]
        return self.finished()

    def finished(self, kind: Kind | None = None) -> TokenTree:
        """The tree of all nodes; drawn siblings have the given ``kind``, by default without replacement if they
        branch."""
        if not self.distributions:
            return TokenTree(tuple(self.tokens), tuple(self.parents))
        if len(self.tokens) == 1:
            return TokenTree.root_only(self.context.root)
        kind = kind or (Kind.WITHOUT_REPLACEMENT if self.branches else Kind.IID)
        rows = self.distributions
        q = torch.stack(rows) if len(rows) > 1 else rows[0][None]
        return TokenTree(tuple(self.tokens), tuple(self.parents), kind, q, tuple(self.q_rows))
