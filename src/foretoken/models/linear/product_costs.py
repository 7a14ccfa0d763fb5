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

import hashlib
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import get_clock_info, perf_counter, thread_time

import torch
from torch import Tensor

from foretoken.io.files import cache_folder, write_json
from foretoken.models.linear.layouts import LAYOUTS, Layout, Maker, usable_layouts
from foretoken.models.native import library

ROWS = (1, 2, 5, 8)
"""Rows that are timed: a plain step, the beginning of speculation, usual rounds."""
SMALLEST, LARGEST = 256, 4096
"""Sides of the weights that are timed; others count as the nearest power of two between them."""
COPIES_BYTES, MOST_COPIES_BYTES = 32 * 2**20, 256 * 2**20
"""Copies of a weight that are multiplied in turn take at least, and at most, this much; twice what the cache holds."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MOST_COPIES = 16
"""A weight of which so many fit into the cache belongs to a model that does."""
PASSES = 3
FINE_CLOCK_S = 1e-6
"""A thread's own clock is used where it tells times as short as this apart."""
FILL_S = 7e-6
"""What filling up, cutting off and adding a residual apart take."""
NATIVE_WORTH = 0.8
"""What products of our own may cost more is less than what they bring: they alone can be made in one call with all that
is between them, and they alone give a row the same bits in any company."""
MARGIN = 0.95
"""Another layout than the plain one must be at least 5 % faster: less is noise."""

Times = dict[int, float]
"""Seconds by number of rows."""


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

    No margin is asked for: one row is the slower one in a whole model where it is level here (``docs/log.md``).
    """
    times = product_times(layout, dtype, out, inner)
    return min(ROWS, key=lambda rows: times[rows] + (FILL_S if rows > 1 else 0.0))


def fastest_layout(dtype: torch.dtype, shapes: Iterable[tuple[int, ...]], names: Sequence[str]) -> str:
    """The one of several layouts, ``plain`` among them, in which a round of products with weights of these shapes is
    fastest: on average over a plain step (one row, or as many as it is filled up to) and a verification (eight)."""
    counts = Counter(size_class(shape[0], shape[1]) for shape in shapes)
    if len(names) == 1 or not counts:
        return "plain"
    costs = {name: sum(n * _cost(name, dtype, *size) for size, n in counts.items()) for name in names}
    if "native" in costs:
        costs["native"] *= NATIVE_WORTH
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
    known = _read_known().get(key)
    if known is None:
        known = _measure(LAYOUTS[layout], dtype, out, inner)
        _remember(key, known)
    return known


@torch.inference_mode()
def _measure(make: Maker, dtype: torch.dtype, out: int, inner: int) -> Times:
    """Per number of rows what the quickest quarter of all calls takes at most: others met another process."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out, inner, generator=generator) / inner**0.5).bfloat16().to(dtype)
    copies = min(MOST_COPIES, max(2, cache_bytes() // weight.nbytes))
    products: list[Layout] = [make(weight.clone()) for _ in range(copies)]
    inputs = [torch.randn(rows, inner, generator=generator).to(products[0].activations) for rows in ROWS]
    calls: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with _one_thread():
        for turn in range(PASSES + 1):
            for x in inputs:
                spent = [_one_call(product, x) for product in products]
                if turn:  # the first turn warms up
                    calls[len(x)] += spent
    return {rows: sorted(spent)[len(spent) // 4] for rows, spent in calls.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def cache_bytes() -> int:
    """What no cache of this machine holds: twice the last one's size, where Linux tells it."""
    sizes = [0]
    for file in CACHES.glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) * 2**10)
    return min(MOST_COPIES_BYTES, max(COPIES_BYTES, 2 * max(sizes)))


_clock = thread_time if get_clock_info("thread_time").resolution <= FINE_CLOCK_S else perf_counter


def _one_call(product: Layout, x: Tensor) -> float:
    began = _clock()
    product(x, None)
    return _clock() - began


def _key(layout: str, dtype: torch.dtype, out: int, inner: int) -> str:
    return f"{layout} {str(dtype).removeprefix('torch.')} {out}x{inner}"


def known_times(dtype: torch.dtype, shapes: Iterable[tuple[int, int]]) -> Mapping[str, Times]:
    """What was measured on this machine of weights of these shapes, in every layout, by a key in words."""
    known = _read_known()
    sizes = sorted({size_class(*shape) for shape in shapes})
    keys = [_key(layout, dtype, *size) for size in sizes for layout in LAYOUTS]
    return {key: known[key] for key in keys if key in known}


# -- the file of measurements ------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where measurements of this machine and version of PyTorch are kept."""
    return cache_folder() / f"products-{machine_key()}.json"


@cache
def machine_key() -> str:
    """What tells machines, and ways of measuring on them, apart."""
    info = Path("/proc/cpuinfo")
    about = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    lines = [line for line in about if line.startswith(("model name", "flags", "model\t", "stepping"))]
    pages = os.environ.get("THP_MEM_ALLOC_ENABLE", "")
    # What was measured in another way is measured again.
    way = f"{_clock.__name__} {cache_bytes()} {pages} {library.level()}"
    text = "\n".join([*lines, platform.processor(), platform.machine(), str(os.cpu_count()), torch.__version__, way])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _read_known() -> dict[str, Times]:
    """Measurements of earlier runs; a file that cannot be read counts as none."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        return {str(key): {int(rows): float(s) for rows, s in times.items()} for key, times in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(key: str, times: Times) -> None:
    """Add a measurement to the file; where that cannot be written, it is measured again next time."""
    try:
        write_json(cache_file(), {**_read_known(), key: times})
    except OSError:
        return
