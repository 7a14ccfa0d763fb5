"""The static tree that a draft model's option ``tree`` asks for."""

from __future__ import annotations

from pathlib import Path

from foretoken.methods.trees.base import Shape
from foretoken.methods.trees.counts import Levels, Ranks, StaticTree
from foretoken.methods.trees.expansion import parse_widths
from foretoken.methods.trees.shapes import read_tree
from foretoken.methods.trees.specs import build_tree, dynamic_trees, static_trees


def places_of(tree: str, name: str) -> StaticTree:
    """The static tree that an option ``tree`` asks for: child counts per level, a file, or a spec.

    Raises:
        ValueError: none of these, or a file of another drafter; the message lists the choices.
    """
    if tree[:1].isdigit() and not set(tree.lower()) - set("0123456789x"):
        return Levels(parse_widths(tree))
    if tree.partition(",")[0] in static_trees():
        return Ranks(build_tree(tree, Shape).choices())
    if tree.endswith(".json") or Path(tree).expanduser().is_file():
        return Ranks(read_tree(tree, name))
    raise ValueError(
        f"tree={tree!r} must be positive child counts per level, for example 3x2x1, a file of `foretoken tune tree`, "
        f"or one of {', '.join([*static_trees(), *dynamic_trees()])} with its options"
    )
