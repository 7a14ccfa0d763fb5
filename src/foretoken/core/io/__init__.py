"""Files and the cache folder; light, because every command imports it first."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder of this user and machine: ``$XDG_CACHE_HOME/foretoken``, else ``~/.cache/foretoken``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
