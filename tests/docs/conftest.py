"""Puts the scripts of the documentation, and what drives a browser for the server's tests, on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "server"))
