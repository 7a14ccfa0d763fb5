"""The fastest layout of a weight, measured on this machine.

A product of a few rows consists of reading the weight and of arithmetic.  Their proportion, and the quality of the
kernels, depends on CPU, dtype and shape: on a CPU with AMX, oneDNN's bfloat16 scores 32 rows at the cost of one; with
AVX2 alone, each of its rows costs as much as the first, while exact float16 weights give six for little more than one.
So every layout is timed once per machine and weight size, for a fraction of a second.  The timing uses several copies
(a decoding step of a large model reads weights from memory, not from the cache) and the thread time of a single thread:
beside another busy process, two threads that wait for each other take twenty times as long, and wall time includes
other processes.  Results are stored in the user's cache folder; ``foretoken doctor`` shows them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch

from foretoken.models.linear.layouts import LAYOUTS, LayOut, WeightLayout, usable_layouts
from foretoken.models.machine import KeptResults, cache_bytes, timed
from foretoken.models.native import compiling, library

ROWS = (1, 2, 5, 8)
"""Timed numbers of rows: a plain step, the beginning of speculation, usual rounds."""
SMALLEST, LARGEST = 256, 4096
"""Range of timed weight sides; others count as the nearest power of two in it."""

Times = dict[int, float]
"""Seconds by number of rows."""
KEPT = KeptResults("products", lambda: compiling.file_name(library.level() or "portable"))
"""Stored by the kernels' sources and flags: a new release may be faster or slower."""


def size_class(out: int, inner: int) -> tuple[int, int]:
    """The measured size that represents weights [out, inner]."""
    nearest = (2 ** round(math.log2(max(side, 1))) for side in (out, inner))
    first, second = (min(max(side, SMALLEST), LARGEST) for side in nearest)
    return first, second


def product_times(layout: str, dtype: torch.dtype, out: int, inner: int) -> Times:
    """Seconds of ``x W^T`` for x [rows, inner] and W [out, inner], by number of rows; measured once."""
    return _times(layout, dtype, *size_class(out, inner))


def least_rows(layout: str, dtype: torch.dtype, out: int, inner: int) -> int:
    """The number of rows to which smaller inputs are padded: the fastest one, padding included.

    There is no margin: one row that is on par here is slower in a whole model.
    """
    times = product_times(layout, dtype, out, inner)
    fill_s = 7e-6  # padding, slicing and a separate residual sum
    return min(ROWS, key=lambda rows: times[rows] + (fill_s if rows > 1 else 0.0))


def fastest_layout(dtype: torch.dtype, shapes: Iterable[tuple[int, ...]], names: Sequence[str]) -> str:
    """The layout, ``plain`` included, with the fastest products for weights of these shapes, averaged over a plain step
    (one row, or its padded count) and a verification (eight rows)."""
    counts = Counter(size_class(shape[0], shape[1]) for shape in shapes)
    if len(names) == 1 or not counts:
        return "plain"
    costs = {name: sum(n * _cost(name, dtype, *size) for size, n in counts.items()) for name in names}
    if "native" in costs:
        # Ours may cost twice as much when timed alone: only they make a whole forward one call, and only they give a
        # row the same bits in any batch.  Models of 135M and 0.5B whose products were timed at 1.4 to 1.7 times the
        # best others ran 1.3 to 3 times as fast with ours, with AVX2 and with AVX-512 (docs/log.md).
        costs["native"] *= 0.5
    best = min(costs, key=lambda name: costs[name])
    return best if costs[best] < 0.95 * costs["plain"] else "plain"  # less than 5 % is noise


def step_s(dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> float:
    """Seconds of one row through weights of these shapes, each in its fastest layout on the CPU."""
    counts, names = Counter(size_class(shape[0], shape[1]) for shape in shapes), usable_layouts(dtype)
    return sum(n * min(min(_times(name, dtype, *size).values()) for name in names) for size, n in counts.items())


def _cost(layout: str, dtype: torch.dtype, out: int, inner: int) -> float:
    times = product_times(layout, dtype, out, inner)
    return min(times.values()) + times[8]


@cache
def _times(layout: str, dtype: torch.dtype, out: int, inner: int) -> Times:
    key = _key(layout, dtype, out, inner)
    times = _stored_times(key)
    if times is None:
        times = _measure(LAYOUTS[layout], dtype, out, inner)
        KEPT.keep(key, times)
    return times


@torch.inference_mode()
def _measure(make: LayOut, dtype: torch.dtype, out: int, inner: int) -> Times:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out, inner, generator=generator) / inner**0.5).bfloat16().to(dtype)
    # a weight with more than 16 copies in the cache belongs to a model that fits into the cache
    copies = min(16, max(2, cache_bytes() // weight.nbytes))
    products: list[WeightLayout] = [make(weight.clone()) for _ in range(copies)]
    inputs = [torch.randn(rows, inner, generator=generator).to(products[0].activations) for rows in ROWS]
    with _one_thread():
        return timed({len(x): [partial(product, x, None) for product in products] for x in inputs}, turns=3)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _key(layout: str, dtype: torch.dtype, out: int, inner: int) -> str:
    return f"{layout} {str(dtype).removeprefix('torch.')} {out}x{inner}"


def known_times(dtype: torch.dtype, shapes: Iterable[tuple[int, int]]) -> Mapping[str, Times]:
    """Stored measurements for weights of these shapes in every layout, by a readable key."""
    sizes = sorted({size_class(*shape) for shape in shapes})
    keys = [_key(layout, dtype, *size) for size in sizes for layout in LAYOUTS]
    return {key: times for key in keys if (times := _stored_times(key)) is not None}


def _stored_times(key: str) -> Times | None:
    """A measurement from an earlier run; ``None`` if missing or damaged."""
    try:
        return {int(rows): float(seconds) for rows, seconds in KEPT.stored()[key].items()}
    except (KeyError, ValueError, AttributeError, TypeError):
        return None
