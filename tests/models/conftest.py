"""Checks of fast paths are made anew in every test of models: a test may plant what a fingerprint does not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.models import checks


@pytest.fixture(autouse=True)
def fresh_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is remembered from other tests."""
    monkeypatch.setattr(checks, "_KNOWN", {})
    monkeypatch.setattr(checks, "cache_folder", lambda: tmp_path / "none")
