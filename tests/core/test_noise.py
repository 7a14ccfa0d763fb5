"""Noise: a function of seed, position and token alone, exponential, independent, always the same stream."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, expon, kstest, norm
from torch import Tensor

from foretoken.core import noise as noise_module
from foretoken.core.noise import SEEDS, Noise, NumPySource, check_seed, random_seed, samples_of, seeds_of
from foretoken.models.native import library
from foretoken.models.native.noise import NativeSource, noise_source

CPU = torch.device("cpu")
FALSE_ALARM = 1e-4
COUNT = 40_000


@pytest.fixture(autouse=True, params=["NumPy", "native"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both sources of numbers."""
    if request.param == "native":
        if library.why_not() is not None:
            pytest.skip(f"no kernels: {library.why_not()}")
        monkeypatch.setattr(noise_module, "NumPySource", NativeSource)
    return str(request.param)


def gumbels(noise: Noise, position: int, size: int) -> Tensor:
    return noise.gumbels(position, size, CPU)


# -- what the numbers depend on --------------------------------------------------------------------------------------


def test_order_repetition_and_cache_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    places = list(product((0, 7, SEEDS - 1), range(12), (5, 40)))
    fresh = {place: gumbels(Noise(place[0]), *place[1:]).clone() for place in places}
    numbers = {place: Noise(place[0]).exponentials(*place[1:]) for place in places}
    for kept in (16, 3, 1):  # with room for everything, and with most of it evicted before it is asked for again
        monkeypatch.setattr(noise_module, "KEPT_POSITIONS", kept)
        monkeypatch.setattr(noise_module, "KEPT_NUMBERS", kept)
        shared = {seed: Noise(seed) for seed in (0, 7, SEEDS - 1)}
        order = places * 3
        random.Random(kept).shuffle(order)
        for place in order:
            assert torch.equal(gumbels(shared[place[0]], *place[1:]), fresh[place])
            assert torch.equal(shared[place[0]].exponentials(*place[1:]), numbers[place])


@pytest.mark.parametrize("position", [0, 1, 10_000, 2**40])
def test_another_size_begins_with_the_same_numbers(position: int) -> None:
    whole, raced = Noise(3).exponentials(position, 5003), gumbels(Noise(3), position, 5003)
    for size in (1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 64, 1000, 4096, 5002):
        assert torch.equal(Noise(3).exponentials(position, size), whole[:size])
        assert torch.equal(gumbels(Noise(3), position, size), raced[:size])


def test_those_of_some_tokens(source: str) -> None:
    tokens = torch.tensor([0, 1, 5, 6, 7, 4000, 40_001, 151_935])
    for seed, position in product((0, SEEDS - 1), (0, 2**40)):
        noise = Noise(seed)
        expected = noise.exponentials(position, 151_936)[tokens]
        assert torch.equal(noise.source.exponentials_of(seed, position, tokens), expected)
        assert torch.equal(noise.gumbels_of(position, tokens), gumbels(noise, position, 151_936)[tokens])
        assert len(noise.gumbels_of(position, tokens[:0])) == 0


def test_sources_differ_in_the_last_bit_at_most() -> None:
    for seed, position, size in ((3, 0, 7), (SEEDS - 1, 2**40, 200_001)):
        plain, default = (gumbels(Noise(seed, source), position, size) for source in (NumPySource(), noise_source()))
        torch.testing.assert_close(plain, default, rtol=5e-16, atol=5e-16)


def test_torchs_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    gumbels(Noise(1), 0, 100)
    assert torch.equal(torch.rand(3), expected)


def test_no_number_comes_twice() -> None:
    """Streams that overlap, of neighbouring positions, seeds or far ones, would share numbers."""
    seeds = [0, 1, 2, 3, 2**32, 2**32 + 1, 2**63, SEEDS - 1]
    positions = [0, 1, 2, 3, 4, 255, 256, 2**16, 2**32, 2**40]
    each = [Noise(seed).exponentials(position, 300) for seed in seeds for position in positions]
    numbers = torch.cat([*each, Noise(0).exponentials(5, 20_000)])
    assert len(numbers.unique()) == len(numbers)


def test_gumbels_are_minus_the_logarithm() -> None:
    torch.testing.assert_close(gumbels(Noise(4), 9, 999), -Noise(4).exponentials(9, 999).log(), rtol=1e-14, atol=1e-15)
    assert gumbels(Noise(4), 9, 999).dtype == Noise(4).exponentials(9, 999).dtype == torch.float64


def test_the_stream_never_changes() -> None:
    """The texts of all seeds hang on these numbers."""
    first = {
        (0, 0): [4.461350895676643, 1.4206821141610546, 2.1943958822347414, 0.5719661528770783],
        (0, 1): [0.4406207908782485, 2.7562747190259316, 2.1175722299159805, 1.083103501592732],
        (SEEDS - 1, 0): [1.448418356818423, 0.33224613136118236, 0.8887306927108534, 0.3338746845603055],
        (SEEDS - 1, 3): [0.7626795289625894, 3.1734927239619544, 0.08801274259559135, 6.003475359734739],
        (42, 1000): [0.712813862755432, 0.5946259721751398, 0.30610564367602466, 0.4644368025570479],
    }
    for (seed, position), numbers in first.items():
        assert Noise(seed).exponentials(position, 4).tolist() == pytest.approx(numbers, rel=1e-14)


def philox(key: int, block: int, position: int) -> list[int]:
    """Four 64-bit words of Philox4x64-10 (Salmon et al. 2011), in its plainest form."""
    words, keys, full = [block, 0, position, 0], [key, 0], 2**64
    for _ in range(10):
        product0, product2 = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [
            product2 // full ^ words[1] ^ keys[0],
            product2 % full,
            product0 // full ^ words[3] ^ keys[1],
            product0 % full,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) % full, (keys[1] + 0xBB67AE8584CAA73B) % full]
    return words


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (5, 7), (SEEDS - 1, 2**33)])
def test_the_generator_is_philox(seed: int, position: int) -> None:
    words = [word for block in range(1, 4) for word in philox(seed, block, position)]
    expected = [-np.log(((word >> 12) + 0.5) * 2.0**-52) for word in words]
    assert Noise(seed).exponentials(position, 12).tolist() == pytest.approx(expected, rel=1e-13)


# -- the distribution ------------------------------------------------------------------------------------------------


def sample(what: str, count: int, start: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers along one of the three axes, the other two held fixed."""
    if what == "tokens":
        return Noise(1).exponentials(2, start + count)[start:].numpy()
    if what == "positions":
        noise = Noise(1)
        return np.array([float(noise.exponentials(start + i, 3)[2]) for i in range(count)])
    return np.array([float(Noise(start + i).exponentials(2, 3)[2]) for i in range(count)])


@pytest.mark.parametrize(("axis", "count"), [("tokens", 200_000), ("positions", COUNT), ("seeds", COUNT)])
def test_the_numbers_are_exponential(axis: str, count: int) -> None:
    numbers = sample(axis, count)
    assert kstest(numbers, expon.cdf).pvalue > FALSE_ALARM
    assert np.isfinite(numbers).all() and (numbers > 0).all()
    assert kstest(numbers[::2] * 1.1, expon.cdf).pvalue < FALSE_ALARM  # so the test sees an error of a tenth


class Extreme:
    """A generator that only says what real ones hardly ever do."""

    def __init__(self, key: int, counter: list[int]) -> None:
        self.bits = [0, 2**64 - 1, 2**12 - 1, 2**63, 1]

    def random_raw(self, size: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return np.array((self.bits * size)[:size], dtype=np.uint64)


EXTREMES = [53 * np.log(2), 2.0**-53, 53 * np.log(2), np.log(2), 53 * np.log(2)]


def test_bits_become_numbers_inside_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "Philox", Extreme)
    numbers = NumPySource().exponentials(0, 0, 5)
    assert bool((numbers > 0).all()) and numbers.tolist() == pytest.approx(EXTREMES)


def test_the_extremes_are_finite() -> None:
    logs = Noise(0).source.negative_logs
    numbers = logs(torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5, 5e-17], dtype=torch.float64))
    expected = [53 * np.log(2), 2.0**-53, np.log(2), -np.log(5e-17)]
    np.testing.assert_allclose(numbers.numpy(), expected, rtol=4e-16)
    raced = logs(numbers.clone())
    np.testing.assert_allclose(raced.numpy(), -np.log(expected), rtol=4e-16)


# -- independence ----------------------------------------------------------------------------------------------------

STEPS = [(0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0), (-1, 1, 0), (0, 2, 0), (2**32, 0, 0), (2**63, 0, 0), (0, 2**32, 0)]
"""Steps in (seed, position, token) to a neighbour that might be related."""


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_neighbours_are_independent(step: tuple[int, int, int]) -> None:
    """Tests the correlation of the numbers, and by chi-square all pairs of winners among four tokens."""
    pairs, winners = [], []
    for i in range(COUNT // 8):
        numbers = Noise(10 + i).exponentials(2 * i, 17)
        neighbours = Noise(10 + i + step[0]).exponentials(2 * i + step[1], 17)
        pairs.append(torch.stack([numbers[:16], neighbours[step[2] : 16 + step[2]]]))
        if not step[2]:
            winners.append(torch.stack([row[:16].view(4, 4).argmin(-1) for row in (numbers, neighbours)]))
    first, second = torch.cat(pairs, -1).numpy()
    scores = norm.ppf(expon.cdf(first)), norm.ppf(expon.cdf(second))
    assert abs(np.corrcoef(*scores)[0, 1]) * len(first) ** 0.5 < 4
    if winners:
        counts = np.zeros((4, 4))
        np.add.at(counts, tuple(torch.cat(winners, -1).numpy()), 1)
        assert chi2_contingency(counts).pvalue > FALSE_ALARM
        assert chisquare(counts.ravel()).pvalue > FALSE_ALARM


def test_dependence_is_noticed() -> None:
    """The two tests above on streams that share a twentieth of their numbers."""
    first, second = Noise(0).exponentials(0, COUNT * 2), Noise(1).exponentials(0, COUNT * 2)
    second[::20] = first[::20]
    scores = norm.ppf(expon.cdf(first.numpy())), norm.ppf(expon.cdf(second.numpy()))
    assert abs(np.corrcoef(*scores)[0, 1]) * len(first) ** 0.5 > 4


# -- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**63), True, False, 1.5, 2.0, "3", None, [1]], ids=repr)
def test_bad_seeds(seed: Any) -> None:
    for refuse in (check_seed, Noise):
        with pytest.raises(ValueError, match=r"a seed must be an integer from 0 to 2\*\*64 - 1, not "):
            refuse(seed)


@pytest.mark.parametrize("seed", [0, 1, 2**63, SEEDS - 1])
def test_all_64_bits_are_seeds_and_count(seed: int) -> None:
    check_seed(seed)
    others = [(seed ^ (1 << bit)) for bit in range(64)]
    numbers = {float(Noise(key).exponentials(0, 1)) for key in [seed, *others]}
    assert len(numbers) == 65


def test_seeds_of_several_prompts() -> None:
    assert seeds_of(None, 2) == [None, None] and seeds_of(3, 2) == [3, 3] and seeds_of([4, None], 2) == [4, None]
    with pytest.raises(ValueError, match="3 seeds for 2 prompts"):
        seeds_of([1, 2, 3], 2)
    with pytest.raises(ValueError, match="a seed must be"):
        seeds_of([1, -2], 2)


def test_samples_count_up_and_wrap_around() -> None:
    assert samples_of(5, 3) == [5, 6, 7] and samples_of(None, 2) == [None, None]
    assert samples_of(SEEDS - 1, 2) == [SEEDS - 1, 0]


def test_random_seeds_come_from_torchs_generator() -> None:
    torch.manual_seed(0)
    first = [random_seed() for _ in range(3)]
    torch.manual_seed(0)
    assert [random_seed() for _ in range(3)] == first and len(set(first)) == 3
    for seed in first:
        check_seed(seed)


# -- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 1000, 40_000, 200_000])
def test_the_cache_is_bounded(size: int) -> None:
    noise, most = Noise(0), max(noise_module.KEPT_POSITIONS, noise_module.KEPT_NUMBERS // size)
    count = min(most, 300) + 20
    for position in range(count):
        gumbels(noise, position, size)
        assert len(noise._cached) <= most
    kept = sum(row.numel() for row in noise._cached.values())
    assert kept <= max(noise_module.KEPT_NUMBERS, noise_module.KEPT_POSITIONS * size)
    assert {key[0] for key in noise._cached} == set(range(max(0, count - most), count))  # the oldest go first


def test_what_is_kept_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[int] = []
    exponentials = Noise.exponentials

    def counted(self: Noise, position: int, size: int) -> Tensor:
        positions.append(position)
        return exponentials(self, position, size)

    monkeypatch.setattr(Noise, "exponentials", counted)
    noise = Noise(0)
    for _ in range(3):
        for position in range(6):
            gumbels(noise, position, 50)
    assert positions == list(range(6))


def test_what_is_text_is_forgotten_and_comes_again_the_same() -> None:
    noise = Noise(5)
    before = [noise.gumbels(position, 10, torch.device("cpu")).clone() for position in range(6)]
    noise.forget(4)
    assert sorted(position for position, _, _ in noise._cached) == [4, 5]
    for position, numbers in enumerate(before):
        assert torch.equal(noise.gumbels(position, 10, torch.device("cpu")), numbers)
