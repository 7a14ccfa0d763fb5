"""One tiny target for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_nets import save_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder."""
    return save_target(tmp_path_factory.mktemp("formats") / "target")


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same shape with other weights."""
    return save_target(tmp_path_factory.mktemp("formats") / "other", seed=1)
