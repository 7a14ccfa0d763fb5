"""One length for a whole batch or the likeliest prefixes of all: ``goodput`` against ``prefix``, and plain decoding.

All prompts are generated in one batch.  Arms take turns, in another order every time; the speed of a turn is that of
the batch, by the processor time of this process (which other processes disturb less than the clock, and which is that
of one thread: set ``OMP_NUM_THREADS=1``), over plain decoding's in the same turn.  The median over turns is shown, and
that by the clock.  Greedy outputs must equal those of plain decoding.  What a controller learns it keeps, from the
warm-up on.

With ``--survival`` nothing is timed: the estimates that the scheduler decides by are compared with what was accepted,
on chains that are scored whole, by position: mean estimate, share accepted, and the expected calibration error.

    python benchmarks/batch_schedule.py [--target builtin] [--drafter dspark] [--batch 8] [--new-tokens 48] [--turns 5]
    python benchmarks/batch_schedule.py --survival --drafter dspark,width=1 [--temperature 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

import foretoken as ft
from foretoken.core import Budget, Context, RoundTimes, TokenTree, Verdict
from foretoken.engine.request import Running
from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.methods.controllers.constant import ConstantController
from foretoken.training.calibration import calibration_error


@dataclass
class Served:
    """One arm: seconds of every turn, of the processor and by the clock, and what it wrote."""

    name: str
    llm: Llm
    seconds: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    outputs: list[list[list[int]]] = field(default_factory=list)

    def run(self, prompts: Sequence[list[int]], asked: dict[str, Any]) -> None:
        start_s, used_s = time.perf_counter(), time.process_time()
        outs = self.llm.generate(list(prompts), **asked)
        self.seconds.append(time.process_time() - used_s)
        self.clock.append(time.perf_counter() - start_s)
        print(f"{self.name}: {self.seconds[-1]:.2f} s, by the clock {self.clock[-1]:.2f}", file=sys.stderr, flush=True)
        self.outputs.append([out.token_ids for out in outs])
        for out in outs:
            self.stats.merge(out.stats)


class Asking(ConstantController):
    """The longest drafts, scored whole, with estimates."""

    def budget(self, context: Context, batch_size: int) -> Budget:
        return replace(super().budget(context, batch_size), survival=True)


def batches(tokenizer: Any, size: int) -> list[list[list[int]]]:
    """Code and prose in turns, so that requests of a batch differ."""
    texts = [text for pair in zip((*CODE, *MORE_CODE), (*PROSE, *MORE_PROSE), strict=False) for text in pair]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]


def compare(options: argparse.Namespace, target: Any, tokenizer: Any) -> None:
    arms = [Served("plain", assemble(target, None, "auto", "constant", tokenizer))]
    for spec in options.controllers:
        drafter = build_drafter(options.drafter, target, tokenizer=tokenizer)
        arms.append(Served(spec, assemble(target, drafter, "auto", spec, tokenizer)))
    asked: dict[str, Any] = {"max_new_tokens": options.new_tokens, "ignore_eos": True}
    asked |= {"temperature": options.temperature, "seed": list(range(options.batch)) if options.seeded else None}
    groups = batches(tokenizer, options.batch)
    for arm in arms:
        for group in groups[: options.warm_up]:
            arm.run(group, asked)
        arm.seconds, arm.clock, arm.outputs, arm.stats = [], [], [], SpecStats()
    for turn in range(options.turns):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            arm.run(groups[turn % len(groups)], asked)
    print("| controller | tokens / round | scored / round | accepted | over plain | quartiles | clock | same text |")
    print("|---|---|---|---|---|---|---|---|")
    for arm in arms:
        ratios = [plain / own for own, plain in zip(arm.seconds, arms[0].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        clock = statistics.median(plain / own for own, plain in zip(arm.clock, arms[0].clock, strict=True))
        rounds = max(arm.stats.num_drafts, 1)
        same = sum(arm.outputs[turn] == arms[0].outputs[turn] for turn in range(options.turns))
        print(
            f"| `{arm.name}` | {arm.stats.num_new_tokens / rounds:.2f} | {arm.stats.num_draft_tokens / rounds:.2f} | "
            f"{arm.stats.acceptance_rate:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} | {clock:.2f} | "
            f"{same}/{options.turns} |"
        )
    for arm in arms[1:]:
        controller = arm.llm.engine.controller
        print(f"{arm.name}: {controller.report().get('why', '') if controller is not None else ''}")
    pairs = zip(arms[1].seconds, arms[2].seconds, strict=True) if len(arms) > 2 else ()
    for ratio in [statistics.median(first / second for first, second in pairs)] if len(arms) > 2 else []:
        print(f"{arms[2].name} over {arms[1].name}: {ratio:.3f} (median of {options.turns} turns)")


def survival(options: argparse.Namespace, target: Any, tokenizer: Any) -> None:
    estimates: list[list[float]] = []
    outcomes: list[list[float]] = []

    def note(_: Sequence[Running], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], __: RoundTimes) -> None:
        for tree, verdict in zip(trees, verdicts, strict=True):
            if tree.survival and tree.is_chain:
                estimates.append(list(tree.survival[1:]))
                outcomes.append([float(len(verdict.path) > k) for k in range(len(tree) - 1)])

    drafter = build_drafter(options.drafter, target, tokenizer=tokenizer)
    llm = assemble(target, drafter, "auto", Asking(), tokenizer)
    llm.engine.on_round = note
    asked: dict[str, Any] = {"max_new_tokens": options.new_tokens, "temperature": options.temperature}
    for group in batches(tokenizer, options.batch)[: options.turns]:
        llm.generate(group, **asked, ignore_eos=True)
    depth = max(map(len, estimates))
    print("| position | rounds | mean estimate | accepted | calibration error |\n|---|---|---|---|---|")
    for k in range(depth):
        known = [i for i, row in enumerate(estimates) if len(row) > k]
        mine, right = (torch.tensor([side[i][k] for i in known]) for side in (estimates, outcomes))
        error = calibration_error(mine, right)
        print(f"| {k + 1} | {len(known)} | {mine.mean():.3f} | {right.mean():.3f} | {error:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default="dspark")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--controllers", nargs="+", default=["goodput", "prefix"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--warm-up", type=int, default=2, help="batches before the first turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seeded", action="store_true", help="with a seed for every request: the text is plain's")
    parser.add_argument("--survival", action="store_true", help="compare estimates with what is accepted")
    options = parser.parse_args()
    print(environment(), f"foretoken {ft.__version__}", options.target, options.drafter, sep=", ")
    target, tokenizer = load_model(options.target, dtype=options.dtype), load_tokenizer(options.target)
    (survival if options.survival else compare)(options, target, tokenizer)


if __name__ == "__main__":
    main()
