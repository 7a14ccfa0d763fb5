"""This machine: its identity, timing of calls, and the file of stored measurements."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import get_clock_info, perf_counter, thread_time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from foretoken.core.io.files import cache_folder, write_json
from foretoken.core.values import text_of
from foretoken.models.native import library

if TYPE_CHECKING:
    from foretoken.models.base import LanguageModel

COPIES_BYTES, MOST_COPIES_BYTES = 32 * 2**20, 256 * 2**20
"""Limits of :func:`cache_bytes`."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
PRESSURE = Path("/proc/pressure/cpu")
WORTH_KEEPING_S = 0.2
"""Faster results are recomputed in every process: a file of tiny models would only grow."""
MOST_KEPT = 512
"""Maximum results of one kind in the file; the oldest are dropped."""

_THREAD_CLOCK = thread_time if get_clock_info("thread_time").resolution <= 1e-6 else perf_counter
Name = TypeVar("Name", bound=Hashable)


# -- what it is --------------------------------------------------------------------------------------------------------


@cache
def machine_key() -> str:
    """Key of the machine and of the way of measuring."""
    fields = ("model name", "flags", "model\t", "stepping")
    lines = [line for line in library.cpu_lines() if line.startswith(fields)]
    pages = os.environ.get("THP_MEM_ALLOC_ENABLE", "")
    # Another way of measuring makes a new key.
    way = f"{_THREAD_CLOCK.__name__} {cache_bytes()} {pages} {library.level()}"
    text = "\n".join([*lines, platform.processor(), platform.machine(), str(os.cpu_count()), torch.__version__, way])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@cache
def cache_bytes() -> int:
    """More bytes than any cache of this machine holds: twice the last level, if Linux reports it."""
    sizes = [0]
    for file in CACHES.glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) * 2**10)
    return min(MOST_COPIES_BYTES, max(COPIES_BYTES, 2 * max(sizes)))


def free_bytes() -> int | None:
    """Memory available without swapping; ``None`` if unknown."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def is_full_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out."""
    # PyTorch's allocator for the CPU raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text_of(error)


def is_busy() -> bool:
    """Whether other processes use the processors, by the kernel's pressure or else by the load of the last minute."""
    try:
        some = PRESSURE.read_text(encoding="ascii").split("\n", 1)[0]
        # percentage of the last ten seconds in which a runnable task waited for a processor
        return float(some.split("avg10=")[1].split()[0]) > 25
    except (OSError, IndexError, ValueError):
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return load > 0.9 * (os.cpu_count() or 1)


# -- timing ------------------------------------------------------------------------------------------------------------


def any_text(model: LanguageModel, most: int) -> list[int]:
    """Up to ``most`` token ids, at most half of the context: a text for measurements."""
    return [i % model.vocab_size for i in range(1, max(1, min(most, model.context_length // 2)) + 1)]


def timed(calls: Mapping[Name, Sequence[Callable[[], Any]]], turns: int) -> dict[Name, float]:
    """Seconds of calls by name: the fastest quartile.  Slower calls met another process, or a cache with other data.

    All calls are interleaved, ``turns`` times after one warm-up.  A single thread is measured in thread time, which
    excludes other processes; with several threads that would miss most of the work.
    """
    clock = _THREAD_CLOCK if torch.get_num_threads() == 1 else perf_counter
    spent: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, several in calls.items():
            for call in several:
                start_s = clock()
                call()
                spent[name] += [clock() - start_s] if turn else []
    return {name: sorted(seconds)[len(seconds) // 4] for name, seconds in spent.items()}


# -- the file ----------------------------------------------------------------------------------------------------------


def results_file() -> Path:
    """File of all measurements on this machine."""
    return cache_folder() / f"machine-{machine_key()}.json"


class KeptResults:
    """Results of one kind, stored for later runs.

    Args:
        kind: their name in the file.
        stamp: version of the code that computes them; other versions' results are stored separately.
        file: path of the file.

    Attributes:
        results: results of this process: every call of ``custom_generate`` wraps the same model again.
    """

    def __init__(
        self, kind: str, stamp: Callable[[], str] = str, file: Callable[[], Path] = lambda: results_file()
    ) -> None:
        self.kind, self.stamp, self.file = kind, stamp, file
        self.results: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """A result from this process or an earlier one; ``None`` if there is none."""
        return self.results[name] if name in self.results else self.stored().get(name)

    def keep(self, name: str, result: Any, in_file: bool = True) -> None:
        """Store a result, only in this process if the file cannot be written."""
        self.results[name] = result
        if not in_file:
            return
        content = self._content()
        content.pop(self._section, None)
        alike = [part for part in content if part.split(" ")[0] == self.kind]
        for part in alike[: max(0, len(alike) - 3)]:  # keep four code versions: installations may alternate
            del content[part]
        results = list({**self.stored(), name: result}.items())[-MOST_KEPT:]
        with suppress(OSError):
            write_json(self.file(), {**content, self._section: dict(results)})

    def stored(self) -> dict[str, Any]:
        results = self._content().get(self._section)
        return results if isinstance(results, dict) else {}

    @property
    def _section(self) -> str:
        return f"{self.kind} {self.stamp()}".rstrip()

    def _content(self) -> dict[str, Any]:
        """Content of the file; empty if it cannot be read."""
        try:
            content = json.loads(self.file().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
