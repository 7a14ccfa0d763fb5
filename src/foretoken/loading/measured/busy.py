"""Chooses between one thread and all of them on a machine that other processes keep busy.

Threads meet at a barrier after every product.  Beside another busy process one of them is often not running, and the
others wait for it: two threads took 712 ms a token, one took 93.
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
"""Variables with which users set the number of threads."""


def settle_threads(
    target: LanguageModel, busy: Callable[[], bool] = is_busy, clock: Callable[[], float] = perf_counter
) -> str | None:
    """Let PyTorch use one thread if the machine is busy and the target is then faster; returns a message for the user.

    Call it before any request: the number of threads changes the rounding of sums, which must not change within a
    sequence.  Nothing is done if the user has chosen (``OMP_NUM_THREADS``), there is only one thread, PyTorch does not
    run the target on the CPU, or the machine is quiet.
    """
    most = torch.get_num_threads()
    on_cpu = target.device is not None and target.device.type == "cpu"
    if most == 1 or not on_cpu or any(os.environ.get(name) for name in VARIABLES) or not busy():
        return None
    all_s, one_s = _step_s(target, most, clock), _step_s(target, 1, clock)
    if one_s >= 0.8 * all_s:  # no clear gain
        torch.set_num_threads(most)
        return None
    torch.set_num_threads(1)
    return (
        f"other programs keep this machine busy: {most} threads take {1e3 * all_s:.0f} ms a token, one takes "
        f"{1e3 * one_s:.0f}; one is used (OMP_NUM_THREADS={most} keeps {most})"
    )


@torch.inference_mode()
def _step_s(target: LanguageModel, threads: int, clock: Callable[[], float]) -> float:
    """Median seconds of a step with this number of threads."""
    torch.set_num_threads(threads)
    times: list[float] = []
    with opened(target, any_text(target, 32)) as (sequence,):
        start_s = clock()
        # At most three timed calls, and none starts after 0.3 s.
        while len(times) <= 3 and (len(times) < 2 or clock() - start_s < 0.3):
            before = clock()
            target.forward([Feed(sequence, [1 % target.vocab_size])])
            target.commit(sequence, [] if target.capabilities.rollback else [0])
            times.append(clock() - before)
    return median(times[1:])  # the first call starts the threads
