"""Unknown names: the nearest ones, all valid ones for programs, a short line for people."""

from __future__ import annotations

import pickle

import pytest

from foretoken.core.names import UnknownName, did_you_mean, unknown
from foretoken.registry import find, rows

NAMES = ["model", "ngram", "ngram_cache", "eagle", "eagle3", "medusa"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ngrm", "did you mean ngram? "),
        ("NGRAM", "did you mean ngram? "),
        ("eagle2", "did you mean eagle or eagle3? "),
        ("nonsense", ""),
        ("", ""),
    ],
)
def test_what_was_probably_meant(name: str, hint: str) -> None:
    assert did_you_mean(name, NAMES) == hint


def test_three_names_at_most() -> None:
    assert did_you_mean("tree1", ["tree2", "tree3", "tree4", "tree5"]).count("tree") == 3


def test_the_message_lists_all_and_the_short_one_says_where_they_are() -> None:
    many = [f"method_{number}" for number in range(40)]
    error = unknown("unknown method 'metod_1'", "metod_1", many, catalogue="`foretoken methods` lists all")
    assert all(name in str(error) for name in many) and "did you mean method_1" in str(error)
    assert error.short.endswith("? `foretoken methods` lists all") and len(error.short) < 120
    far = unknown("unknown method 'x'", "x", many, catalogue="see the list", examples=("method_1", "method_2"))
    assert far.short == "unknown method 'x': choose one of method_1, method_2, ...; see the list"


def test_a_short_list_is_shown_whole() -> None:
    error = unknown("unknown role 'a'", "a", ["drafter", "tree"], catalogue="see the list")
    assert error.short == str(error) == "unknown role 'a': choose one of drafter, tree"


def test_it_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(UnknownName("long", "short")))
    assert (str(error), error.short) == ("long", "short")


def test_the_library_lists_every_method_that_is_valid() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'egle3': did you mean eagle3, eagle or peagle") as error:
        find("drafter", "egle3")
    assert all(row.name in str(error.value) for row in rows("drafter"))
