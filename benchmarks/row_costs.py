"""What scoring n rows behind a text costs, v(n), and reading a prompt: several models, weights and backends, taking
turns in one run.

An arm is a model and options: ``FOLDER``, ``FOLDER,quantize=int4-a8``, ``FILE.gguf``, ``FILE.gguf,backend=llama.cpp``.
Rows are a chain, logits of all of them; they are taken back after each forward, so that the text stays as long.

    python benchmarks/row_costs.py ARM [ARM ...] [--rows 1,2,4,5,8,16,32] [--context 100] [--turns 8]
                                   [--prompts 500,3000] [--json FILE]
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


def opened(arm: str) -> LanguageModel:
    """The model of an arm."""
    path, *options = arm.split(",")
    return load_model(path, **dict(option.split("=", 1) for option in options))


def some_ids(model: LanguageModel, count: int) -> list[int]:
    """Token ids that do not repeat soon."""
    return [(7 * i * i + 31 * i) % min(model.vocab_size, 20000) + 300 for i in range(count)]


def scorer(model: LanguageModel, context: int) -> Callable[[int], None]:
    """A function that scores so many rows."""
    ids = some_ids(model, max(context, 64))[:context]
    sequence = model.open()
    model.forward([Feed(sequence, ids, wanted=1)])
    model.commit(sequence, list(range(context)))

    def score(rows: int) -> None:
        model.forward([Feed(sequence, ids[:rows])])
        model.commit(sequence, [])

    return score


def reader(model: LanguageModel) -> Callable[[int], None]:
    """A function that reads a prompt of so many tokens, up to the logits of its last one."""

    def read(count: int) -> None:
        sequence = model.open()
        ids = some_ids(model, count)
        model.prefill(sequence, ids[:-1])
        model.forward([Feed(sequence, ids[-1:])])
        model.release(sequence)

    return read


def in_turns(
    arms: dict[str, Callable[[int], None]], counts: list[int], turns: int, warm: int, each: int
) -> dict[str, dict[int, float]]:
    """Median milliseconds of every arm by the number of rows."""
    times: dict[str, dict[int, list[float]]] = {arm: {count: [] for count in counts} for arm in arms}
    for turn in range(warm + turns):
        for count in counts:
            for arm, work in arms.items():
                if each > 1:
                    work(count)  # the weights of the arm before leave the caches
                for _ in range(each):
                    start_s = time.perf_counter()
                    work(count)
                    if turn >= warm:
                        times[arm][count].append(1e3 * (time.perf_counter() - start_s))
    return {arm: {count: statistics.median(each) for count, each in found.items()} for arm, found in times.items()}


def table(title: str, counts: list[int], medians: dict[str, dict[int, float]]) -> None:
    """Print one."""
    print(f"| {title} | " + " | ".join(map(str, counts)) + " |\n" + "|---" * (len(counts) + 1) + "|")
    for arm, found in medians.items():
        print(f"| {arm} | " + " | ".join(f"{found[count]:.1f}" for count in counts) + " |", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--rows", default="1,2,4,5,8,16,32")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(instructions(), environment(), f"behind {options.context} tokens", sep="; ", flush=True)
    models: dict[str, LanguageModel] = {}
    for arm in options.arms:
        start_s = time.perf_counter()
        models[arm] = opened(arm)
        description, seconds = models[arm].describe(), time.perf_counter() - start_s
        line = f"{description['forward']}, {description['weights']}, {description['exactness']}"
        print(f"{arm}: {line}; loaded in {seconds:.1f} s", flush=True)
    report = {}
    if options.rows:
        counts = [int(count) for count in options.rows.split(",")]
        scorers = {arm: scorer(model, options.context) for arm, model in models.items()}
        report["rows"] = in_turns(scorers, counts, options.turns, WARM, EACH)
        table("ms for rows", counts, report["rows"])
    if options.prompts:
        counts = [int(count) for count in options.prompts.split(",")]
        readers = {arm: reader(model) for arm, model in models.items()}
        report["prompts"] = in_turns(readers, counts, max(3, options.turns // 2), 1, 1)
        table("ms for a prompt", counts, report["prompts"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
