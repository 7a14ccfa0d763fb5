"""``foretoken methods``: the registry as a table and as JSON."""

from __future__ import annotations

from typing import Any

import pytest

import foretoken as ft
from foretoken.registry import rows

FIELDS = {"name", "role", "paper", "lossless", "needs_training", "needs", "kind", "example", "summary"}


def test_json_is_the_registry(run: Any) -> None:
    found = run("methods", "--json").json
    assert set(found) == {"methods"}
    assert found["methods"] == ft.methods()
    assert all(set(row) == FIELDS for row in found["methods"])


@pytest.mark.parametrize("role", ["drafter", "verifier", "controller", "tree"])
def test_one_role(run: Any, role: str) -> None:
    found = run("methods", "--role", role, "--json").json["methods"]
    assert [row["name"] for row in found] == [row.name for row in rows(role)]  # type: ignore[arg-type]


def test_tables_name_every_method(run: Any) -> None:
    result = run("methods")
    assert result.code == 0
    for row in rows():
        assert row.name in result.out
    assert "--allow-lossy" in result.out
