"""The server that most tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from running_server import Running, served


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    """One server for all tests that do not change it."""
    with served(metrics_compat="vllm") as running:
        yield running
