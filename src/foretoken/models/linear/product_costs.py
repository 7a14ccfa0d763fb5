"""Which layout a weight is multiplied fastest in, measured on this machine.

A matrix product of a few rows is made of reading the weight and of arithmetic, and which of them counts, and how well a
kernel does it, differs by CPU, dtype and shape: on a CPU with AMX oneDNN's bfloat16 scores 32 rows for the cost of
one, on one with AVX2 alone every row of it costs as much as the first, while exact float16 weights give six for little
more than one.  So every layout is timed once per machine and size of weight, for a fraction of a second, on several
copies (a decoding step of a large model finds its weights in memory, not in the cache), by one thread, in the time of
that thread: beside another busy process two threads that wait for each other are timed at twenty times what they take,
and the time of day counts what other processes take.  What was measured is kept in the user's cache folder;
``foretoken doctor`` shows it.
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

ROWS = (1, 2, 5, 8)
"""Rows that are timed: a plain step, the beginning of speculation, usual rounds."""
SMALLEST, LARGEST = 256, 4096
"""Sides of the weights that are timed; others count as the nearest power of two between them."""
MOST_COPIES = 16
"""A weight of which so many fit into the cache belongs to a model that does."""
MARGIN = 0.95
"""Another layout than the plain one must be at least 5 % faster: less is noise."""

Times = dict[int, float]
"""Seconds by number of rows."""
KEPT = KeptResults("products")


def size_class(out: int, inner: int) -> tuple[int, int]:
    """The size that stands for weights [out, inner] in the measurements."""
    nearest = (2 ** round(math.log2(max(side, 1))) for side in (out, inner))
    first, second = (min(max(side, SMALLEST), LARGEST) for side in nearest)
    return first, second


def product_times(layout: str, dtype: torch.dtype, out: int, inner: int) -> Times:
    """Seconds of ``x W^T`` for x [rows, inner] and W [out, inner], by number of rows; measured once."""
    return _times(layout, dtype, *size_class(out, inner))


def least_rows(layout: str, dtype: torch.dtype, out: int, inner: int) -> int:
    """The number of rows that fewer ones are filled up to: the cheapest count there is, filling included.

    No margin is asked for: one row is the slower one in a whole model where it is level here.
    """
    times = product_times(layout, dtype, out, inner)
    fill_s = 7e-6  # filling up, cutting off and adding a residual apart
    return min(ROWS, key=lambda rows: times[rows] + (fill_s if rows > 1 else 0.0))


def fastest_layout(dtype: torch.dtype, shapes: Iterable[tuple[int, ...]], names: Sequence[str]) -> str:
    """The one of several layouts, ``plain`` among them, in which a round of products with weights of these shapes is
    fastest: on average over a plain step (one row, or as many as it is filled up to) and a verification (eight)."""
    counts = Counter(size_class(shape[0], shape[1]) for shape in shapes)
    if len(names) == 1 or not counts:
        return "plain"
    costs = {name: sum(n * _cost(name, dtype, *size) for size, n in counts.items()) for name in names}
    if "native" in costs:
        # Ours may cost twice what others do, timed alone: only with them a whole forward is one call, and only they
        # give a row the same bits in any company.  Models of 135M and 0.5B whose products were timed at 1.4 to 1.7
        # times the best others ran 1.3 to 3 times as fast with ours, with AVX2 and with AVX-512 (docs/log.md).
        costs["native"] *= 0.5
    best = min(costs, key=lambda name: costs[name])
    return best if costs[best] < MARGIN * costs["plain"] else "plain"


def step_s(dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> float:
    """Seconds of one row through weights of these shapes, each in the layout that is fastest for it on the CPU."""
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
    copies = min(MOST_COPIES, max(2, cache_bytes() // weight.nbytes))
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
    """What was measured on this machine of weights of these shapes, in every layout, by a key in words."""
    sizes = sorted({size_class(*shape) for shape in shapes})
    keys = [_key(layout, dtype, *size) for size in sizes for layout in LAYOUTS]
    return {key: times for key in keys if (times := _stored_times(key)) is not None}


def _stored_times(key: str) -> Times | None:
    """A measurement of an earlier run; what is damaged counts as none."""
    try:
        return {int(rows): float(seconds) for rows, seconds in KEPT.stored()[key].items()}
    except (KeyError, ValueError, AttributeError, TypeError):
        return None
