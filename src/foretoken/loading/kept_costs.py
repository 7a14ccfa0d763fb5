"""Measured costs that are kept in the user's cache folder, by what tells models, machines and drafters apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.core.costs import RoundCosts
from foretoken.core.io.files import cache_folder, write_json


def cache_file() -> Path:
    """Where they are kept."""
    return cache_folder() / "rounds.json"


def kept_costs(key: str) -> RoundCosts | None:
    """What an earlier run has kept; ``None`` where there is nothing, or somebody has damaged it."""
    try:
        return RoundCosts.from_dict(_read()[key])
    except (KeyError, ValueError):
        return None


def keep_costs(key: str, costs: RoundCosts) -> None:
    """Add a measurement; where the file cannot be written, it is measured again next time."""
    try:
        write_json(cache_file(), {**_read(), key: costs.as_dict()})
    except OSError:
        return


def _read() -> dict[str, Any]:
    """Measurements of earlier runs; a file that cannot be read counts as none."""
    try:
        stored = json.loads(cache_file().read_text(encoding="utf-8"))
        return dict(stored)
    except (OSError, ValueError, TypeError):
        return {}
