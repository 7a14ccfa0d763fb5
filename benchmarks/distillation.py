"""Acceptance of a draft model before and after alignment, per loss and text, at one budget in one run.

Every student starts from the same weights, sees the same number of rows in the same order, and is measured on the same
held-out text: lengths through the engine (greedy, and drawn at T=1), and two measures without luck on text that the
target wrote, the expected acceptance at T=1 (1 - TVD) and the share of equal most likely tokens.

    python benchmarks/distillation.py --data FOLDER [--draft PATH] [--steps 300] [--loss fkl ...] [--text fixed ...]

The built-in draft model has learned from the target before (forward KL on the corpus): little is left there.
A model that was trained without a teacher shows what each loss and text is worth:

    foretoken train lm --data FOLDER --tokenizer-from TARGET --hidden 192 --layers 2 --heads 3 --kv-heads 1 --ffn 512 \
        --steps 300 --out plain_draft
    python benchmarks/distillation.py --data FOLDER --draft plain_draft
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import environment

import foretoken as ft
from foretoken.cli.train_options import load_target
from foretoken.lab.bench.alignment import Alignment
from foretoken.methods.drafters.learning.losses import LOSSES
from foretoken.training.config import TEXTS, DistillConfig
from foretoken.training.curves import ALIGNMENT, value_of
from foretoken.training.distill import Distiller
from foretoken.training.workshop import Workshop, load_student

COLUMNS = ("length, greedy", "length, T=1", "expected acceptance", "equal argmax")


def trained(shop: Workshop, draft: str, measure: Alignment, config: DistillConfig) -> dict[str, Any]:
    """Train one student in a folder that is thrown away; what it reached and what that took."""
    shop.config = config
    if config.text == "teacher":
        shop.written_rows()  # not a part of the time: it is made once for all losses
    start_s = time.perf_counter()
    student = load_student(draft, shop.target, shop.tokenizer)
    with tempfile.TemporaryDirectory() as folder:

        def show(progress: Any) -> None:
            words = f"\r{config.loss} on {config.text}: step {progress.step} of {progress.steps}, {progress.loss:.4f}  "
            print(words, end="", file=sys.stderr, flush=True)

        Distiller(shop, student, Path(folder), name=draft).run(save_every=config.steps, on_step=show)
    seconds = time.perf_counter() - start_s
    print(file=sys.stderr)
    return {"loss": config.loss, "text": config.text, "train_s": seconds, **measure(student)}


def table(before: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line per student; differences to the start in brackets."""
    lines = ["| loss | text | " + " | ".join(COLUMNS) + " | training |", "|---" * (len(COLUMNS) + 3) + "|"]
    start = [value_of(before, name) for name in ALIGNMENT[1:]]
    lines.append("| before | | " + " | ".join(f"{value:.3f}" for value in start) + " | |")
    for row in rows:
        cells = [
            f"{v:.3f} ({v - old:+.3f})"
            for v, old in zip((value_of(row, name) for name in ALIGNMENT[1:]), start, strict=True)
        ]
        lines.append(f"| {row['loss']} | {row['text']} | {' | '.join(cells)} | {row['train_s']:.0f} s |")
    return "\n".join(lines)


def main() -> None:
    """Run all pairs of loss and text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--draft", default="builtin")
    parser.add_argument("--corpus", type=Path, help="where encoded and written text is kept")
    parser.add_argument("--loss", nargs="*", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--text", nargs="*", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--written", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0, help="at which models write")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    names = ("steps", "batch_size", "context", "written", "temperature", "lr", "seed")
    config = DistillConfig(**{name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder)
        shop = Workshop(*load_target(options.target), options.data, corpus, config)
        prompts = shop.held_prompts(options.prompts, 48)
        if not len(prompts):
            parser.error("no document was held out: give more text")
        measure = Alignment(shop.target, prompts, options.seed)
        print(environment(), f"foretoken {ft.__version__}", sep=", ")
        print(
            f"draft {Path(options.draft).name}, {config.steps} steps of {config.batch_size} x {config.context}, ",
            end="",
        )
        print(f"learning rate {config.lr:g}, {len(prompts)} held-out prompts of {measure.new_tokens} new tokens\n")
        before = measure(load_student(options.draft, shop.target, shop.tokenizer))
        runs = [replace(config, loss=loss, text=text) for text in options.text for loss in options.loss]
        rows = [trained(shop, options.draft, measure, run) for run in runs]
    print(table(before, rows), flush=True)
    if options.json:
        print(json.dumps({"draft": options.draft, "before": before, "rows": rows}))


if __name__ == "__main__":
    main()
