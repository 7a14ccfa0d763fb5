"""``foretoken methods``: the registry as lists, one method in full, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foretoken as ft
from foretoken.registry import Row, options_of, rows
from foretoken.training.recipes import RECIPES

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


def test_every_summary_is_whole_within_80_columns(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("methods")
    assert result.code == 0
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = " ".join(result.out.split())
    for row in rows():
        assert sum(line.startswith(f"  {row.name} ") for line in lines) == sum(
            row.name == other.name for other in rows()
        )
        mark = " (trained)" if row.needs_training else "" if row.lossless else " (lossy)"
        assert f" {row.name} {row.summary}{mark} " in listed
    assert "--allow-lossy" in result.out


def test_every_summary_is_a_short_sentence_about_the_method() -> None:
    for row in rows():
        assert len(row.summary) <= 85 and row.summary.count(".") == 1, row.name
        assert row.summary.split()[0].endswith("s"), f"{row.name}: begin with a verb, as in 'Drafts with ...'"


def test_one_method_in_full(run: Any) -> None:
    result = run("methods", "eagle3")
    assert result.code == 0
    (row,) = (row for row in rows() if row.name == "eagle3")
    for text in (row.summary, row.paper, "needs a trained network", f"--drafter {row.example}"):
        assert text in " ".join(result.out.split())
    assert run("methods", "eagle3", "--json").json["methods"][0]["name"] == "eagle3"


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.role}-{row.name}")
def test_json_of_one_method_has_its_options(run: Any, row: Row) -> None:
    (found,) = run("methods", row.name, "--role", row.role, "--json").json["methods"]
    assert set(found) == FIELDS | {"options", "settings"}
    assert [option["name"] for option in found["options"]] == list(options_of(row.load()))
    assert all(set(option) == {"name", "type", "default", "meaning"} for option in found["options"])
    assert bool(found["settings"]) == (row.name in RECIPES or row.name == "specdec_pp")


@pytest.mark.parametrize("name", ["typical", "sequoia", "bandit", "eagle3", "known"])
def test_options_are_a_table_of_80_columns(run: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("methods", name)
    assert max(map(len, result.out.splitlines())) <= 80
    words = " ".join(result.out.split())
    assert f"options of {name},NAME=VALUE" in words
    (row,) = (row for row in rows() if row.name == name)
    lines = [line.split() for line in result.out.splitlines() if line.startswith(" ")]
    for option in row.options():
        begin = [option.name, *option.shown_default.split(), *option.meaning.split()[:2]]
        assert begin in [line[: len(begin)] for line in lines], begin


def test_settings_of_training_are_listed(run: Any) -> None:
    words = " ".join(run("methods", "medusa").out.split())
    assert "settings of foretoken train medusa --set NAME=VALUE" in words
    assert "head_weight 0.2 in the joint mode" in words
    assert "settings" not in run("methods", "ngram").out


def test_a_method_without_options_has_no_table(run: Any) -> None:
    assert "NAME=VALUE" not in run("methods", "greedy").out


def test_options_of_a_drafter_in_a_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from foretoken import Drafter, TokenTree\n\n\nclass Mine(Drafter):\n"
        '    """Mine.\n\n    Args:\n        depth: tokens of a draft.\n    """\n\n'
        '    name = "mine"\n\n'
        "    def __init__(self, depth: int = 2) -> None: ...\n\n"
        "    def propose(self, context, budget):\n        return TokenTree.root_only(context.root)\n"
    )
    (found,) = run("methods", f"{file}:Mine", "--json").json["methods"]
    assert found["options"] == [{"name": "depth", "type": "int", "default": 2, "meaning": "tokens of a draft"}]


def test_an_unknown_option_names_the_command(run: Any) -> None:
    result = run("generate", "hi", "--drafter", "ngram,size=3")
    assert result.code == 2
    assert result.err.endswith("valid ones: n, k, min_n, match; `foretoken methods ngram` explains them\n")


@pytest.mark.parametrize("method", ["medusa", "early_exit", "specdec_pp"])
def test_help_of_training_names_the_command(run: Any, method: str) -> None:
    words = " ".join(run("train", method, "--help").out.replace("│", " ").split())
    assert "`foretoken methods METHOD` explains them" in words


def test_an_unknown_method_is_one_line(run: Any) -> None:
    result = run("methods", "eagle7")
    assert result.code == 2
    assert "unknown method 'eagle7'" in result.err


def test_a_method_of_another_role_is_named_with_its_own(run: Any) -> None:
    result = run("methods", "ngram", "--role", "verifier")
    assert result.code == 2 and result.err == "error: ngram is a drafter: leave out --role, or give --role drafter\n"
