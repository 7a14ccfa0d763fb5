"""What was measured of a model on this machine, and kept for later runs: one JSON file per machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.io.files import cache_folder, write_json
from foretoken.models.linear.product_costs import machine_key

MOST_KEPT = 256
WORTH_KEEPING_S = 0.2
"""What takes less is measured again in another process: a file of tiny models would only grow."""

_KNOWN: dict[str, dict[str, Any]] = {}
"""Results of this process."""


def results_file() -> Path:
    """Where results of this machine are kept."""
    return cache_folder() / f"models-{machine_key()}.json"


def read(name: str) -> dict[str, Any] | None:
    """What was remembered under a name; ``None`` where nothing was."""
    if name not in _KNOWN:
        result = _read_file().get(name)
        if not isinstance(result, dict):
            return None
        _KNOWN[name] = result
    return _KNOWN[name]


def remember(name: str, result: dict[str, Any], took_s: float) -> None:
    """Keep a result that took so many seconds; in a folder that cannot be written only for this process."""
    _KNOWN[name] = result
    if took_s < WORTH_KEEPING_S:
        return
    kept = {**_read_file(), name: result}
    try:
        write_json(results_file(), dict(list(kept.items())[-MOST_KEPT:]))
    except OSError:
        return


def _read_file() -> dict[str, Any]:
    """A file that cannot be read counts as none."""
    try:
        content = json.loads(results_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
