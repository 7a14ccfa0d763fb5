"""Where a step's time goes, against the speed of this machine's memory: weights, attention, the rest.

    python benchmarks/memory_speed.py ARM [ARM ...] [--turns 8] [--json FILE]

An arm is a model and options, as in ``row_costs.py``.  The memory's speed is that of reading a gigabyte, by all threads
together, in the fastest of three ways.  A step's floor is its weights' bytes over that speed; attention is what a step
takes longer behind 1,000 tokens than behind 16, per token of the text; the rest is everything else, dispatch included.
Embeddings of tied models are the vocabulary's projection, so all weights are read once a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import environment
from quantized import instructions
from row_costs import in_turns, opened, scorer

GIB = 2**30
SHORT, LONG = 16, 1000


def memory_speed(turns: int = 7) -> float:
    """Bytes a second of reading a gigabyte: of several ways of reading, the fastest, each the median of its turns."""
    block = torch.ones(GIB // 4, dtype=torch.float32)
    vector = torch.ones(2048, dtype=torch.bfloat16)
    ways = (
        block.sum,
        lambda: block.view(torch.int32).max(),
        lambda: block.view(torch.bfloat16).view(-1, 2048) @ vector,
    )
    return GIB / min(statistics.median(_seconds(way) for _ in range(turns)) for way in ways)


def _seconds(way: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    way()
    return time.perf_counter() - start_s


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = {arm: opened(arm) for arm in options.arms}
    before = memory_speed()
    steps = {}
    for context in (SHORT, LONG):
        medians = in_turns({arm: scorer(model, context) for arm, model in models.items()}, [1], options.turns, 2, 8)
        steps[context] = {arm: found[1] for arm, found in medians.items()}
    speed = (before + memory_speed()) / 2
    print(f"{instructions()}; {environment()}; memory read at {speed / 1e9:.1f} GB/s")
    print("| arm | weights, MB | step, ms | their floor | attention at 1,000 | rest | share of the memory's speed |")
    print("|---|---|---|---|---|---|---|")
    report = []
    for arm, model in models.items():
        size, step = model.weight_bytes, steps[SHORT][arm]
        floor, attention = 1e3 * size / speed, max(steps[LONG][arm] - step, 0.0)
        report.append({"arm": arm, "bytes": size, "ms": step, "floor_ms": floor, "attention_ms": attention})
        rest = f"{step - floor:.1f} | {floor / step:.2f}"
        print(f"| {arm} | {size / 1e6:.0f} | {step:.1f} | {floor:.1f} | {attention:.1f} | {rest} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"bytes_per_second": speed, "arms": report}, indent=1))


if __name__ == "__main__":
    main()
