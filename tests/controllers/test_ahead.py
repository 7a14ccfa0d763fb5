"""How long a batch takes whose requests end at different times, against simulations."""

import random
from itertools import pairwise
from statistics import fmean, median

import pytest

from foretoken.controllers.ahead import (
    ALIKE,
    MOST_ALIKE,
    Ahead,
    Alike,
    Own,
    batch_rounds,
    deviation,
    doubt_of,
    largest,
    overshoot,
    own_of,
    place_of,
)
from foretoken.controllers.hazards import Hazards
from foretoken.controllers.plans import Option, rate_of


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (8, 1.4236)])
def test_the_largest_of_several_normals(count: int, expected: float) -> None:
    """Order statistics from tables."""
    assert largest(count) == pytest.approx(expected, abs=0.03)


def price(active: int, size: int, alone: float) -> float:
    return alone + (1 - alone) * (active - 1) / (size - 1)


@pytest.mark.parametrize("alone", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("spread", [0, 30])
@pytest.mark.parametrize("slow", [0.6, 0.3])
def test_how_long_a_batch_takes(slow: float, spread: int, alone: float) -> None:
    """About 400 tokens each, drafts of two; half of the requests accept with .6, half with ``slow``."""
    rng = random.Random(0)
    chances, size = [0.6, slow] * 4, 8

    def rounds(length: int, accepts: float) -> int:
        count = 0
        while length > 0:
            length -= 1 + (rng.random() < accepts and 1 + (rng.random() < accepts))
            count += 1
        return count

    def tokens(accepts: float) -> float:
        return 1 + accepts + accepts**2

    taken, told = [], []
    for _ in range(200):
        lengths = [max(1, round(rng.gauss(400, spread))) for _ in chances]
        ends = sorted(map(rounds, lengths, chances))
        spans = [after - before for before, after in pairwise([0, *ends])]
        taken.append(sum(span * price(size - done, size, alone) for done, span in enumerate(spans)))
        mean = fmean(map(tokens, chances))
        variance = fmean(a - a * a + 4 * a * a - (a + a * a) ** 2 for a in chances)
        luck = (variance * 400 / mean) ** 0.5 / mean
        expected = [length / tokens(accepts) for length, accepts in zip(lengths, chances, strict=True)]
        told.append(batch_rounds(expected, luck, alone))
    assert fmean(told) == pytest.approx(fmean(taken), rel=0.03)


def test_a_batch_of_one_and_a_batch_of_equals() -> None:
    assert batch_rounds([7.0], 2.0, 0.5) == 7.0
    assert batch_rounds([7.0] * 4, 0.0, 0.5) == 7.0
    assert batch_rounds([2.0, 6.0], 0.0, 0.25) == pytest.approx(2.0 + 4 * 0.25)  # the last four rounds are cheap


def test_what_luck_adds_by_hand() -> None:
    """400 tokens, 1.44 a round with variance 1.44: sqrt(400) = 20 tokens, times 1.42 of eight, half of it lost."""
    ahead, wasted = Ahead([400] * 8), (1.44 / 1.44 + 0.44) / 4 / 400
    assert ahead.waits(0, 1.44, 1.44, 0.5) == pytest.approx(1 + 0.5 * largest(8) * 20 / 400 + wasted)
    assert Ahead([400]).waits(0, 1.44, 1.44, 1.0) == pytest.approx(1 + wasted)
    assert (Ahead([4, 8]).mean, Ahead([4, 8]).spread) == (6.0, 2.0) and deviation([3.0, 3.0]) == 0.0


def test_what_is_not_known_of_requests_by_hand() -> None:
    """Six of ten stand in general: p(1 - p) / (p p (weight + tries + 1)) of a Beta law, in drafts of one token."""
    general = [Hazards([1000.0], [600.0])]
    new, known = doubt_of([Hazards()], general, 8), doubt_of([Hazards([320.0], [192.0])], general, 8)
    assert new[0] == pytest.approx(0.4 / (0.6 * 65), rel=1e-3)
    assert known[0] == pytest.approx(0.4 / (0.6 * 105), rel=1e-3)
    assert doubt_of([Hazards()], general, 1) == {}
    ahead = Ahead([96] * 8, doubt=new)
    assert ahead.unknown(0, 1.6, 0.24) == pytest.approx(0.6 * new[0] ** 0.5 / 1.6)
    assert ahead.unknown(1, 1.6, 0.24) == ahead.unknown(0, 1.0, 0.0) == 0.0
    luck = (0.24 * 60) ** 0.5 / 96
    assert ahead.waits(0, 1.6, 0.24, 1.0) == pytest.approx(
        1 + largest(8) * (luck**2 + ahead.unknown(0, 1.6, 0.24) ** 2) ** 0.5 + overshoot(1.6, 0.24) / 96
    )


def test_what_the_last_round_drafts_in_vain() -> None:
    """Texts of 60 tokens in rounds of 1 to 4: so many are written that nobody wanted, half of which cost nothing."""
    rng, beyond = random.Random(2), []
    for _ in range(4000):
        length = 0
        while length < 60:
            length += rng.choice((1, 2, 3, 4))
        beyond.append(length - 60)
    assert overshoot(2.5, 1.25) == pytest.approx(fmean(beyond) / 2, rel=0.05) and overshoot(1.0, 0.0) == 0.0


def test_tokens_change_more_than_the_chance_of_each_place() -> None:
    """Drafts of three with .6 each: (S1 + 2 S2 + 3 S3) of what each place changes, as is seen by changing it."""

    def tokens_of(chance: float) -> tuple[float, float]:
        stands = [chance, chance**2, chance**3]
        tokens = 1 + sum(stands)
        return tokens, sum((2 * i + 1) * s for i, s in enumerate(stands)) - (tokens - 1) ** 2

    tokens, variance = tokens_of(0.6)
    changed = (tokens_of(0.6001)[0] - tokens) / 0.0001 * 0.6 / (tokens - 1)
    assert place_of(tokens, variance) == pytest.approx(changed, rel=1e-3) and changed > 1.6
    assert place_of(1.6, 0.24) == pytest.approx(1.0) and place_of(1.0, 0.0) == 1.0
    ahead = Ahead([96] * 8, doubt={0: 0.01})
    assert ahead.unknown(0, tokens, variance) == pytest.approx(0.1 * changed * (tokens - 1) / tokens, rel=1e-3)


@pytest.mark.parametrize(("weight", "found"), [(16.0, (10.0, 26.0)), (64.0, (45.0, 90.0)), (None, (150.0, MOST_ALIKE))])
def test_how_alike_requests_are_is_seen_of_those_that_ended(weight: float | None, found: tuple[float, float]) -> None:
    """Drafts whose first token stands with a chance from a Beta law around .6, or with .6 in all requests."""
    rng, weights = random.Random(1), []
    for _ in range(20):
        alike = Alike()
        assert alike.weight == pytest.approx(ALIKE)
        for _ in range(200):
            accepts = rng.betavariate(0.6 * weight, 0.4 * weight) if weight else 0.6
            alike.count(60, sum(rng.random() < accepts for _ in range(60)), 0.6)
        weights.append(alike.weight)
    low, high = found
    assert low < median(weights) <= high
    before = alike.weight
    for tries, usual in ((1, 0.6), (60, 1.0), (60, 0.0)):  # nothing to be seen there
        alike.count(tries, tries, usual)
    assert alike.weight == before


def test_requests_are_believed_to_be_unlike_as_far_as_others_were() -> None:
    general, half = [Hazards([100.0], [60.0])], Hazards([40.0], [12.0])
    doubts = [doubt_of([half], general, 2, [weight])[0] for weight in (16.0, 64.0, 256.0)]
    assert doubts == sorted(doubts, reverse=True) and doubts[1] == doubt_of([half], general, 2)[0]
    owns = [own_of([[half], [Hazards()]], [half], general, [weight])[0][0].stands for weight in (16.0, 64.0, 256.0)]
    assert owns == sorted(owns) and owns[0] < 0.9 and owns[2] > 0.95


def test_requests_of_which_nothing_is_known_are_not_alike() -> None:
    """Acceptances drawn from a Beta law around .6 with the weight of 64 drafts, 96 tokens in drafts of one token.

    Plans that take them to be alike promise 3 % too much.
    """
    rng, size = random.Random(0), 8
    option, plain = Option(0, 1, 1.6, 2.0, 0.0, 1.0, variance=0.24), Option(-1, 0, 1.0, 1.0, 0.0, 1.0)
    taken = []
    for _ in range(600):
        rounds = []
        for accepts in (rng.betavariate(0.6 * 64, 0.4 * 64) for _ in range(size)):
            left, count = 96, 0
            while left > 0:
                left -= 1 + (rng.random() < accepts)
                count += 1
            rounds.append(count)
        taken.append(max(rounds))

    def told(doubt: dict[int, float]) -> float:
        rate = rate_of([option, plain], size, lambda n: 1.0, lambda n: 0.0, Ahead([96] * size, doubt=doubt))
        return 96 / rate

    assert told(doubt_of([Hazards()], [Hazards([1000.0], [600.0])], size)) == pytest.approx(fmean(taken), rel=0.02)
    assert told({}) < 0.975 * fmean(taken)


def test_what_a_request_is_like() -> None:
    """Unlike the others only as far as it was seen to be; a member that nobody was asked for has no own figures."""
    general = [Hazards([100.0], [60.0], 90.0, 10.0), Hazards()]
    easy, hard = Hazards([80.0], [72.0], 80.0, 0.0), Hazards([80.0], [24.0], 80.0, 80.0)
    new, unseen = Hazards(), Hazards()
    pooled = [Hazards([160.0], [96.0], 160.0, 80.0), Hazards()]
    first, second, third = own_of([[easy, unseen], [hard, unseen], [new, unseen]], pooled, general)
    assert first.keys() == {0}
    assert 1.2 < first[0].stands < 1.5 and 0.6 < second[0].stands < 0.8
    assert third[0].stands == pytest.approx(1.0, abs=0.02)
    assert first[0].share > third[0].share > second[0].share
    assert own_of([[easy, unseen]], pooled, general) == []
    assert Own() == Own(1.0, 1.0)
