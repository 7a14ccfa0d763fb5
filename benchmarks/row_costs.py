"""What scoring n rows behind a text costs, v(n): several models, weights and backends, taking turns in one run.

An arm is a model and options: ``FOLDER``, ``FOLDER,quantize=int4-a8``, ``FILE.gguf``, ``FILE.gguf,backend=llama.cpp``.
Rows are a chain, logits of all of them; they are taken back after each forward, so that the text stays as long.

    python benchmarks/row_costs.py ARM [ARM ...] [--rows 1,2,4,5,8,16,32] [--context 100] [--turns 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from common import environment
from quantized import instructions

from foretoken.loading import load_model
from foretoken.models.base import Feed, LanguageModel

WARM = 2
"""Turns that are not counted."""
EACH = 3
"""Forwards of an arm that are counted in a turn."""


def scorer(arm: str, context: int) -> tuple[Callable[[int], None], str]:
    """A function that scores so many rows with the model of an arm, and how the model runs."""
    path, *options = arm.split(",")
    model: LanguageModel = load_model(path, **dict(option.split("=", 1) for option in options))
    ids = [(7 * i * i + 31 * i) % min(model.vocab_size, 20000) + 300 for i in range(context)]
    sequence = model.open()
    model.forward([Feed(sequence, ids, wanted=1)])
    model.commit(sequence, list(range(context)))

    def score(rows: int) -> None:
        model.forward([Feed(sequence, ids[:rows])])
        model.commit(sequence, [])

    told = model.describe()
    return score, f"{told['forward']}, {told['weights']}, {told['exactness']}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--rows", default="1,2,4,5,8,16,32")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    print(instructions(), environment(), f"behind {options.context} tokens", sep="; ", flush=True)
    arms = {}
    for arm in options.arms:
        began = time.perf_counter()
        arms[arm], how = scorer(arm, options.context)
        print(f"{arm}: {how}; loaded in {time.perf_counter() - began:.1f} s", flush=True)
    times: dict[str, dict[int, list[float]]] = {arm: {count: [] for count in counts} for arm in arms}
    for turn in range(WARM + options.turns):
        for count in counts:
            for arm, score in arms.items():
                score(count)  # the weights of the arm before leave the caches
                for _ in range(EACH):
                    began = time.perf_counter()
                    score(count)
                    if turn >= WARM:
                        times[arm][count].append(1e3 * (time.perf_counter() - began))
    medians = {arm: {count: statistics.median(each) for count, each in times[arm].items()} for arm in arms}
    print("| ms for rows | " + " | ".join(map(str, counts)) + " |\n" + "|---" * (len(counts) + 1) + "|")
    for arm, found in medians.items():
        print(f"| {arm} | " + " | ".join(f"{found[count]:.1f}" for count in counts) + " |")
    if options.json:
        options.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
