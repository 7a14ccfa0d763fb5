"""Files of ``foretoken tune tree``: the limits in one, and whether it was measured for the target that uses it."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretoken.core.io.hub_ids import expanded
from foretoken.core.specs import convert_options
from foretoken.loading.measured.profile import fingerprint_of
from foretoken.models.base import LanguageModel


class TreeWarning(UserWarning):
    """A tree was measured for another target."""


def file_of(tree: str) -> Path | None:
    """The file that a ``tree`` option names; ``None`` for a tree in words, which may be longer than any path."""
    file = expanded(tree)
    with suppress(OSError):
        return file if file.is_file() else None
    return None


def check_target(tree: str, target: LanguageModel) -> None:
    """Check the ``tree`` option of a drafter if it names a file; older files record no target.

    Warns:
        TreeWarning: the file is for another target, for which other positions may be better.
    """
    file = file_of(tree)
    if file is None:
        return
    measured = json.loads(file.read_text(encoding="utf-8")).get("target")
    if isinstance(measured, dict) and measured.get("fingerprint") != fingerprint_of(target):
        text = f"the tree in {file} was measured for another target, {measured.get('source')}: its nodes may not be"
        warnings.warn(f"{text} the best ones here; run foretoken tune tree for a new one", TreeWarning, stacklevel=3)


def with_limits(cls: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those in the file that ``tree`` names in its place, if it holds limits instead of a shape.
    Options given beside the file win.

    Raises:
        ValueError: the file is for another drafter, or its limits are not this one's.
    """
    file = file_of(str(options.get("tree") or ""))
    if file is None:
        return options
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        limits = content.get("limits") if isinstance(content, dict) else None
    except (OSError, ValueError):  # the drafter, which reads shapes, says what is wrong
        return options
    if not isinstance(limits, dict):
        return options
    if content.get("method") != cls.name:
        raise ValueError(f"the tree in {file} was made for {content.get('method')!r}, not for {cls.name!r}")
    read = convert_options("drafter", cls.name, cls, {name: str(value) for name, value in limits.items()})
    return {**read, **{name: value for name, value in options.items() if name != "tree"}}
