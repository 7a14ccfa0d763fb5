"""The built-in target inflated to a size that users have: methods against plain decoding and other engines.

One run, arms taking turns on every prompt, medians of ``--repeat`` runs, the same token ids.  The predicted speed-up is
the cost model's, from the measured v(n), the cost of drafting and the tokens per round; what a round spends beside the
drafter and the target is the overhead.  Engines that are not installed are left out, with a line that says so.

    python benchmarks/inflated.py [--size 1b] [--dtype bfloat16] [--prompts 10] [--new-tokens 96] [--repeat 3]
                                  [--temperatures 0 1] [--drafters SPEC ...] [--engines SPEC ...]
                                  [--out run.jsonl] [--resume]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

import foretoken as ft
from foretoken.lab.bench.arms import ArmSetup, Unit
from foretoken.lab.bench.run import BenchSettings, run_bench
from foretoken.lab.bench.serving import make_arm
from foretoken.lab.bench.specs import PLAIN, is_foreign
from foretoken.lab.prompts import BenchPrompt
from foretoken.lab.workload import target_name
from foretoken.loading import load_model, load_tokenizer

DRAFTERS = (
    "model,k=6",
    "model,k=10",
    "model,tree=3x2x1x1x1x1",
    "eagle,nodes=31,depth=8",
    "eagle3,nodes=31,depth=8",
    "mtp,nodes=31,depth=8",
    "medusa,nodes=31",
    "hydra,nodes=31",
    "suffix",
    "ngram",
)
ENGINES = (
    "transformers:plain",
    "transformers:assisted,k=6",
    "transformers:assisted",
    "transformers:prompt_lookup,k=10",
    "llama.cpp",
    "llama.cpp:draft,k=6",
    "llama.cpp:prompt_lookup,k=10",
)

COLUMNS = (
    "arm",
    "tokens/s",
    "speed-up",
    "95 %",
    "predicted",
    "measured / predicted",
    "tokens per round",
    "overhead",
    "same ids",
)


def usable(engines: list[str]) -> list[str]:
    """The engines that are installed, tried on the small built-in target."""
    shared = ArmSetup(load_model("builtin", dtype="float32"))
    found = []
    for spec in engines:
        try:
            make_arm(spec, shared).run(Unit.of([1, 2, 3], 2), (0.0, 1))
            found.append(spec)
        except ValueError as error:
            print(f"left out {spec}: {error}", file=sys.stderr)
    return found


def tell(start_s: float, done: int, total: int, text: str) -> None:
    """One line that is written over."""
    spent = time.perf_counter() - start_s
    print(f"\r{done} of {total}, {spent:.0f} s: {text:60.60}", end="", file=sys.stderr, flush=True)


def table(cells: list[dict[str, Any]], category: str, temperature: float = 0.0) -> None:
    """Markdown: one row per arm of a category at a temperature, fastest first, plain decoding on top."""
    rows = [cell for cell in cells if (cell["category"], cell["temperature"]) == (category, temperature)]
    best = max((row for row in rows if not is_foreign(row["arm"])), key=lambda row: row["tokens_per_s"])
    print(f"\n### {category}, T={temperature:g}\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in sorted(rows, key=lambda row: (row["arm"] != PLAIN, -row["tokens_per_s"])):
        predicted, low_high = row["predicted_speedup"], row["speedup_ci95"]
        round_s = None if row["overhead_s"] is None else row["draft_s"] + row["target_s"] + row["overhead_s"]
        cells_of_row = (
            f"`{row['arm']}`",
            f"{row['tokens_per_s']:.2f}",
            f"**{row['speedup']:.2f}**",
            " to ".join(f"{end:.2f}" for end in low_high) if low_high else "",
            "" if predicted is None else f"{predicted:.2f}",
            "" if predicted is None else f"{row['speedup'] / predicted:.2f}",
            "" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}",
            "" if not round_s else f"{row['overhead_s'] / round_s:.1%}",
            "yes" if row["identical"] else "no",
        )
        print("| " + " | ".join(cells_of_row) + " |")
    print(f"\nbest here: `{best['arm']}`, {best['speedup']:.2f} times plain decoding", end="")
    for row in rows:
        if is_foreign(row["arm"]) and row["tokens_per_s"]:
            print(f"; {best['tokens_per_s'] / row['tokens_per_s']:.2f} times `{row['arm']}`", end="")
    print(flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=10, help="how many of code and of prose (at most 20)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--controller", default="constant", help="for drafters that name none")
    parser.add_argument("--out", type=Path, default=None, help="also as JSON lines, for foretoken bench report")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    engines = usable(options.engines)
    print("loading", file=sys.stderr)
    target = load_model("builtin", inflate=options.size, dtype=options.dtype)
    print(target_name(target, "builtin"))
    print(environment(), f"foretoken {ft.__version__}", f"{options.new_tokens} new tokens", options.dtype, sep=", ")
    texts = {"code": (*CODE, *MORE_CODE), "prose": (*PROSE, *MORE_PROSE)}
    prompts = {name: [BenchPrompt(name, text) for text in group[: options.prompts]] for name, group in texts.items()}
    shared = ArmSetup(
        target,
        tokenizer=load_tokenizer("builtin"),
        controller=options.controller,
        max_new_tokens=options.new_tokens,
        inflate=options.size,
    )
    settings = BenchSettings([*options.drafters, *engines], options.temperatures, repeat=options.repeat)
    start_s = time.perf_counter()
    result = run_bench(
        shared,
        prompts,
        settings,
        options.out,
        options.resume,
        lambda done, total, text: tell(start_s, done, total, text),
    )
    print(file=sys.stderr)
    for temperature in options.temperatures:
        for category in prompts:
            table(result.cells, category, temperature)


if __name__ == "__main__":
    main()
