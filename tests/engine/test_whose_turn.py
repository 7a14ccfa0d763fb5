"""Whose turn it is to join, where requests belong to several owners."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from foretoken.engine.admission import first_in_turn, kept_back
from foretoken.engine.calls import Calls
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


def test_requests_without_owners_join_in_the_order_of_the_queue() -> None:
    for owners in (["", "", "", ""], ["!", "", "", "!"], [""] * 9):
        for kept in (0, 1, 2):
            assert joined(owners, places=3, kept=kept) == [""] * (3 - kept)
    assert joined(["", "", "a", ""], places=3, kept=0) == ["", "a", ""]
    assert joined(["a", "", ""], places=3, kept=1) == ["a", ""]
    assert joined(["", "", ""], places=3, kept=0, owner_running=2) == ["", ""]


def test_an_owner_who_comes_after_others_have_left_counts() -> None:
    llm = engine(tables()[0], None, max_batch=2)
    for _ in range(2):
        for owner in ("", "", "a"):
            llm.add(Request([1, 2], max_new_tokens=3, owner=owner))
        llm.step()
        assert [run.request.owner for run in llm.requests.running] == ["", "a"]
        while llm.busy:
            llm.step()


def calls_per_request(count: int, **more: Any) -> float:
    """Python calls for each of ``count`` requests that run together."""
    calls = Calls(engine(tables()[0], None))
    requests = [Request([1, 2], max_new_tokens=1, **(more if i % 50 == 49 else {})) for i in range(count)]
    number = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(counted)
    try:
        calls.finish(requests)
    finally:
        sys.setprofile(None)
    return number / count


@pytest.mark.parametrize("more", [{}, {"deadline_s": 600.0, "priority": 1}], ids=["alike", "some_with_deadlines"])
def test_a_request_costs_as_much_in_a_long_queue(more: dict[str, Any]) -> None:
    calls_per_request(8)  # what is computed once
    assert calls_per_request(400, **more) < 1.1 * calls_per_request(50, **more)


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
