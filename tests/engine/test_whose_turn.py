"""Whose turn it is to join, where requests belong to several owners."""

from __future__ import annotations

import pytest

from foretoken.engine.admission import first_in_turn, kept_back
from foretoken.engine.request import Request
from toys import engine, tables


def joined(owners: list[str], places: int, kept: int, **more: int) -> list[str]:
    """Owners of the requests that join, in their order; ``"a!"`` has a priority of -1."""
    llm = engine(tables()[0], None)
    llm.serve(places, None, None, 0, kept_places=kept)
    for owner in owners:
        options = {"owner": owner.rstrip("!"), "priority": -1 if owner.endswith("!") else 0, **more}
        llm.add(Request([1, 2], max_new_tokens=50, **options))  # type: ignore[arg-type]
    llm.step()
    return [run.request.owner for run in llm.requests.running]


@pytest.mark.parametrize(("places", "kept"), [(1, 0), (2, 1), (8, 1), (9, 2), (16, 2), (272, 34)])
def test_an_eighth_is_kept_back(places: int, kept: int) -> None:
    assert kept_back(places) == kept


def test_one_owner_leaves_the_last_places_to_others() -> None:
    assert joined(["a"] * 9 + ["b"], places=4, kept=1) == ["a", "b", "a"]
    assert joined(["a"] * 9, places=4, kept=1) == ["a", "a", "a"]
    assert joined(["a"] * 9, places=4, kept=0) == ["a"] * 4


def test_each_owner_gets_a_place_in_turn() -> None:
    """An owner with more waiting requests gets no more places, and one owner alone is served in order of arrival."""
    assert joined(["a", "a", "a", "a", "b", "b", "c"], places=6, kept=0) == ["a", "b", "c", "a", "b", "a"]


def test_kept_places_go_to_those_who_have_none() -> None:
    assert joined(["a", "a", "a", "b", "c"], places=4, kept=2) == ["a", "b", "c"]
    assert joined(["a", "b", "c", "d"], places=4, kept=2) == ["a", "b", "c", "d"]


def test_priority_comes_before_shares_and_limits_before_both() -> None:
    assert joined(["b", "a", "a!", "a!"], places=3, kept=0) == ["a", "a", "b"]
    assert joined(["a", "a", "b"], places=3, kept=0, owner_running=1) == ["a", "b"]


def test_nobody_is_in_turn_where_all_wait_for_their_own() -> None:
    llm = engine(tables()[0], None)
    assert first_in_turn([], [], 4, 1) is None
    llm.serve(2, None, None, 0, kept_places=1)
    for _ in range(2):
        llm.add(Request([1], max_new_tokens=2, owner="a"))
    llm.step()
    assert len(llm.requests.running) == len(llm.requests.waiting) == 1
    done = sum(emission.finish_reason is not None for _ in range(9) if llm.busy for _, emission in llm.step())
    assert done == 2, "the second one follows the first"
