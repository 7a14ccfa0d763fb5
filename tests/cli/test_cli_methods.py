"""``foretoken methods``: the registry as lists, one method in full, and as JSON."""

from __future__ import annotations

from typing import Any

import pytest

import foretoken as ft
from foretoken.registry import rows

FIELDS = {"name", "role", "paper", "lossless", "needs_training", "needs", "kind", "example", "summary"}


def test_json_is_the_registry(run: Any) -> None:
    report = run("methods", "--json").json
    assert set(report) == {"methods"}
    assert report["methods"] == ft.methods()
    assert all(set(row) == FIELDS for row in report["methods"])


@pytest.mark.parametrize("role", ["drafter", "verifier", "controller", "tree"])
def test_one_role(run: Any, role: str) -> None:
    methods = run("methods", "--role", role, "--json").json["methods"]
    assert [row["name"] for row in methods] == [row.name for row in rows(role)]  # type: ignore[arg-type]


def test_every_method_is_one_line_of_80_columns(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("methods")
    assert result.code == 0
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    for row in rows():
        assert sum(line.startswith(f"  {row.name} ") for line in lines) == sum(
            row.name == other.name for other in rows()
        )
    assert "--allow-lossy" in result.out


def test_one_method_in_full(run: Any) -> None:
    result = run("methods", "eagle3")
    assert result.code == 0
    (row,) = (row for row in rows() if row.name == "eagle3")
    for text in (row.summary, row.paper, "needs a trained network", f"--drafter {row.example}"):
        assert text in " ".join(result.out.split())
    assert run("methods", "eagle3", "--json").json["methods"][0]["name"] == "eagle3"


def test_an_unknown_method_is_one_line(run: Any) -> None:
    result = run("methods", "eagle7")
    assert result.code == 2
    assert "unknown method 'eagle7'" in result.err


def test_a_method_of_another_role_is_named_with_its_own(run: Any) -> None:
    result = run("methods", "ngram", "--role", "verifier")
    assert result.code == 2 and result.err == "error: ngram is a drafter: leave out --role, or give --role drafter\n"
