"""What sampled requests without a seed should get: a drawn chain, a tree coupled by noise, or a drawn tree.

Per drafter three arms serve the same prompts in turns: ``chain`` (drawn, block verification), ``coupled`` (the tree of
what comes first in a race on private noise) and ``traversal`` (siblings drawn without replacement).  Plain decoding is
timed in the same turns.  Acceptance does not depend on the machine; seconds do, so that both are shown by kind of text.

    python benchmarks/sampled_trees.py [--drafters eagle,eagle3] [--prompts 6] [--new-tokens 64] [--json FILE]
    python benchmarks/sampled_trees.py --target smollm2 --drafters eagle:FOLDER,eagle3:FOLDER --temperatures 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer

DRAFTERS = ("eagle", "eagle3", "mtp", "medusa", "hydra", "dflash", "dflash2", "dspark", "model")
KINDS = {"code": CODE + MORE_CODE, "prose": PROSE + MORE_PROSE}
WITHOUT_CHAIN = ("medusa", "hydra")
"""Heads that fill a tree in any case."""


@dataclass
class Arm:
    """One way to draft."""

    name: str
    llm: Llm
    rates: dict[str, list[float]] = field(default_factory=dict)
    stats: dict[str, SpecStats] = field(default_factory=dict)

    def serve(self, kind: str, prompts: Sequence[str], options: dict[str, Any]) -> None:
        """Answer prompts together, and note how fast."""
        start_s = time.perf_counter()
        outputs = self.llm.generate(list(prompts), **options)
        spent_s = time.perf_counter() - start_s - max(output.stats.prefill_s for output in outputs)
        self.rates.setdefault(kind, []).append(sum(len(output.token_ids) for output in outputs) / spent_s)
        for output in outputs:
            self.stats.setdefault(kind, SpecStats()).merge(output.stats)

    def row(self, kind: str, plain: Arm) -> dict[str, Any]:
        """What is printed of it."""
        ratios = [mine / base for mine, base in zip(self.rates[kind], plain.rates[kind], strict=True)]
        stats = self.stats[kind]
        return {
            "arm": self.name,
            "kind": kind,
            "tokens_a_round": round(stats.mean_acceptance_length, 3),
            "nodes_a_round": round(stats.num_draft_tokens / max(stats.num_drafts, 1), 1),
            "over_plain": round(statistics.median(ratios), 3),
        }


def arms_of(spec: str, target: Any, source: str, tokenizer: Any, nodes: int) -> list[Arm]:
    """The arms of a drafter for a target that was loaded from ``source``; ``nodes`` 0: as many as pay here."""
    name, sized = spec.partition(",")[0].partition(":")[0], f"nodes={nodes}" * bool(nodes)
    ways = {"coupled": ("", "coupled"), "traversal": ("draw=without_replacement", "traversal")}
    if name not in WITHOUT_CHAIN:
        ways = {"chain": ("draw=iid", "block"), **ways}
    if name == "model":
        tree = f"tree=(sequoia,nodes={nodes or 16})"
        ways = {"chain": ("k=4", "block"), "coupled": ("k=4,tree=eagle2", "coupled"), "traversal": (tree, "traversal")}
        sized = ""
    arms = []
    for way, (options, rule) in ways.items():
        wide = "width=1" if way == "chain" and name not in ("model", "mtp") else ""
        if name == "mtp" and way == "coupled":
            wide = "width=4"
        whole = ",".join(filter(None, [spec, options, sized, wide]))
        drafter = build_drafter(whole, target, target_source=source, tokenizer=tokenizer)
        arms.append(Arm(f"{name} {way}", assemble(target, drafter, rule, "constant", tokenizer)))
    return arms


def serve_all(arms: Sequence[Arm], prompts: int, batch: int, options: dict[str, Any]) -> None:
    """Every prompt of every kind by every arm, in turns."""
    for kind, texts in KINDS.items():
        for first in range(0, min(prompts, len(texts)), batch):
            turn = first // batch % len(arms)
            for arm in [*arms[turn:], *arms[:turn]]:
                arm.serve(kind, texts[first : min(first + batch, prompts)], options)


def main() -> None:
    """Print a table per temperature; with ``--json`` write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--batch", type=int, default=1, help="prompts that are served together")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=0, help="of every tree; 0: as many as pay here")
    parser.add_argument("--dtype", help="of the target's weights; as they are stored by default")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.prompts < 1 or args.new_tokens < 2:
        parser.error("--prompts must be at least 1 and --new-tokens at least 2")
    target, tokenizer = load_model(args.target, dtype=args.dtype), load_tokenizer(args.target)
    rows = []
    for temperature in args.temperatures:
        options = {"max_new_tokens": args.new_tokens, "temperature": temperature, "ignore_eos": True}
        for name in args.drafters.split(","):
            plain = Arm("plain", assemble(target, None, "auto", "auto", tokenizer))
            arms = [plain, *arms_of(name, target, args.target, tokenizer, args.nodes)]
            for arm in arms:  # first calls are slower
                arm.llm.generate(CODE[0], max_new_tokens=8, temperature=temperature)
            serve_all(arms, args.prompts, args.batch, options)
            for arm in arms[1:]:
                for kind in KINDS:
                    row = {"temperature": temperature, **arm.row(kind, plain)}
                    rows.append(row)
                    found = f"{row['tokens_a_round']:.2f} tokens a round of {row['nodes_a_round']} nodes"
                    print(
                        f"T={temperature} {row['arm']:22} {kind:6} {found}, {row['over_plain']:.2f} of plain",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
