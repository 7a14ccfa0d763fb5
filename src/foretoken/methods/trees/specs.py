"""Trees from their spec strings, for the options of drafters that take one."""

from __future__ import annotations

from typing import Any

from foretoken.core.names import unknown
from foretoken.methods.trees.base import Growth, Shape
from foretoken.registry import make, parse_spec, rows


def static_trees() -> list[str]:
    """Names of the trees of fixed shape."""
    return [row.name for row in rows("tree") if issubclass(row.load(), Shape)]


def dynamic_trees() -> list[str]:
    """Names of the trees that grow by the draft's confidence."""
    return [row.name for row in rows("tree") if issubclass(row.load(), Growth)]


def build_tree(spec: str, sort: type[Any]) -> Any:
    """A tree from its spec, of the sort ``Shape`` (fixed) or ``Growth`` (by the draft's confidence).

    Raises:
        ValueError: an unknown name or option, or a tree of the other sort; the message lists the choices.
    """
    able = [row.name for row in rows("tree") if issubclass(row.load(), sort)]
    if parse_spec(spec).name not in able:
        raise unknown(f"the tree cannot be {spec!r}", parse_spec(spec).name, able)
    return make("tree", spec)
