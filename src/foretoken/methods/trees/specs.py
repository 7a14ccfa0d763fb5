"""Trees from drafters' options: spec strings, child counts per level, files."""

from __future__ import annotations

from typing import Any

from foretoken.core.io.hub_ids import expanded
from foretoken.core.names import unknown
from foretoken.methods.trees.base import Growth, Shape
from foretoken.methods.trees.counts import Levels, Ranks, StaticTree
from foretoken.methods.trees.expansion import parse_widths
from foretoken.methods.trees.shapes import read_tree
from foretoken.registry import make, parse_spec, rows

MOST_NODES = 1024
"""Nodes of the largest tree given by levels; larger ones are slips, and would take a machine's memory."""


def trees_of(sort: type[Any]) -> list[str]:
    """Names of the trees of a sort: ``Shape`` (fixed) or ``Growth`` (by the draft's confidence)."""
    return [row.name for row in rows("tree") if issubclass(row.load(), sort)]


def build_tree(spec: str, sort: type[Any]) -> Any:
    """A tree from its spec, of a sort as for :func:`trees_of`.

    Raises:
        ValueError: an unknown name or option, or a tree of the other sort; the message lists the choices.
    """
    if parse_spec(spec).name not in trees_of(sort):
        raise unknown(f"the tree cannot be {spec!r}", parse_spec(spec).name, trees_of(sort))
    return make("tree", spec)


def static_tree_of(tree: str, name: str) -> StaticTree:
    """The static tree of an option ``tree``: child counts per level, a file, or a spec.

    Raises:
        ValueError: none of these (the message lists the choices), a file of another drafter, or too large a tree.
    """
    if tree[:1].isdigit() and not set(tree.lower()) - set("0123456789x"):
        levels = Levels(parse_widths(tree))
        if levels.size > MOST_NODES:
            raise ValueError(f"tree={tree} has {levels.size:,} nodes, of which one call checks at most {MOST_NODES:,}")
        return levels
    if tree.partition(",")[0] in trees_of(Shape):
        return Ranks(build_tree(tree, Shape).choices())
    if tree.endswith(".json") or expanded(tree).is_file():
        return Ranks(read_tree(tree, name))
    raise ValueError(
        f"tree={tree!r} must be positive child counts per level, for example 3x2x1, a file of `foretoken tune tree`, "
        f"or one of {', '.join([*trees_of(Shape), *trees_of(Growth)])} with its options"
    )
