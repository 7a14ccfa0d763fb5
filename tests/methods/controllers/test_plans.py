"""Plans: goodput by hand, the argmax, and how they are told."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from foretoken.core import Budget, Limits
from foretoken.methods.controllers.cost_model import CostModel
from foretoken.methods.controllers.plan import Draft, RoundPlan, best_plan, planned

MEMBERS = (Limits("model", 4, 4), Limits("ngram", 10, 10))
COPY = Draft(1, 8, 5.0, 9.0, 0.0, 5.0, share=0.5)
MODEL = Draft(0, 2, 2.0, 3.0, 0.5, 2.0)


class Costs(CostModel):
    """A round costs a constant, and something for each node."""

    def __init__(self, node_s: float = 0.0, call_s: float = 1.0) -> None:
        super().__init__(MEMBERS)
        self.node_s, self.call_s = node_s, call_s

    def round_s(self, batch: int, nodes: float) -> float:
        return self.call_s + self.node_s * nodes


def test_a_plan_by_hand() -> None:
    """Half of the text five tokens a round, the other half two, with a draft of .5 in every round of that half."""
    plan = planned([COPY, MODEL], 1, Costs())
    rounds = 0.5 / 5 + 0.5 / 2
    assert plan.tokens == pytest.approx(1 / rounds)
    assert plan.seconds == pytest.approx(1 + 0.5 * (0.5 / 2) / rounds)
    assert plan.goodput == pytest.approx(plan.tokens / plan.seconds)
    assert planned([], 4, Costs(node_s=1 / 16)).seconds == pytest.approx(1.25)
    nodes = 2 * ((0.5 / 5) * 9 + (0.5 / 2) * 3) / rounds
    copies, other = (0.5 / 5) / rounds, (0.5 / 2) / rounds
    expected = 1 + nodes / 100 + 0.5 * (1 - copies**2)
    assert copies + other == pytest.approx(1)
    assert planned([COPY, MODEL], 2, Costs(node_s=0.01)).seconds == pytest.approx(expected)


def test_one_request_gets_the_best_of_every_stretch_and_a_batch_does_not_wait() -> None:
    """A draft for one of eight is waited for by all; plain rounds in the rest of the text are then no slower."""
    slow = replace(MODEL, seconds=0.9)
    plans = [best_plan([COPY, slow], batch, Costs(node_s=0.02))[0] for batch in (1, 8)]
    assert [[draft.member for draft in plan.drafts] for plan in plans] == [[1, 0], [1]]


def test_the_best_length_of_every_member() -> None:
    """One more token is worth it while it brings more than it costs."""
    tokens = [1 + sum(0.7**i for i in range(1, depth + 1)) for depth in range(1, 9)]
    drafts = [Draft(0, d, tokens[d - 1], 1.0 + d, 0.2 * d, tokens[d - 1]) for d in range(1, 9)]
    rates = [t / (1 + 0.2 * d) for d, t in enumerate(tokens, 1)]
    plan, rival = best_plan(drafts, 1, Costs())
    assert plan is rival and plan.drafts[0].depth == 1 + rates.index(max(rates))


def test_only_long_drafts_pay() -> None:
    """One token costs more than it brings, and so do two."""
    drafts = [Draft(0, d, 1 + 0.6 * d, 1.0 + d, 1.0 + 0.02 * d, 1 + 0.6 * d) for d in (1, 2, 4, 8)]
    assert best_plan(drafts[:1], 1, Costs())[0] == planned([], 1, Costs())
    assert best_plan(drafts, 1, Costs())[0].drafts == (drafts[3],)


def test_plain_where_nothing_pays_and_the_best_draft_is_known() -> None:
    plan, rival = best_plan([replace(MODEL, seconds=1.5), replace(MODEL, depth=1, seconds=1.2)], 1, Costs())
    assert plan.drafts == () and rival is not None and rival.drafts[0].depth == 1
    assert best_plan([], 1, Costs()) == (planned([], 1, Costs()), None)


def test_what_may_be_better_than_it_seems_is_explored() -> None:
    """The choice goes by the upper confidence bound; what is told is what is expected."""
    unsure = replace(MODEL, tokens=1.4, hoped=1.6)
    plan, _ = best_plan([unsure], 1, Costs())
    assert plan.drafts == (unsure,) and plan.tokens == pytest.approx(1.4) and plan.goodput == pytest.approx(1.6 / 1.5)
    assert best_plan([replace(unsure, hoped=1.4)], 1, Costs())[0].drafts == ()


class Step(Costs):
    """Beyond the root every round costs twice as much, however wide it is."""

    def round_s(self, batch: int, nodes: float) -> float:
        return 1.0 if nodes <= batch + 1e-9 else 2.0


def test_rounds_in_which_nobody_has_a_guess_cost_what_plain_ones_do() -> None:
    """Half of the rounds have nine nodes, the others one: five nodes on average, which no round has."""
    copy = replace(COPY, tokens=1.0, hoped=1.0)
    assert planned([copy], 1, Step()).seconds == pytest.approx(1.5)
    assert planned([copy], 3, Step()).seconds == pytest.approx(2 - 0.5**3)
    assert planned([replace(copy, share=1e-17)], 1, Step()).seconds == pytest.approx(1.0)
    assert planned([replace(copy, share=1.0)], 1, Step()).seconds == pytest.approx(2.0)


def test_a_target_that_pads_takes_as_long_as_its_widest_request() -> None:
    """Half of the rounds have nine nodes, the others one: of two requests at least one has nine in three of four."""
    copy, steep = replace(COPY, tokens=1.0, hoped=1.0), Costs(node_s=1.0, call_s=0.0)
    assert planned([copy], 2, steep).seconds == pytest.approx(10)
    assert planned([copy], 2, steep, pads=True).seconds == pytest.approx(0.75 * 18 + 0.25 * 2)
    assert planned([copy], 1, steep, pads=True).seconds == pytest.approx(5)


def test_a_plan_is_frozen_and_becomes_a_budget() -> None:
    plan = planned([COPY, MODEL], 1, Costs())
    with pytest.raises(FrozenInstanceError):
        plan.tokens = 2.0  # type: ignore[misc]
    assert plan.budget(MEMBERS, True) == Budget(8, 10, member=1, otherwise=Budget(2, 4, member=0))
    assert RoundPlan((MODEL,)).budget(MEMBERS[:1], False) == Budget(2, 4)
    assert RoundPlan().budget(MEMBERS, True) == Budget(0, 0)


def test_a_plan_in_one_line() -> None:
    plan = RoundPlan((COPY, replace(MODEL, depth=1)), 1.61, 1.7, 1.92)
    assert plan.described(MEMBERS, 1.0) == (
        "a round with 8 drafts of ngram, else 1 draft of model costs 1.92 plain rounds and brings 1.61 tokens"
    )
