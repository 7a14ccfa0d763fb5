"""Measured costs: what a scripted target and drafter took must come out, and the cost model's sums by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foretoken.core.costs import TargetCost
from foretoken.lab.bench.costs import DraftRound, draft_seconds, drafter_cost, predicted_speedup
from foretoken.models.base import Capabilities, Feed, Rows
from foretoken.models.call_costs import measure_target
from foretoken.models.other.table import TableModel


class Clocked(TableModel):
    """A table whose network takes 2 ms and 1 ms per node by its own account; a size's first call takes 1 s more."""

    def __init__(self, **more: object) -> None:
        distribution = TableModel.random(5, seed=1)
        super().__init__(distribution.distribution, 5, **more)  # type: ignore[arg-type]
        self.fed: list[list[int]] = []
        self.opened = 0

    def open(self):  # type: ignore[no-untyped-def]
        self.opened += 1
        return super().open()

    def release(self, sequence) -> None:  # type: ignore[no-untyped-def]
        self.opened -= 1
        super().release(sequence)

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        before = self.run_s
        rows = super().forward(feeds, taps)
        sizes = [len(feed.tokens) for feed in feeds]
        self.run_s = before + 0.002 + 0.001 * sum(sizes) + (sizes not in self.fed)
        self.fed.append(sizes)
        return rows


def test_a_target_costs_what_it_says() -> None:
    target = Clocked()
    cost = measure_target(target, [1, 2, 3], counts=(1, 3, 8), repeats=3)
    assert cost.seconds == pytest.approx({1: 0.003, 3: 0.005, 8: 0.010})
    assert cost.relative(8) == pytest.approx(10 / 3)
    assert target.opened == 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_pause_in_one_call_does_not_leave_out_larger_counts(at: int) -> None:
    class Pausing(Clocked):
        def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
            rows = super().forward(feeds, taps)
            self.run_s += 30.0 * (len(self.fed) == at)  # the network's call of that number, which follows the prefill
            return rows

    cost = measure_target(Pausing(), [1, 2, 3], counts=(1, 3, 8), repeats=3, typical=min, longest=6.0)
    assert cost.seconds == pytest.approx({1: 0.003, 3: 0.005, 8: 0.010})


def test_what_takes_too_long_leaves_out_larger_counts() -> None:
    cost = measure_target(Clocked(), [1, 2, 3], counts=(1, 8, 30, 60), repeats=3, typical=min, longest=6.0)
    assert cost.seconds == pytest.approx({1: 0.003, 8: 0.010, 30: 0.032})


def test_the_nodes_are_spread_over_a_batch() -> None:
    target = Clocked()
    cost = measure_target(target, [1, 2], counts=(1, 3, 7), repeats=2, batch=3)
    assert list(cost.seconds) == [3, 7]
    assert [1, 1, 1] in target.fed and [3, 2, 2] in target.fed
    assert cost.seconds[7] == pytest.approx(0.009)
    assert target.opened == 0


def test_trees_are_scored_in_their_shape() -> None:
    class Shaped(Clocked):
        parents: list[Sequence[int] | None]

        def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
            self.parents += [feed.parents for feed in feeds]
            return super().forward(feeds, taps)

    target = Shaped()
    target.parents = []
    cost = measure_target(target, [1, 2], counts=(1, 4), repeats=1, shapes=[[-1, 0, 0, 1]])
    _, *calls = target.parents  # the first one is the prefill
    assert calls == [None, [-1, 0, 0, 1]] * 2
    assert cost.seconds == pytest.approx({1: 0.003, 4: 0.006})


def test_counts_past_the_context_are_left_out() -> None:
    cost = measure_target(Clocked(context_length=12), list(range(4)) * 5, counts=(1, 6, 7), repeats=1)
    assert list(cost.seconds) == [1, 6]  # half of the context is text


def test_a_target_without_rollback_is_measured_with_single_nodes() -> None:
    target = Clocked(context_length=20)
    target.capabilities = Capabilities(rollback=False, tree_mask=False, keep_path=False)
    assert list(measure_target(target, [1, 2], counts=(1, 2, 4), repeats=3).seconds) == [1]


@pytest.mark.parametrize(("text", "more"), [([], {}), ([1], {"repeats": 0}), ([1], {"batch": 0})])
def test_what_cannot_be_measured(text: list[int], more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs a text"):
        measure_target(Clocked(), text, **more)


def test_drafts_of_several_lengths_tell_calls_from_steps() -> None:
    # 3 ms a call and 2 ms a level; two of eight rounds found nothing, in 3 ms.
    rounds = [DraftRound(1 + d, d, 0.003 + 0.002 * d) for d in (0, 0, 2, 2, 4, 4, 8, 8)]
    cost = drafter_cost([5 / 8], rounds)
    assert (cost.call_s, cost.step_s) == (pytest.approx(0.003), pytest.approx(0.002))
    assert cost.proposes == 0.75
    assert cost.nodes_per_depth == pytest.approx(1.0)


def test_drafts_of_one_length_are_all_steps() -> None:
    cost = drafter_cost([1.0], [DraftRound(9, 4, 0.008)] * 2)
    assert (cost.call_s, cost.step_s) == (0.0, pytest.approx(0.002))
    assert cost.nodes_per_depth == 2.0


def test_a_longer_draft_that_was_faster_is_noise_not_a_gain() -> None:
    cost = drafter_cost([1.0], [DraftRound(2, 1, 0.009), DraftRound(5, 4, 0.003)])
    assert cost.step_s == 0.0 and cost.call_s == pytest.approx(0.006)


def test_nodes_of_a_batch_are_those_of_all_its_requests() -> None:
    cost = drafter_cost([0.5], [DraftRound(10, 4, 0.01)] * 2, batch=2)
    assert cost.nodes_per_depth == 1.0


def test_the_prediction_by_hand() -> None:
    target = TargetCost({1: 0.010, 5: 0.012})
    rounds = [DraftRound(5, 4, 0.9)] * 3
    # 9 tokens in 3 rounds of 12 + 2 + 1 ms against 9 plain rounds of 10 + 1 ms.
    assert predicted_speedup(target, 0.001, {4: 0.002}, rounds, 9, 1) == pytest.approx(9 * 11 / 45)
    # Two requests a plain round.
    double = TargetCost({2: 0.010, 10: 0.012})
    rounds = [DraftRound(10, 4, 0.9)] * 3
    assert predicted_speedup(double, 0.001, {4: 0.002}, rounds, 18, 2) == pytest.approx(9 * 11 / 45)


def test_drafting_costs_its_mean_by_depth() -> None:
    rounds = [DraftRound(1, 0, 0.001), DraftRound(5, 4, 0.002), DraftRound(5, 4, 0.004)]
    assert draft_seconds(rounds) == {0: 0.001, 4: pytest.approx(0.003)}
