"""``make test`` leaves out many cells and no kind of cell."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

import selection
from foretoken import registry
from foretoken.cli.main import app
from foretoken.core.noise import random_seed

PER_DRAFTER = {
    "greedy": ["exactness/test_matrix.py::test_greedy_in_a_ragged_batch"],
    "greedy under another rule": ["exactness/test_matrix.py::test_greedy_under_every_verifier"],
    "seeded": ["exactness/test_seeds.py::test_every_drafter_writes_the_text_of_the_seed"],
    "sampled": [
        "exactness/test_matrix.py::test_the_distribution_is_exactly_the_targets",
        "exactness/test_matrix.py::test_a_race_writes_what_plain_decoding_writes",
        "exactness/test_matrix.py::test_sampled_distribution_while_the_drafter_learns",
    ],
    "caches": ["exactness/test_state.py::test_caches_equal_a_fresh_prefill_after_every_round"],
    "company": ["exactness/test_state.py::test_joining_and_leaving_requests_change_nothing"],
    "load": ["exactness/test_mixed_load.py::test_every_request_of_a_random_mix_writes_what_it_writes_alone"],
    "graphs": ["exactness/test_graph_steps.py::test_every_drafter"],
}
WHOLE = [
    "docs/test_pages.py::test_commands_exist",
    "docs/test_pages.py::test_links_lead_somewhere",
    "exactness/test_planted_coupled_errors.py::test_walks_that_fix_up_the_winner_are_caught",
    "exactness/test_planted_errors.py::test_planted_errors_are_seen_by_the_exact_cell",
    "server/test_contract.py",
]
"""Files and functions that nothing is left out of."""


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """What ``make test`` runs; all of it must have been collected."""
    here = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and list(path.glob("test_*.py"))}
    items = [item for item in request.session.items if item.path.is_relative_to(selection.ROOT)]
    if not here <= {item.path.parent.name for item in items} or request.config.option.keyword:
        pytest.skip("only some folders were collected: whether a kind is missing cannot be said")
    return [item for item in items if item.get_closest_marker("slow") is None]


def by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(selection.name_of(item)[1], []).append(item)
    return groups


def test_every_drafter_keeps_a_cell_of_every_kind(quick: list[pytest.Item]) -> None:
    functions = by_function(quick)
    drafters = {row.name for row in registry.rows("drafter")}
    for kind, names in PER_DRAFTER.items():
        kept = {selection.drafter(item) for name in names for item in functions.get(name, [])}
        missing = drafters - kept
        assert not missing, (kind, missing)


def test_every_rule_keeps_a_sampled_cell(quick: list[pytest.Item]) -> None:
    from matrix import pairs  # of the exactness tests, which have been collected

    functions = by_function(quick)
    kept = {selection.rule(item) for name in PER_DRAFTER["sampled"] for item in functions.get(name, [])}
    rules = {pair.verifier for pair in pairs(greedy=False) if pair.races or not pair.learns}
    assert rules <= kept, rules - kept


def test_every_command_keeps_a_test(quick: list[pytest.Item]) -> None:
    texts = {inspect.getsource(inspect.getmodule(item.function)) for item in quick if isinstance(item, pytest.Function)}  # type: ignore[arg-type]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) > 10
    assert not [name for name in commands if not any(f'"{name}"' in text for text in texts)]


def test_what_has_to_stay_whole_is_whole(quick: list[pytest.Item]) -> None:
    assert set(WHOLE) <= {name for item in quick for name in selection.name_of(item)}
    assert not [row for row in selection.SLOW if row in WHOLE or row.partition("::")[0] in WHOLE]


def test_every_row_of_the_table_names_a_test() -> None:
    for row in selection.SLOW:
        file, _, function = row.partition("::")
        text = (selection.ROOT / file).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, row


def item(function: str, **params: Any) -> Any:
    return SimpleNamespace(
        path=selection.ROOT / "a/test_b.py", name=function, callspec=SimpleNamespace(params=params, id=str(params))
    )


def left_out(keys: list[selection.Key], row: str = "a/test_b.py::test_c") -> list[int]:
    items = [item("test_c", x=x, y=y) for x in (1, 2) for y in (1, 2, 3)] + [item("test_d", x=0, y=0)]
    slow_items: list[Any] = list(selection.slow(items, {row: keys}))
    return [items.index(test) for test in slow_items]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([selection.parameter("x")], [1, 2, 4, 5]),
        ([selection.parameter("x"), selection.parameter("y")], [4, 5]),
        ([selection.parameter("x", "y")], []),
    ],
)
def test_the_first_with_a_new_key_stays(keys: list[Callable[[Any], Any]], expected: list[int]) -> None:
    assert left_out(keys) == expected


def test_a_row_may_name_a_file() -> None:
    assert left_out([], "a/test_b.py") == [0, 1, 2, 3, 4, 5, 6]
    assert left_out([], "a/test_other.py") == []


def test_the_two_halves_are_all_and_ci_runs_parts_of_both() -> None:
    root = Path(__file__).parents[1]
    steps = (root / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"parts=64", "make check"} <= set(steps)
    assert [step.endswith(" % parts + 1))/$parts") for step in steps if step.startswith("make test SLOW=")] == [True]
    make = (root / "Makefile").read_text(encoding="utf-8")
    assert '$(if $(SLOW),--slow-part $(SLOW),-m "not slow")' in make
    assert "-m slow" in make and "test-all: test test-slow" in make


@dataclass(frozen=True)
class Named:
    """As much of a test as parts look at."""

    nodeid: str
    is_slow: bool

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.is_slow else None


def test_parts_of_the_slow_tests_are_all_of_them_once() -> None:
    items: list[Any] = [Named(f"a/test_b.py::test_c[{i}]", i % 3 > 0) for i in range(90)]
    parts = [[test for test in items if test not in selection.in_other_parts(items, f"{i}/4")] for i in range(1, 5)]
    slow_ones = [test for test in items if test.get_closest_marker("slow") is not None]
    assert [sum(test in part for part in parts) for test in slow_ones] == [1] * len(slow_ones)
    assert all(test in part for part in parts for test in items if test not in slow_ones)
    assert all(len([test for test in part if test in slow_ones]) >= 10 for part in parts)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", ""])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="--slow-part takes I/N"):
        selection.in_other_parts([], part)


def test_draws_without_a_seed_depend_on_the_test_alone(request: pytest.FixtureRequest) -> None:
    drawn = random_seed()
    torch.default_generator.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    assert random_seed() == drawn


def test_every_file_can_be_run_alone(request: pytest.FixtureRequest) -> None:
    """What a file takes from another folder lies where pytest looks: in ``pythonpath`` or beside a conftest above."""
    tests = selection.ROOT
    everywhere = {request.config.rootpath / path for path in request.config.getini("pythonpath")}
    folders: dict[str, set[Path]] = {}
    for path in tests.rglob("*.py"):
        folders.setdefault(path.stem, set()).add(path.parent)
    problems = []
    for path in tests.rglob("*.py"):
        above = {folder for folder in path.parents if (folder / "conftest.py").is_file()} | {path.parent} | everywhere
        taken = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        problems += [(path.name, name) for name in taken if name in folders and not folders[name] & above]
    assert not problems
