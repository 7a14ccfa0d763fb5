"""Arms take turns, another one first in each."""

from __future__ import annotations

import pytest

from foretoken.lab.timing import interleave, median_run, runs_of


def test_another_arm_begins_every_turn() -> None:
    order = [(turn, arm) for turn, arm in interleave("abc", 4, first=1)]
    assert "".join(arm for _, arm in order) == "bca" + "cab" + "abc" + "bca"
    assert [turn for turn, _ in order] == [turn for turn in range(4) for _ in range(3)]


def test_an_arm_that_leaves_is_out_from_the_next_turn_on() -> None:
    arms, seen = ["a", "b", "c"], ""
    for turn, arm in interleave(arms, 9):
        seen += arm
        if (turn, arm) in ((0, "a"), (1, "b"), (2, "c")):
            arms.remove(arm)
    assert seen == "abc" + "cb" + "c"


def test_without_arms_there_are_no_turns() -> None:
    assert not list(interleave([], 3))


def test_runs_are_kept_in_order() -> None:
    log: list[str] = []

    def arm(name: str) -> int:
        log.append(name)
        return len(log)

    runs = runs_of({name: lambda name=name: arm(name) for name in "ab"}, 3)  # type: ignore[misc]
    assert "".join(log) == "ab" + "ba" + "ab"
    assert runs == {"a": [1, 4, 5], "b": [2, 3, 6]}


@pytest.mark.parametrize(("runs", "middle"), [([5], 5), ([3, 1, 2], 2), ([4, 1, 3, 2], 2)])
def test_the_middle_run(runs: list[int], middle: int) -> None:
    assert median_run(runs, lambda run: run) == middle
