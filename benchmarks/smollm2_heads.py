"""Trained drafters of SmolLM2 on questions that no training saw: acceptance, time and speed over plain decoding.

Twenty chat and ten code questions, every arm in turn on each, greedy and at T=1 with a seed (so that every arm must
write what plain decoding writes: the count of equal texts is printed beside the speed).  The positions are the share
of drafted rounds whose draft stands up to there.

    python benchmarks/smollm2_heads.py [TARGET] [--drafters SPEC ...] [--new-tokens 128] [--temperatures 0 1]
                                       [--repeat 3] [--batch 1] [--only chat|code] [--controller constant] [--no-seed]
                                       [--out FILE]

With ``--no-seed`` drafts are drawn freely, a chain or (``draw=without_replacement``) a tree, and no texts are compared.
TARGET is ``smollm2`` (``foretoken models --fetch smollm2``), a GGUF file or a folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import environment
from quantized import instructions
from real_models import CHAT, CODE, SEED, _ids

import foretoken as ft
from foretoken.engine.stats import SpecStats
from foretoken.loading.measured.machine import hardware

MORE_CHAT = (
    "What is the difference between weather and climate?",
    "Write a poem of eight lines about a cat that is afraid of mice.",
    "My flight was cancelled. How do I ask the airline for my money back?",
    "Who was Marie Curie, and why is she famous?",
    "Give me some advice for a job interview at a small company.",
    "What are good ways to save energy at home in winter?",
    "Tell a story about a lighthouse keeper who finds a message in a bottle.",
    "How does a refrigerator keep food cold?",
    "A train leaves at 9:40 and arrives at 11:05. How long does the journey take? Show how you get there.",
    "Which is better for a beginner, running or cycling, and why?",
    "Write an invitation to a garden party on the first Saturday in June.",
    "Name four famous rivers of Europe and the countries that they flow through.",
    "Rewrite this sentence so that it sounds friendlier: You are late again and everybody had to wait.",
    "Why do leaves change their colour in autumn?",
)
MORE_CODE = (
    "Write a Python function that checks whether a string is a palindrome, ignoring case and spaces.",
    "How do I remove duplicates from a list in Python and keep the order?",
    "Write a JavaScript function that returns the largest number of an array.",
    "Find the bug: def mean(xs):\n    total = 0\n    for x in xs:\n        total = x\n    return total / len(xs)",
)
QUESTIONS = {"chat": (*CHAT[:6], *MORE_CHAT), "code": (*CODE[:6], *MORE_CODE)}
DRAFTERS = ("suffix,share=false", "quantized,bits=4,k=4")
"""Without heads of one's own: give `eagle3:FOLDER,width=1,nodes=4,depth=4` for a chain, `eagle3:FOLDER` for a tree of
as many nodes as pay, `eagle3:FOLDER,nodes=16` for one of 16."""


@dataclass
class Arm:
    """One way to generate, and what it did."""

    llm: ft.Llm
    rates: dict[str, list[float]] = field(default_factory=dict)
    stats: dict[str, SpecStats] = field(default_factory=dict)
    equal: int = 0
    texts: int = 0

    def run(self, kind: str, prompts: list[list[int]], options: dict[str, Any], repeat: int) -> list[list[int]]:
        """The new ids of prompts that run together; keeps the median of the rates."""
        rates, total = list[float](), self.stats.setdefault(kind, SpecStats())
        for _ in range(repeat):
            outs = self.llm.generate(prompts, **options)
            seconds = max(out.stats.total_s - out.stats.prefill_s for out in outs)
            rates.append(sum(len(out.token_ids) for out in outs) / seconds)
            for out in outs:
                total.merge(out.stats)
        self.rates.setdefault(kind, []).append(statistics.median(rates))
        return [list(out.token_ids) for out in outs]


def main() -> None:
    """Print figures as they come, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1, help="questions that run together; for acceptance alone")
    parser.add_argument("--only", choices=tuple(QUESTIONS))
    parser.add_argument("--most", type=int, default=99, help="questions of each kind")
    parser.add_argument("--controller", default="constant", help="constant drafts always, auto where it pays")
    parser.add_argument("--no-seed", action="store_true", help="sampled requests have no seed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    plain = ft.load(args.target, drafter=None, generation_config=None, prefix_cache=False)
    shared = {"tokenizer": plain.tokenizer, "prefix_cache": False, "controller": args.controller}
    llms = {"plain": plain} | {spec: ft.load(plain.target, drafter=spec, **shared) for spec in args.drafters}
    questions = {kind: texts[: args.most] for kind, texts in QUESTIONS.items() if args.only in (None, kind)}
    report: dict[str, Any] = {
        "machine": f"{hardware()['cpu']}, {instructions()}",
        "environment": environment(),
        "model": plain.describe(),
        "questions": {kind: len(texts) for kind, texts in questions.items()},
        "new_tokens": args.new_tokens,
        "repeat": args.repeat,
        "batch": args.batch,
        "controller": args.controller,
        "seed": None if args.no_seed else SEED,
    }
    for temperature in args.temperatures:
        arms = measured(args, llms, questions, temperature)
        report[f"T={temperature:g}"] = {
            spec: summary(arm, arms["plain"], spec, temperature) for spec, arm in arms.items()
        }
    print(json.dumps(report))
    if args.out is not None:
        args.out.write_text(json.dumps(report) + "\n", encoding="utf-8")


def measured(
    args: argparse.Namespace, llms: dict[str, ft.Llm], questions: dict[str, tuple[str, ...]], temperature: float
) -> dict[str, Arm]:
    """Every arm on every question, in turn."""
    arms = {spec: Arm(llm) for spec, llm in llms.items()}
    free = args.no_seed and temperature > 0
    options = {"max_new_tokens": args.new_tokens, "temperature": temperature, "seed": None if free else SEED}
    tokenizer = llms["plain"].tokenizer
    for llm in llms.values():  # not counted
        llm.generate(_ids(tokenizer, CHAT[0]), **{**options, "max_new_tokens": 16})
    for kind, texts in questions.items():
        prompts = [_ids(tokenizer, text) for text in texts]
        for start in range(0, len(prompts), args.batch):
            group = prompts[start : start + args.batch]
            plain_texts = arms["plain"].run(kind, group, options, args.repeat)
            for spec, arm in arms.items():
                if spec != "plain":
                    found = arm.run(kind, group, options, args.repeat)
                    if not free:
                        arm.equal += sum(a == b for a, b in zip(found, plain_texts, strict=True))
                        arm.texts += len(group)
    return arms


def summary(arm: Arm, plain: Arm, spec: str, temperature: float) -> dict[str, Any]:
    """Figures of an arm by kind of question; prints a line for each."""
    found: dict[str, Any] = {"equal": f"{arm.equal} of {arm.texts}"}
    for kind, stats in arm.stats.items():
        rounds, drafted = max(1, stats.num_drafts), max(1, stats.num_drafted_rounds)
        found[kind] = {
            "tokens_per_s": statistics.median(arm.rates[kind]),
            "speedup": statistics.median(a / b for a, b in zip(arm.rates[kind], plain.rates[kind], strict=True)),
            "mean_acceptance_length": stats.mean_acceptance_length,
            "positions": [count / drafted for count in stats.num_accepted_tokens_per_pos],
            "draft_ms": 1000 * stats.draft_s / rounds,
            "target_ms": 1000 * stats.target_s / rounds,
            "other_ms": 1000 * (stats.verify_s + stats.overhead_s) / rounds,
            "drafts": stats.num_draft_tokens / drafted,
        }
        row = found[kind]
        positions = " ".join(f"{share:.2f}".lstrip("0") for share in row["positions"])
        print(
            f"T={temperature:g} {kind} {spec:<42} {row['tokens_per_s']:6.1f} tokens/s, {row['speedup']:.2f} of plain, "
            f"{row['mean_acceptance_length']:.2f} a round of {row['drafts']:.1f} drafts ({positions}), ms "
            f"{row['draft_ms']:.2f} + {row['target_ms']:.2f} + {row['other_ms']:.2f}, equal {found['equal']}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
