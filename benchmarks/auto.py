"""The default controller against plain decoding and against every fixed configuration of what it may choose from.

Four workloads (code, prose, chat transcripts of coding agents, random tokens) by greedy and T=1 by batch 1, 4 and 8.
A batch is a fixed one, whose slowest request is waited for, or with ``--queue`` so many places that are always taken:
all prompts ``--copies`` times in a queue, as a server has them.
Each cell has its own engines, with sequences of their own over the same weights.  The controller first serves the
cell's prompts for ``--warm-up`` rounds, in which it finds out what pays, and does so in ``--starts`` engines, whose
mean is shown; the others serve them once.  Then all arms decode the same batches ``--repeat`` times, taking turns
round by round, always the one that has written least: on a shared machine two arms of plain decoding are then within
1 % of each other, where they differ by 8 % when they take turns batch by batch.  A batch's time is taken without its
prefill; ratios are medians over batches and runs of tokens per second.  The best fixed configuration is picked by
every other run and compared in the others.  ``--json`` keeps the rates of every arm, by batch and run.  ``--seeded``
gives every prompt a seed of its own: sampled requests are then coupled, and all arms write the same texts.

    python benchmarks/auto.py [--data ../shared/data] [--new-tokens 96] [--batch 1 4 8] [--only code prose] [--json OUT]
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import environment
from drafter_table import transcripts
from prompts import CODE, PROSE

import foretoken as ft
from foretoken.llm import Llm, assemble
from foretoken.loading import DEFAULT_GROUP, build_drafter, load_model, load_tokenizer

FIXED = (
    "model,k=1",
    "model,k=2",
    "model,k=4",
    "model,k=8",
    "ngram,k=4",
    "ngram,k=10",
    "router,drafters=(ngram,k=10|model,k=4),costs=0|0.5",
)
"""The members of the default group, each alone at several lengths, and both together."""
AGENTIC = (
    "<tool>list_files</tool>\nsrc/app.py\nsrc/db.py\ntests/test_app.py\n<tool>read_file src/app.py</tool>\n"
    "def main():\n    db = connect('app.db')\n    for row in db.rows():\n        print(row)\n"
    "<tool>edit_file src/app.py</tool>\ndef main():\n    db = connect('app.db')\n    for row in db.rows():\n",
    "User: run the tests\nAgent: running pytest\nFAILED tests/test_app.py::test_main - KeyError: 'name'\n"
    "Agent: I look at tests/test_app.py\nUser: run the tests\nAgent: running pytest\n",
)
"""Where the data folder is absent."""


@dataclass
class Arm:
    """One way to decode, and its tokens per second, batch by batch."""

    name: str
    llm: Llm
    rates: list[list[float]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    rounds: int = 0
    seeded: bool = False
    prefill_s: float = 0.0

    def serve(self, batch: list[list[int]], place: int, options: dict[str, Any], counted: bool) -> Iterator[int]:
        """Decode a batch: after every round the tokens that there are. What is not counted is thrown away."""
        engine = self.llm.engine
        for number, prompt in enumerate(batch):
            seed = {"seed": 8 * place + number} if self.seeded else {}
            engine.add(self.llm.request(prompt, **options, **seed))
        tokens, seconds, started = 0, 0.0, set[int]()
        lengths = []
        while engine.busy:
            start_s = time.perf_counter()
            gained = engine.step()
            seconds += time.perf_counter() - start_s
            # Prompts of one step are read together, and each request is told the time of all.
            read = max((run.stats.prefill_s for run, _ in gained if run.id not in started), default=0.0)
            seconds -= read
            self.prefill_s += read if counted else 0.0
            for run, emission in gained:
                started.add(run.id)
                tokens += len(emission.token_ids)
                if emission.finish_reason is not None:
                    lengths.append(run.stats.mean_acceptance_length)
            self.rounds += 1
            yield tokens
        if counted:
            self.rates[place].append(tokens / seconds)
            self.lengths += lengths


def take_turns(served: Sequence[Iterator[int]]) -> None:
    """Run all of them, always the one with fewest tokens next: whatever else slows the machine hits all alike."""
    heap = [(0, order, arm) for order, arm in enumerate(served)]
    while heap:
        _, order, arm = heapq.heappop(heap)
        tokens = next(arm, None)
        if tokens is not None:
            heapq.heappush(heap, (tokens, order, arm))


def workloads(tokenizer: Any, data: Path, vocab_size: int, longest: int) -> dict[str, list[list[int]]]:
    """Prompts by kind, eight of each."""
    chats = data / "prompts" / "agentic"
    agentic = transcripts(chats, tokenizer, longest) if chats.is_dir() else [tokenizer(t)["input_ids"] for t in AGENTIC]
    generator = torch.Generator().manual_seed(0)
    return {
        "code": [tokenizer(text)["input_ids"] for text in CODE[:8]],
        "prose": [tokenizer(text)["input_ids"] for text in PROSE[:8]],
        "agentic": (agentic * 8)[:8],
        "random": torch.randint(16, vocab_size, (8, 64), generator=generator).tolist(),
    }


def cell(arms: list[Arm], prompts: list[list[int]], size: int, request: dict[str, Any], options: Any) -> None:
    """All arms over all batches of a cell, taking turns, in another order every time."""
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    if options.queue and size > 1:
        batches = [prompts * options.copies]
        for arm in arms:
            arm.llm.engine.max_batch = size
    for arm in arms:
        arm.rates, arm.lengths, arm.seeded = [[] for _ in batches], [], options.seeded
    for arm in arms:
        while arm.rounds < (options.warm_up if arm.name == "auto" else 1):
            for place, batch in enumerate(batches):
                take_turns([arm.serve(batch, place, request, counted=False)])
            print(f"\r{arm.name}: {arm.rounds} rounds  ", end="", file=sys.stderr, flush=True)
    for turn in range(options.repeat):
        for place, batch in enumerate(batches):
            ordered = arms if turn % 2 == 0 else arms[::-1]
            take_turns([arm.serve(batch, place, request, counted=True) for arm in ordered])
            print(f"\rrun {turn + 1}, batch {place + 1} of {len(batches)}  ", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)


def ratio(arm: Arm, other: Arm, runs: slice = slice(None)) -> float:
    """Median over batches and runs."""
    pairs = zip(arm.rates, other.rates, strict=True)
    return statistics.median(a / b for mine, theirs in pairs for a, b in zip(mine[runs], theirs[runs], strict=True))


def against_best(auto: Arm, plain: Arm, fixed: list[Arm]) -> float:
    """``auto`` over the best fixed configuration, which is picked by one half of the runs and judged by the other.

    The best of several noisy figures is too good on average; of other runs of the same configuration that is not so.
    """
    halves = (slice(0, None, 2), slice(1, None, 2))
    if len(plain.rates[0]) < 2:
        halves = (slice(None), slice(None))
    shares = []
    for picked, judged in (halves, halves[::-1]):
        best = max([plain, *fixed], key=lambda arm: ratio(arm, plain, picked))
        shares.append(ratio(auto, best, judged))
    return statistics.mean(shares)


def main() -> None:
    """One line per cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--inflate", default=None, help="300m, 1b, ...: a target of that size with the same outputs")
    parser.add_argument("--dtype", default=None, help="of the target; its own by default")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--only", nargs="*", default=[], help="workloads; all four by default")
    parser.add_argument("--drafter", default=DEFAULT_GROUP, help="what the controller chooses from")
    parser.add_argument("--fixed", nargs="*", default=list(FIXED))
    parser.add_argument("--warm-up", type=int, default=250)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--starts", type=int, default=2, help="controllers that find out for themselves; their mean")
    parser.add_argument("--queue", action="store_true", help="batches whose places are always taken")
    parser.add_argument("--seeded", action="store_true", help="a seed for every prompt")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    print(environment(), f"foretoken {ft.__version__}, auto chooses from {options.drafter}", sep=", ")
    tokenizer = load_tokenizer(options.target)
    target = load_model(options.target, dtype=options.dtype, inflate=options.inflate)
    kinds = workloads(tokenizer, options.data, target.vocab_size, target.context_length - options.new_tokens - 8)
    print("| workload | T | batch | " + " | ".join(["auto", *options.fixed, "auto / best"]) + " |")
    print("|---" * (5 + len(options.fixed)) + "|")
    lines = []
    for temperature in options.temperatures:
        for kind in options.only or kinds:
            for size in options.batch:

                def made(spec: str, controller: str) -> Llm:
                    mine = target.sibling()
                    drafter = build_drafter(spec, mine, target_source=options.target, tokenizer=tokenizer)
                    return assemble(mine, drafter, "auto", controller, tokenizer)

                plain = Arm("plain", assemble(target.sibling(), None, "auto", "constant", tokenizer))
                autos = [Arm("auto", made(options.drafter, "auto")) for _ in range(options.starts)]
                fixed = [Arm(spec, made(spec, "constant")) for spec in options.fixed]
                request = {"max_new_tokens": options.new_tokens, "temperature": temperature, "ignore_eos": True}
                cell([plain, *autos, *fixed], kinds[kind], size, request, options)
                each = [ratio(auto, plain) for auto in autos]
                found = [statistics.mean(each), *(ratio(arm, plain) for arm in fixed)]
                share = statistics.mean(against_best(auto, plain, fixed) for auto in autos)
                best = max([plain, *fixed], key=lambda arm: ratio(arm, plain))
                cells = [f"{kind} | {temperature:g} | {size}", *(f"{figure:.2f}" for figure in found), f"{share:.2f}"]
                print("| " + " | ".join(cells) + " |", flush=True)
                lines.append({"workload": kind, "temperature": temperature, "batch": size, "auto": found[0],
                              "starts": each, "fixed": dict(zip(options.fixed, found[1:], strict=True)),
                              "best": best.name, "auto_over_best": share,
                              "tokens_per_round": statistics.mean(x for a in autos for x in a.lengths),
                              "rates": [[arm.name, arm.rates] for arm in (plain, *autos, *fixed)]})  # fmt: skip
    worst, shares = min(line["auto"] for line in lines), sorted(line["auto_over_best"] for line in lines)
    print(f"\nlowest auto / plain {worst:.2f}")
    print(f"auto / best fixed: lowest {shares[0]:.2f}, median {statistics.median(shares):.2f}")
    if options.json is not None:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
