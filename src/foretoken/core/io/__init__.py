"""Files, and the folder for what is kept between runs; light, because commands ask for that before anything else."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """What is kept for this user and machine: ``$XDG_CACHE_HOME/foretoken``, else ``~/.cache/foretoken``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
