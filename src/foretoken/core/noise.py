"""Noise by seed and position, which makes a sampled output a function of its seed.

Every output position t has its own numbers E_t(v) ~ Exp(1), one per token, all independent. The target takes the token
that wins the race ``argmin E_t(v) / p(v)``, which has probability p(v). A drafter's candidates are the first in the
race ``E_t(v) / q(v)`` on the *same* numbers, so the target's token never depends on the draft (Daliri, Musco, Suresh
2024, https://arxiv.org/abs/2408.07978).

The numbers come from a counter-based generator, so repeated or reordered reads give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.core.values import is_whole, plain

SEEDS = 2**64
"""Seeds are integers from 0 to one below this."""
KEPT_NUMBERS, KEPT_POSITIONS = 2**18, 16
"""Largest cache per request: 2 MiB, or 16 positions if that is more, because verification reads the noise of drafting.
"""


def check_seed(seed: Any) -> None:
    """Raise ``ValueError`` for a seed that is not an integer, negative, or longer than 64 bits."""
    if not is_whole(seed) or not 0 <= int(seed) < SEEDS:
        raise ValueError(f"a seed must be an integer from 0 to 2**64 - 1, not {seed!r}")


def seeds_of(seed: Any, count: int) -> Sequence[int | None]:
    """One seed per prompt, as Python integers: the given seed for all, or a list unchanged.

    Tensors and arrays are accepted. Raises ``ValueError`` for a wrong number of seeds and for invalid ones.
    """
    seed = plain(seed)
    seeds = [plain(value) for value in seed] if isinstance(seed, list | tuple) else [seed] * count
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} prompts: give one seed, or one per prompt")
    for value in seeds:
        if value is not None:
            check_seed(value)
    return seeds


def samples_of(seed: int | None, count: int) -> list[int | None]:
    """Consecutive seeds of ``count`` samples of one prompt, so that each sample can be requested alone."""
    return [seed if seed is None else (seed + i) % SEEDS for i in range(count)]


def random_seed() -> int:
    """A seed from torch's generator, so that ``torch.manual_seed`` fixes requests without a seed."""
    return int(torch.randint(2**63 - 1, ()))


@contextmanager
def unseeded_from(seed: int) -> Iterator[None]:
    """Make requests without a seed reproducible inside the block, so that measurements can be repeated.

    The state of torch's generator is restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class Source(Protocol):
    """Source of the random numbers of noise."""

    def exponentials(self, seed: int, position: int, size: int) -> Tensor:
        """[size] float64 independent Exp(1) numbers, finite and positive, a function of their index and the
        arguments."""

    def exponentials_of(self, seed: int, position: int, tokens: Tensor) -> Tensor:
        """[n] the same, for tokens [n] (int64, in order) only."""

    def negative_logs(self, numbers: Tensor) -> Tensor:
        """``-log`` of positive float64 numbers [n], computed in place."""


class NumPySource:
    """Random numbers by NumPy; :mod:`foretoken.models.native.noise` is several times as fast."""

    def exponentials(self, seed: int, position: int, size: int) -> Tensor:
        # The position goes into the generator's counter, far above the words that count the numbers drawn.
        source = np.random.Philox(key=seed, counter=[0, 0, position, 0])
        bits = source.random_raw(size)
        # 52 random bits k as the fraction of a double give 1 + k / 2**52, so u = (k + 1/2) / 2**52 lies inside (0, 1).
        bits >>= np.uint64(12)
        bits |= np.uint64(0x3FF0000000000000)
        u = bits.view(np.float64)
        u -= 1.0 - 2.0**-53
        return self.negative_logs(torch.from_numpy(u))

    def exponentials_of(self, seed: int, position: int, tokens: Tensor) -> Tensor:
        return self.exponentials(seed, position, int(tokens[-1]) + 1 if len(tokens) else 0)[tokens]

    def negative_logs(self, numbers: Tensor) -> Tensor:
        values = numbers.numpy()  # NumPy's logarithm is faster than torch's on one thread
        np.log(values, out=values)
        np.negative(values, out=values)
        return numbers


class Noise:
    """The noise of one request, from its seed from 0 to 2**64 - 1."""

    def __init__(self, seed: int, source: Source | None = None) -> None:
        check_seed(seed)
        self.seed, self.source = int(seed), source or NumPySource()
        self._cached: dict[tuple[int, int, torch.device], Tensor] = {}

    def exponentials(self, position: int, size: int) -> Tensor:
        """[size] float64 independent Exp(1) numbers of an output position (0 is the first new token).

        Finite and positive. A function of the seed, the position and the token alone.
        """
        return self.source.exponentials(self.seed, position, size)

    def gumbels(self, position: int, size: int, device: torch.device) -> Tensor:
        """[size] ``-log E``, added to log-probabilities before the argmax; float64 (float32 on mps).

        One vector serves the draft and every node of a depth, so it is cached until :meth:`forget`, or until the cache
        is full.
        """
        noise = self._cached.get((position, size, device))
        if noise is None:
            noise = self._computed(position, size)
            if device.type != "cpu":
                noise = noise.to(device, _dtype_on(device))
            self._keep(position, noise)
        return noise

    def gumbels_of(self, position: int, tokens: Tensor) -> Tensor:
        """[n] the same, for tokens [n] (int64, in order) only, on a CPU; not cached."""
        return self.source.negative_logs(self.source.exponentials_of(self.seed, position, tokens))

    def _computed(self, position: int, size: int) -> Tensor:
        return self.source.negative_logs(self.exponentials(position, size))

    def _keep(self, position: int, numbers: Tensor) -> None:
        while len(self._cached) >= max(KEPT_POSITIONS, KEPT_NUMBERS // len(numbers)):
            del self._cached[min(self._cached, key=lambda key: key[0])]  # already committed
        self._cached[position, len(numbers), numbers.device] = numbers

    def forget(self, position: int | None = None) -> None:
        """Drop the noise of positions before this one, which are committed; ``None``: of all, at the end."""
        for key in [k for k in self._cached if position is None or k[0] < position]:
            del self._cached[key]


def send_together(noises: Sequence[tuple[Noise, Sequence[int]]], like: Tensor) -> None:
    """Copy the noise of several requests to a device in one transfer, for :meth:`Noise.gumbels`.

    Args:
        noises: the noise of each request, and its positions.
        like: logits [.., V] of the vocabulary, on the device.
    """
    size, device = like.shape[-1], like.device
    missing = [
        (noise, at) for noise, positions in noises for at in positions if (at, size, device) not in noise._cached
    ]
    if device.type == "cpu" or not missing:
        return
    rows = torch.stack([noise._computed(at, size) for noise, at in missing]).to(device, _dtype_on(device))
    for (noise, at), row in zip(missing, rows, strict=True):
        noise._keep(at, row)


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
