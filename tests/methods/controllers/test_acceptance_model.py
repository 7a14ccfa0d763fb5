"""Acceptance statistics: counts, discount, and shrinkage between request, population and depth."""

from __future__ import annotations

import pytest

from foretoken.core import Limits
from foretoken.methods.controllers.acceptance_model import (
    DEPTH_WEIGHT,
    FIRST_WEIGHT,
    PRIOR,
    REQUEST_KEEP,
    REQUEST_WEIGHT,
    AcceptanceModel,
    DraftCounts,
)


def members(count: int, cost: float = 0.2) -> list[Limits]:
    return [Limits(f"m{i}", 8, 8, relative_cost=cost) for i in range(count)]


def test_counts_by_hand() -> None:
    """Drafts of three: one accepted whole, one to the first token, and a round without a guess."""
    counts = DraftCounts()
    for depth, accepted in ((3, 3), (3, 1), (0, 0)):
        counts.add(depth, accepted)
    assert counts.tries == [2, 2, 1] and counts.hits == [2, 1, 1]
    assert (counts.covered, counts.bare) == (4 + 2, 1)


def test_pooled_counts_are_those_of_all() -> None:
    first, second = DraftCounts(), DraftCounts()
    first.add(3, 3)
    second.add(1, 0)
    pooled = DraftCounts.pooled([first, second])
    assert pooled.tries == [2, 1, 1] and pooled.hits == [1, 1, 1] and pooled.covered == 5
    assert DraftCounts.pooled([]) == DraftCounts()


def test_shrinkage_by_hand() -> None:
    """Four drafts of the population, three accepted; a request's own two, none."""
    model, own = AcceptanceModel(members(1), keep=1.0), DraftCounts()
    for accepted in (1, 1, 1, 0):
        model.add(False, 0, DraftCounts(), 1, accepted)
    usual = (3 + FIRST_WEIGHT * PRIOR) / (4 + FIRST_WEIGHT)
    outlook = model.outlook(False, 0, own, 2)
    assert outlook.survival == pytest.approx([usual, usual * usual])  # of the second depth nothing is known
    assert outlook.drafts == 4
    own.add(1, 0)
    own.add(1, 0)
    shrunk = REQUEST_WEIGHT * usual / (2 + REQUEST_WEIGHT)
    assert model.outlook(False, 0, own, 1).survival == pytest.approx([shrunk])
    assert model.outlook(False, 0, own, 1, requests=4).survival[0] > shrunk  # of four requests two drafts say less


def test_a_deeper_place_is_like_the_one_before_it_until_seen() -> None:
    model = AcceptanceModel(members(1), keep=1.0)
    for _ in range(10**4):
        model.add(False, 0, DraftCounts(), 2, 1)  # the first token is always right, the second never
    first, second = model.outlook(False, 0, DraftCounts(), 2).survival
    assert first == pytest.approx(1.0, abs=0.01) and second == pytest.approx(DEPTH_WEIGHT / 10**4, abs=0.01)


def test_requests_of_one_kind_say_nothing_of_the_other() -> None:
    model = AcceptanceModel(members(2))
    for _ in range(20):
        model.add(True, 1, DraftCounts(), 1, 1)
    unseen = model.outlook(False, 1, DraftCounts(), 1)
    assert unseen == model.outlook(True, 0, DraftCounts(), 1) and unseen.survival == pytest.approx([PRIOR])
    assert model.outlook(True, 1, DraftCounts(), 1).survival[0] > 0.9


def test_what_was_long_ago_counts_less_also_where_nothing_came_since() -> None:
    model = AcceptanceModel(members(2), keep=0.95)
    for member in (0, 1):
        for _ in range(50):
            model.add(False, member, DraftCounts(), 1, 1)
    for _ in range(16):
        model.tick()
        model.add(False, 1, DraftCounts(), 1, 0)
    assert model.outlook(False, 0, DraftCounts(), 1).drafts == pytest.approx(50 * 0.95**16)
    assert (
        model.outlook(False, 1, DraftCounts(), 1).survival[0]
        < 0.75
        < 0.9
        < model.outlook(False, 0, DraftCounts(), 1).survival[0]
    )


def test_a_text_tells_more_of_what_copies_than_of_a_network() -> None:
    """If few texts can be copied, four right drafts raise the outlook of copies much, and a network's hardly."""
    outlooks = []
    for cost in (0.0, 0.2):
        model, own = AcceptanceModel(members(1, cost), keep=1.0), DraftCounts()
        for _ in range(100):
            model.add(True, 0, DraftCounts(), 1, 0)
        for _ in range(4):
            model.add(True, 0, own, 1, 1)
        outlooks.append(model.outlook(True, 0, own, 1).survival[0])
    assert outlooks[0] > 0.5 and outlooks[1] < 0.2


def test_a_request_forgets_its_own_rounds() -> None:
    model, own = AcceptanceModel(members(1)), DraftCounts()
    model.add(False, 0, own, 1, 1)
    model.add(False, 0, own, 1, 0)
    assert own.tries == pytest.approx([1 + REQUEST_KEEP]) and own.hits == pytest.approx([REQUEST_KEEP])


def test_the_share_of_the_text_with_guesses() -> None:
    model, own = AcceptanceModel(members(1), keep=1.0), DraftCounts()
    for _ in range(1000):
        model.add(False, 0, own, 4, 2)  # three tokens
        model.add(False, 0, own, 0, 0)  # one
    assert model.outlook(False, 0, own, 4).share == pytest.approx(0.75, abs=0.01)
    assert model.outlook(True, 0, DraftCounts(), 4).share == 1.0  # of what was never asked all is hoped


def test_a_profile_is_worth_some_drafts() -> None:
    model = AcceptanceModel(members(1))
    model.start_from(0, (0.5, 0.1), proposes=0.5)
    outlook = model.outlook(True, 0, DraftCounts(), 2)
    assert outlook.survival[0] == pytest.approx(0.51, abs=0.01) and outlook.survival[1] < 0.2
    assert outlook.drafts == 16 and outlook.share == pytest.approx(0.63, abs=0.02)


def test_one_copied_text_promises_no_other_text_long_drafts() -> None:
    """Half of the texts repeat themselves: what follows a first token is theirs, and a text whose first tokens fail is
    none of them.  By hand, with eight own drafts and four of others, (8 * 0 + 4 * .5) / 12 at every depth."""
    model, own = AcceptanceModel(members(1, 0.0), keep=1.0), DraftCounts()
    for _ in range(1000):
        model.add(True, 0, DraftCounts(), 8, 8)
        model.add(True, 0, DraftCounts(), 8, 0)
    own.tries, own.hits = [8.0], [0.0]
    survival = model.outlook(True, 0, own, 8).survival
    assert survival == pytest.approx([4 * 0.5 / 12] * 8, rel=0.02)


def test_a_batch_of_both_kinds_has_the_mean_of_their_outlooks() -> None:
    model, greedy, sampled = AcceptanceModel(members(1), keep=1.0), DraftCounts(), [DraftCounts() for _ in range(3)]
    for _ in range(20):
        model.add(True, 0, greedy, 2, 2)
        for counts in sampled:
            model.add(False, 0, counts, 2, 0)
    one = model.outlook(True, 0, greedy, 2)
    three = model.outlook(False, 0, DraftCounts.pooled(sampled), 2, 3)
    both = [(True, greedy), *((False, counts) for counts in sampled)]
    for batch in (both, both[::-1]):
        outlook = model.batch_outlook(0, batch, 2)
        means = [0.25 * a + 0.75 * b for a, b in zip(one.survival, three.survival, strict=True)]
        assert outlook.survival == pytest.approx(means)
        assert outlook.share == pytest.approx(0.25 * one.share + 0.75 * three.share)
        assert outlook.drafts == pytest.approx(1 / (1 / 16 / 21 + 9 / 16 / 61) - 1)
    assert model.batch_outlook(0, both[:1], 2) == one and model.batch_outlook(0, both[1:], 2) == three
