"""Check whether a file of ``foretoken tune tree`` was measured for the target that uses it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from foretoken.loading.measured.profile import fingerprint_of
from foretoken.models.base import LanguageModel


class TreeWarning(UserWarning):
    """A tree was measured for another target."""


def check_target(tree: str, target: LanguageModel) -> None:
    """Check the ``tree`` option of a drafter if it names a file; older files record no target.

    Warns:
        TreeWarning: the file is for another target, for which other positions may be better.
    """
    file = Path(tree).expanduser()
    if not tree or not file.is_file():
        return
    measured = json.loads(file.read_text(encoding="utf-8")).get("target")
    if isinstance(measured, dict) and measured.get("fingerprint") != fingerprint_of(target):
        text = f"the tree in {file} was measured for another target, {measured.get('source')}: its nodes may not be"
        warnings.warn(f"{text} the best ones here; run foretoken tune tree for a new one", TreeWarning, stacklevel=3)
