"""Controllers beside each other in batches: chains of one drafter, cut before or behind the draft.

Every arm serves the same batches, round by round in turns, always the one that has written least; a batch's time is
taken without its prefill.  Each controller first serves all prompts without being counted, from which it learns.

    python benchmarks/prefix.py [--drafter dspark,width=1] [--batch 8] [--controllers goodput prefix] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import chain
from pathlib import Path

from auto import Arm, take_turns
from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

from foretoken.llm import assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer


def main() -> None:
    """Print a line per arm and kind; with ``--json`` write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default="dspark,width=1,nodes=16")
    parser.add_argument("--controllers", nargs="+", default=["constant", "goodput", "prefix"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, served in batches")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="passes over the prompts that are not counted")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="+", default=["code", "prose"])
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target, tokenizer = load_model(args.target, dtype=args.dtype), load_tokenizer(args.target)
    texts = {"code": (*CODE, *MORE_CODE), "prose": (*PROSE, *MORE_PROSE)}
    print(environment(), args.drafter, f"batch {args.batch}", sep=", ")
    rows = []
    for temperature in args.temperatures:
        for kind in args.kinds:
            ids = [tokenizer(text)["input_ids"] for text in texts[kind][: args.prompts]]
            batches = [ids[start : start + args.batch] for start in range(0, len(ids), args.batch)]
            arms = [Arm("plain", assemble(target.sibling(), None, "auto", "constant", tokenizer), seeded=True)]
            for spec in args.controllers:
                own = target.sibling()
                drafter = build_drafter(args.drafter, own, target_source=args.target, tokenizer=tokenizer)
                arms.append(Arm(spec, assemble(own, drafter, "auto", spec, tokenizer), seeded=True))
            for arm in arms:
                arm.rates = [[] for _ in batches]
            asked = {"max_new_tokens": args.new_tokens, "temperature": temperature, "ignore_eos": True}
            for repeat in range(args.warm_up + args.repeat):
                for place, batch in enumerate(batches):
                    take_turns([arm.serve(batch, place, asked, repeat >= args.warm_up) for arm in arms])
            for arm in arms:
                both = zip(chain(*arm.rates), chain(*arms[0].rates), strict=True)
                ratios = [mine / plain for mine, plain in both]
                row = {
                    "temperature": temperature, "kind": kind, "arm": arm.name, "over_plain": statistics.median(ratios),
                    "tokens_a_round": statistics.mean(arm.lengths),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"T={temperature:g} {kind:6} {arm.name:24} {row['over_plain']:.3f} of plain, "
                    f"{row['tokens_a_round']:.2f} tokens a round",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
