"""Checks of fast paths are made anew in every test of models: a test may plant what a fingerprint does not see.

The fixture ``level`` runs a test of our kernels on every instruction set that this CPU has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.models.checks import fast_paths
from foretoken.models.linear import layouts, quantised
from foretoken.models.native import library

HERE = [name for name in library.LEVELS if library._cpu_level((name,))]
"""Instruction sets that this CPU has."""


@pytest.fixture(autouse=True)
def fresh_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is remembered from other tests."""
    monkeypatch.setattr(fast_paths.KEPT, "results", {})
    monkeypatch.setattr(fast_paths.KEPT, "file", lambda: tmp_path / "none" / "machine.json")


@pytest.fixture(params=HERE or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels are compiled for each instruction set in turn."""
    caches = (library._loaded, library.function, layouts.has_layout, quantised.available)
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setitem(library.ALLOWED, "native", (request.param,))
    for function in caches:
        function.cache_clear()
    yield request.param
    for function in caches:
        function.cache_clear()
