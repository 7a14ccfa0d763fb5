"""Every rule that decides how long a draft gets, with one draft model: tokens and drafts per round, and speed.

One draft model drafts as far as the rule lets it; the arms differ in their controller only.  Arms take turns on every
prompt; a prompt's time is the median of ``--repeat`` runs without the prefill, and the speed is the median over prompts
of tokens per second over plain decoding.  Greedy outputs must equal those of plain decoding.  What a bandit learns it
keeps, from the warm-up on; the other rules begin anew with every answer.

    python benchmarks/stopping_rules.py [--drafter model,k=16] [--new-tokens 64] [--only svip constant,k=4] [--json OUT]
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

import foretoken as ft
from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer

CONTROLLERS = (
    "constant,k=2",
    "constant,k=4",
    "constant,k=8",
    "heuristic",
    "confidence",
    "draft_verify",
    "adaedl",
    "svip",
    "tapout",
    "bandit",
)


@dataclass
class Arm:
    """One controller, and what it did with one kind of prompt."""

    name: str
    llm: Llm
    stats: SpecStats = field(default_factory=SpecStats)
    rates: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def forget(self) -> None:
        """Start another kind of prompt; what a controller has learned stays."""
        self.stats, self.rates, self.outputs = SpecStats(), [], []


def measure(arms: Sequence[Arm], prompts: Sequence[list[int]], request: dict[str, Any], repeat: int) -> None:
    """All arms on all prompts, taking turns, in another order every time."""
    for index, prompt in enumerate(prompts):
        seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for turn in range(repeat):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                start_s = time.perf_counter()
                out = arm.llm.generate(prompt, **request, seed=index, ignore_eos=True)
                seconds[arm.name].append(time.perf_counter() - start_s - out.stats.prefill_s)
                arm.stats.merge(out.stats)
                if turn == 0:
                    arm.outputs.append(out.token_ids)
        for arm in arms:
            arm.rates.append(len(arm.outputs[-1]) / statistics.median(seconds[arm.name]))
        print(f"\r{index + 1} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def row(arm: Arm, plain: Arm) -> dict[str, Any]:
    """The figures of an arm."""
    rounds = max(arm.stats.num_drafts, 1)
    return {
        "controller": arm.name,
        "tokens_per_round": arm.stats.num_new_tokens / rounds,
        "drafted_per_round": arm.stats.num_draft_tokens / rounds,
        "acceptance_rate": arm.stats.acceptance_rate,
        "speed": statistics.median(a / b for a, b in zip(arm.rates, plain.rates, strict=True)),
        "identical": sum(a == b for a, b in zip(arm.outputs, plain.outputs, strict=True)),
        "prompts": len(arm.outputs),
    }


def show(found: Sequence[dict[str, Any]], greedy: bool) -> None:
    """Markdown, one line per controller."""
    head = ["controller", "tokens / round", "drafted / round", "accepted", "speed", *(["same text"] if greedy else [])]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in found:
        cells = [f"`{row['controller']}`", f"{row['tokens_per_round']:.2f}", f"{row['drafted_per_round']:.2f}"]
        cells += [f"{row['acceptance_rate']:.2f}", f"{row['speed']:.2f}"]
        if greedy:
            cells.append(f"{row['identical']}/{row['prompts']}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Greedy and T=1, code and prose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default="model,k=16", help="long enough for the longest rule")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=20, help="how many of each kind")
    parser.add_argument("--repeat", type=int, default=3, help="runs per arm and prompt")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--only", nargs="*", default=[], help="controller specs; all rules by default")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file, one object a line")
    options = parser.parse_args()
    print(environment(), f"foretoken {ft.__version__}", f"{options.drafter}, {options.new_tokens} tokens", sep=", ")
    tokenizer = load_tokenizer(options.target)
    target = load_model(options.target, dtype=options.dtype)
    texts = {"code": (*CODE, *MORE_CODE), "prose": (*PROSE, *MORE_PROSE)}
    lines = []
    for temperature in options.temperatures:
        plain = Arm("plain", assemble(target, None, "auto", "constant", tokenizer))
        arms = [plain]
        for spec in options.only or CONTROLLERS:
            drafter = build_drafter(options.drafter, target, tokenizer=tokenizer)
            arms.append(Arm(spec, assemble(target, drafter, "auto", spec, tokenizer)))
        asked = {"max_new_tokens": options.new_tokens, "temperature": temperature}
        for arm in arms:  # warm-up
            arm.llm.generate(tokenizer(CODE[0])["input_ids"], **asked, seed=0, ignore_eos=True)
        for kind, prompts in texts.items():
            measure(arms, [tokenizer(p)["input_ids"] for p in prompts[: options.prompts]], asked, options.repeat)
            found = [row(arm, plain) for arm in arms]
            print(f"\n{kind}, {'greedy' if temperature == 0 else f'T={temperature:g}'}:\n")
            show(found, temperature == 0)
            lines += [{"kind": kind, "temperature": temperature, **one} for one in found]
            for arm in arms:
                arm.forget()
    if options.json is not None:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
