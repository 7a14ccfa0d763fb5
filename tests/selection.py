"""Which tests ``make test`` leaves to ``make test-slow``.  This is the one place that decides.

``SLOW`` names tests by file and function, or whole files.  Its values say what stays in ``make test`` all the same: a
cell stays while it is the first with one of its keys (the first of each drafter, say), and without keys none stays.
``pytest.mark.slow`` on a test does the same as a row without keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path

import pytest

Key = Callable[[pytest.Item], Hashable]
ROOT = Path(__file__).parent


def parameter(*names: str) -> Key:
    """The values of some parameters."""
    return lambda item: tuple(str(item.callspec.params[name]) for name in names)  # type: ignore[attr-defined]


def drafter(item: pytest.Item) -> Hashable:
    """The drafter of a cell of the exactness matrix, whose id is ``drafter.case`` or ``drafter.case.verifier``."""
    found = re.search(r"(\w+)\.", item.callspec.id)  # type: ignore[attr-defined]
    return found[1] if found else item.name


def rule(item: pytest.Item) -> Hashable:
    """The verifier of a pair of the matrix and the sorts of proposals that it sees there."""
    pair = item.callspec.params["pair"]  # type: ignore[attr-defined]
    return pair.verifier, pair.proposals


SLOW: dict[str, Sequence[Key]] = {}


def name_of(item: pytest.Item) -> tuple[str, str]:
    """The file, relative to this folder, and ``file::function``."""
    file = str(item.path.relative_to(ROOT)) if item.path.is_relative_to(ROOT) else str(item.path)
    return file, f"{file}::{item.originalname if isinstance(item, pytest.Function) else item.name}"


def slow(items: Iterable[pytest.Item], table: dict[str, Sequence[Key]] = SLOW) -> Iterable[pytest.Item]:
    """Those of the collected tests that ``make test`` leaves out."""
    seen: set[Hashable] = set()
    for item in items:
        file, function = name_of(item)
        row = function if function in table else file
        if row not in table:
            continue
        keys = [(function, index, key(item)) for index, key in enumerate(table[row])]
        if seen.issuperset(keys):
            yield item
        seen.update(keys)
