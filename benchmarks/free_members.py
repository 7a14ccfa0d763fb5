"""What it costs that ``drafter="auto"`` has one more drafter to choose from, where that helps and where it does not.

Plain decoding, the default controller over n-grams alone, and over n-grams and one more drafter, all on the same
target, by workload; interleaved round by round as in ``auto.py``.  ``--warm-up 0`` takes controllers that know nothing
yet: what trying the drafter costs is then in the figures.  Rates are over those of plain decoding, without the prefill;
the prefill is in its own column, because a drafter with a cache of its own reads the prompt, too.

    python benchmarks/free_members.py --members mtp layer_skip [--dtype float32] [--warm-up 0] [--only code random]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from auto import Arm, cell, ratio, workloads
from common import environment

from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer


def main() -> None:
    """One line per workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--members", nargs="*", default=["mtp", "layer_skip"])
    parser.add_argument("--first", default="ngram", help="what auto has without them")
    parser.add_argument("--only", nargs="*", default=["code", "prose", "random"])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=250)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    options.queue, options.seeded, options.copies = False, False, 1
    tokenizer = load_tokenizer(options.target)
    target = load_model(options.target, dtype=options.dtype, inflate=options.inflate)
    kinds = workloads(tokenizer, options.data, target.vocab_size, target.context_length - options.new_tokens - 8)

    def made(spec: str | None) -> Llm:
        mine = target.sibling()
        drafter = build_drafter(spec, mine, target_source=options.target, tokenizer=tokenizer)
        return assemble(mine, drafter, "auto", "auto", tokenizer)

    groups = [options.first, *(f"router,drafters=({member}|{options.first})" for member in options.members)]
    print(environment(), f"warm-up {options.warm_up} rounds", sep=", ")
    print("rate over plain decoding; (over the one before it: without the member); prefill in plain prefills")
    print("| workload | T | batch | " + " | ".join([options.first, *(f"+ {m}" for m in options.members)]) + " |")
    print("|---" * (4 + len(options.members)) + "|")
    for temperature in options.temperatures:
        for kind in options.only:
            for size in options.batch:
                plain = Arm("plain", made(None))
                arms = [Arm("auto", made(spec)) for spec in groups]
                request = {"max_new_tokens": options.new_tokens, "temperature": temperature, "ignore_eos": True}
                cell([plain, *arms], kinds[kind], size, request, options)
                cells = []
                for arm in arms:
                    over = "" if arm is arms[0] else f" ({ratio(arm, arms[0]):.3f})"
                    tokens = statistics.mean(arm.lengths)
                    prefill = arm.prefill_s / plain.prefill_s
                    cells.append(f"{ratio(arm, plain):.3f}{over}, {tokens:.2f} tokens/round, prefill {prefill:.2f}")
                print(f"| {kind} | {temperature:g} | {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
