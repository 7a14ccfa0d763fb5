"""Coupled sampling beside the rules with draws of their own: acceptance by position and speed over plain decoding.

Every arm serves the same prompts, one after another; the arms take turns prompt by prompt, plain decoding with the seed
among them, so that a change in the machine's load hits all.  A coupled arm's texts are compared with plain decoding's.

    python benchmarks/coupled.py [--prompts 16] [--new-tokens 64] [--dtype float32] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer

CHAIN, TREE = ("coupled", "rejection", "block"), ("coupled", "without_replacement", "traversal")
ARMS: dict[str, Sequence[str]] = {
    "model,k=6": CHAIN,
    "model,tree=2x2": TREE,
    "model,k=12": CHAIN,
    "model,tree=4x2": TREE,
    "eagle,width=1,nodes=6,depth=6": CHAIN,
    "eagle,width=3,nodes=6,depth=6": ("coupled",),
    "eagle,width=4,nodes=12,depth=6": ("coupled",),
    "eagle,width=4,nodes=12,depth=6,draw=greedy": ("point",),
    "mtp,width=1,nodes=4,depth=4": CHAIN,
    "mtp,width=3,nodes=8,depth=4": ("coupled",),
}
"""Drafters -> rules.  Trees of six and of twelve nodes stand beside chains of as many."""


@dataclass
class Arm:
    """One drafter under one rule, or plain decoding; its speeds, and how often it said what plain decoding said."""

    name: str
    llm: Llm
    rates: list[float] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    same: int = 0

    def row(self, plain: Arm, coupled: bool, prompts: int) -> dict[str, Any]:
        """What is printed of it."""
        ratios = [mine / base for mine, base in zip(self.rates, plain.rates, strict=True)]
        by_position = [round(n / self.stats.num_drafts, 3) for n in self.stats.num_accepted_tokens_per_pos]
        return {
            "arm": self.name,
            "mean_acceptance_length": round(self.stats.mean_acceptance_length, 3),
            "accepted_at": by_position,
            "over_plain": round(statistics.median(ratios), 3),
            "identical": f"{self.same}/{prompts}" if coupled else None,
        }


def measured(temperature: float, prompts: Sequence[str], new_tokens: int, arms: Sequence[Arm]) -> None:
    """Serve every prompt with every arm; the first arm is plain decoding."""
    for seed, prompt in enumerate(prompts):
        texts = {}
        turn = seed % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            output = arm.llm.generate(
                prompt, max_new_tokens=new_tokens, temperature=temperature, seed=seed, ignore_eos=True
            )
            arm.stats.merge(output.stats)
            arm.rates.append(output.stats.tokens_per_s)
            texts[arm.name] = output.token_ids
        for arm in arms:
            arm.same += texts[arm.name] == texts[arms[0].name]


def main() -> None:
    """Print a table per temperature; with ``--json`` write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pools = zip(CODE + MORE_CODE, PROSE + MORE_PROSE, strict=False)
    prompts = [text for pair in pools for text in pair][: args.prompts]
    if args.prompts < 1 or args.new_tokens < 2:
        parser.error("--prompts must be at least 1 and --new-tokens at least 2")
    target, tokenizer = load_model("builtin", dtype=args.dtype), load_tokenizer("builtin")
    rows = []
    for temperature in args.temperatures:
        arms, coupled = [Arm("plain", assemble(target, None, "auto", "auto", tokenizer))], [False]
        for spec, rules in ARMS.items():
            drafter = build_drafter(spec, target, target_source="builtin", tokenizer=tokenizer)
            for rule in rules:
                arms.append(Arm(f"{spec} {rule}", assemble(target, drafter, rule, "constant", tokenizer)))
                coupled.append(rule == "coupled")
        for arm in arms:  # first calls are slower
            arm.llm.generate(prompts[0], max_new_tokens=8, temperature=temperature, seed=0)
        measured(temperature, prompts, args.new_tokens, arms)
        print(f"T={temperature}")
        for arm, is_coupled in zip(arms[1:], coupled[1:], strict=True):
            row = {"temperature": temperature, **arm.row(arms[0], is_coupled, len(prompts))}
            rows.append(row)
            same = f", same text {row['identical']}" if row["identical"] else ""
            length, speed = row["mean_acceptance_length"], row["over_plain"]
            found = f"{length:.2f} tokens a round, {speed:.2f} of plain{same}  {row['accepted_at']}"
            print(f"  {row['arm']:58} {found}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
