"""One thread against all of them, where other processes want the processors, too.

Threads meet at a barrier after every product.  Beside another busy process one of them is often not running then, and
the others wait for it: two threads took 712 ms a token where one took 93.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from foretoken.models.base import Feed, LanguageModel, opened
from foretoken.models.machine import any_text, is_busy

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Set by a user who has decided."""
CALLS, MOST_S = 3, 0.3
"""Timed calls of each way, and seconds after which no further one is begun."""
MARGIN = 0.8
"""One thread must take less than this part of what all take."""
TEXT = 32
"""Tokens of the text before the one that is timed."""


def settle_threads(
    target: LanguageModel, busy: Callable[[], bool] = is_busy, clock: Callable[[], float] = perf_counter
) -> str | None:
    """Let PyTorch use one thread where the machine is busy and the target is then faster; what to tell the user.

    For the start of a program, before any request: threads share out sums, and no text is to change them half-way.
    Nothing is done where the user has chosen (``OMP_NUM_THREADS``), there is one thread anyway, the target is not run
    by PyTorch on the CPU, or the machine is quiet.
    """
    most = torch.get_num_threads()
    on_cpu = getattr(getattr(target, "device", None), "type", "") == "cpu"
    if most == 1 or not on_cpu or any(os.environ.get(name) for name in VARIABLES) or not busy():
        return None
    all_s, one_s = _step_s(target, most, clock), _step_s(target, 1, clock)
    if one_s >= MARGIN * all_s:
        torch.set_num_threads(most)
        return None
    torch.set_num_threads(1)
    return (
        f"other programs keep this machine busy: {most} threads take {1e3 * all_s:.0f} ms a token, one takes "
        f"{1e3 * one_s:.0f}; one is used (OMP_NUM_THREADS={most} keeps {most})"
    )


@torch.inference_mode()
def _step_s(target: LanguageModel, threads: int, clock: Callable[[], float]) -> float:
    """Median seconds of a step with so many threads."""
    torch.set_num_threads(threads)
    times: list[float] = []
    with opened(target, any_text(target, TEXT)) as (sequence,):
        start_s = clock()
        while len(times) <= CALLS and (len(times) < 2 or clock() - start_s < MOST_S):
            before = clock()
            target.forward([Feed(sequence, [1 % target.vocab_size])])
            target.commit(sequence, [] if target.capabilities.rollback else [0])
            times.append(clock() - before)
    return median(times[1:])  # the first one starts the threads
