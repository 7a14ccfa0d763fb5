"""What every benchmark prints beside its numbers, and how arms are timed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foretoken.lab.timing import Stopwatch, interleave


@dataclass
class Arm:
    """One way to generate: called with a prompt's ids, returns the new ids."""

    name: str
    run: Callable[[list[int]], list[int]]
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def rate(self, index: int) -> float:
        """Tokens per second of one prompt."""
        return len(self.outputs[index]) / self.seconds[index]

    @property
    def median_rate(self) -> float:
        """Median tokens per second over prompts."""
        return statistics.median(self.rate(i) for i in range(len(self.seconds)))


def interleaved(arms: Sequence[Arm], prompts: Sequence[list[int]], repeat: int = 3) -> None:
    """Time every arm on every prompt, arms taking turns; keeps the median of ``repeat`` runs."""
    for arm in arms:
        arm.run(prompts[0])
    for prompt in prompts:
        times: dict[str, list[float]] = {arm.name: [] for arm in arms}
        outputs: dict[str, list[int]] = {}
        for _, arm in interleave(arms, repeat):
            watch = Stopwatch()
            outputs[arm.name] = arm.run(prompt)
            times[arm.name].append(watch.seconds)
        for arm in arms:
            arm.seconds.append(statistics.median(times[arm.name]))
            arm.outputs.append(outputs[arm.name])


def median_ratio(mine: Arm, other: Arm) -> float:
    """Median over prompts of the ratio of tokens per second."""
    return statistics.median(mine.rate(i) / other.rate(i) for i in range(len(mine.seconds)))


def environment() -> str:
    """Threads, the variables that change them, and the machine's load."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    variables = ", ".join(f"{n}={os.environ[n]}" for n in names if n in os.environ) or "no OMP variables"
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {variables}, load {load}"
