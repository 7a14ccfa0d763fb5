"""How long a batch takes whose requests end at different times, against simulations."""

import random
from itertools import pairwise
from statistics import fmean

import pytest

from foretoken.controllers.ahead import Ahead, Own, batch_rounds, deviation, largest, own_of
from foretoken.controllers.learned import Hazards


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
    ahead = Ahead([400] * 8)
    assert ahead.waits(1.44, 1.44, 0.5) == pytest.approx(1 + 0.5 * largest(8) * 20 / 400)
    assert Ahead([400]).waits(1.44, 1.44, 1.0) == 1.0
    assert (Ahead([4, 8]).mean, Ahead([4, 8]).spread) == (6.0, 2.0) and deviation([3.0, 3.0]) == 0.0


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
