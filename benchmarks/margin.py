"""What a draft's margin tells of its acceptance, and what a stop by it would earn.

Chains of ``--depth`` tokens are drafted and verified, and at every position three signals are kept: the margin between
the best token's log-probability and the second's, the largest probability, and the entropy.  First: the area under the
curve of each, over all positions that were reached.  Second: speed over plain decoding if such drafts were cut by (1)
the best fixed length, (2) the online margin estimator, which weighs what one more token is worth against what it costs,
(3) the best fixed bar on the largest probability, and (4) an oracle that knows what is accepted.  Third: in batches,
the best length for all beside DSpark's prefix scheduler, which drafts whole chains and scores the likeliest of their
tokens by those chances, for drafters that pay by the level and for those that draft a block at once.

Only rounds behind those in which the estimator cuts nothing count.  A cut changes neither what is drafted before it nor
what is accepted, so that costs may be any machine's: ``--costs C:ROW`` are a draft step (a block) and each further row
of a target call, in target calls with one row.  ``--rounds FILE`` keeps what was recorded, and reads it if it exists.

    python benchmarks/margin.py [--target builtin] [--drafter model] [--depth 8] [--costs 0.1:0.02] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import environment
from margin_estimator import EVERY, WARM_UP, MarginEstimator, margin_of, prefixes, survival
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE
from torch import Tensor

from foretoken.core import Budget, Context, Limits, StepRecord
from foretoken.llm import assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.stopping import entropy

SIGNALS = ("margin", "largest probability", "entropy")


@dataclass
class Round:
    """Signals by position, and how many tokens were accepted."""

    signals: list[tuple[float, float, float]] = field(default_factory=list)
    accepted: int = 0
    depth: int = 0


class Watching(Controller):
    """Always the longest draft; keeps what its distributions say."""

    name = "watching"

    def __init__(self, depth: int) -> None:
        self.depth, self.rounds = depth, list[Round]()
        self._now: dict[int, Round] = {}

    def attach(self, limits: Limits) -> None:
        """Take no more than there is."""
        self.depth = min(self.depth, limits.max_depth)

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The whole length, with a rule that looks and never stops."""
        round_ = self._now[context.request_id] = Round()

        def look(distribution: Tensor | None, probability: float) -> bool:
            if distribution is not None:
                signals = margin_of(distribution), float(distribution.max()), entropy(distribution, probability)
                round_.signals.append(signals)
            return False

        return Budget(self.depth, 64, stop=look)

    def observe(self, context: Context, record: StepRecord) -> None:
        """Keep whole chains only: the last round of an answer is cut by its end."""
        round_ = self._now.pop(context.request_id)
        if len(round_.signals) == record.num_draft_tokens == self.depth:
            round_.accepted, round_.depth = record.num_accepted_tokens, record.depth
            self.rounds.append(round_)


def area(values: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a signal is larger for an accepted token than for a rejected one; ties count half."""
    x, right = torch.tensor(values, dtype=torch.float64), torch.tensor(labels)
    good, bad = x[right], x[~right].sort().values
    if not len(good) or not len(bad):
        return float("nan")
    below = torch.searchsorted(bad, good).double() + torch.searchsorted(bad, good, right=True).double()
    return float(below.mean() / (2 * len(bad)))


def areas(rounds: Sequence[Round]) -> dict[str, float]:
    """Of every signal, over all positions that were reached."""
    rows = [
        (round_.signals[i], i < round_.accepted)
        for round_ in rounds
        for i in range(min(round_.accepted + 1, round_.depth))
    ]
    labels = [label for _, label in rows]
    signs = (1.0, 1.0, -1.0)
    return {name: area([signs[i] * row[i] for row, _ in rows], labels) for i, name in enumerate(SIGNALS)}


@dataclass
class Costs:
    """Seconds: of a draft step, and of a target call by its rows."""

    step_s: float
    target_s: Callable[[int], float]

    def round_s(self, drafted: int) -> float:
        """A round with so many drafts."""
        return self.step_s * drafted + self.target_s(1 + drafted)


def speed(rounds: Sequence[Round], lengths: Sequence[int], costs: Costs) -> float:
    """Tokens per second if each round's draft had this length."""
    tokens = sum(1 + min(round_.accepted, length) for round_, length in zip(rounds, lengths, strict=True))
    return tokens / sum(costs.round_s(length) for length in lengths)


def margin_lengths(rounds: Sequence[Round], costs: Costs, depth: int) -> list[int]:
    """The online rule: one more token is drafted while it is expected to bring more than it costs at today's rate."""
    estimator, lengths = MarginEstimator(), list[int]()
    tokens = seconds = 0.0
    for round_ in rounds:
        rate = tokens / seconds if seconds else 1.0 / costs.round_s(0)
        chances, survival, length = list[float](), 1.0, 0
        while length < depth:
            expected = survival * estimator.curve(length).mean
            more_s = costs.round_s(length + 1) - costs.round_s(length)
            if estimator.is_warm and expected < rate * more_s:
                break
            chances.append(estimator.chance(length, round_.signals[length][0]))
            survival *= chances[-1]
            length += 1
        lengths.append(length)
        accepted = min(round_.accepted, length)
        estimator.observe([row[0] for row in round_.signals[:length]], chances, accepted)
        tokens = 0.99 * tokens + 1 + accepted
        seconds = 0.99 * seconds + costs.round_s(length)
    return lengths


def bar_lengths(rounds: Sequence[Round], bar: float, depth: int) -> list[int]:
    """A draft ends behind the first token whose distribution has no probability above the bar."""
    return [next((i + 1 for i in range(depth) if round_.signals[i][1] < bar), depth) for round_ in rounds]


def compared(all_rounds: Sequence[Round], costs: Costs, depth: int) -> dict[str, float]:
    """Speed of every policy over plain decoding."""
    first = WARM_UP * EVERY
    chosen, rounds = margin_lengths(all_rounds, costs, depth)[first:], all_rounds[first:]
    plain = 1.0 / costs.round_s(0)
    fixed = {k: speed(rounds, [k] * len(rounds), costs) for k in range(depth + 1)}
    bars = [speed(rounds, bar_lengths(rounds, bar / 20, depth), costs) for bar in range(20)]
    rate = fixed_rate(fixed)
    best_lengths = [
        max(range(round_.accepted + 1), key=lambda n: (1 + n) - rate * costs.round_s(n)) for round_ in rounds
    ]
    best = max(fixed, key=fixed.__getitem__)
    return {
        "best length": best,
        "fixed": fixed[best] / plain,
        "by margin": speed(rounds, chosen, costs) / plain,
        "its length": sum(chosen) / len(chosen),
        "by probability": max(bars) / plain,
        "oracle": speed(rounds, best_lengths, costs) / plain,
    }


def in_batches(all_rounds: Sequence[Round], costs: Costs, depth: int, size: int) -> dict[str, float]:
    """Tokens per second of batches, by what is drafted, over plain decoding."""
    estimator, chances = MarginEstimator(), list[list[float]]()
    for round_ in all_rounds:
        margins = [row[0] for row in round_.signals]
        chances.append([estimator.chance(place, margin) for place, margin in enumerate(margins)])
        estimator.observe(margins, chances[-1], round_.accepted)
    starts = range(WARM_UP * EVERY, len(all_rounds) - size + 1, size)
    groups = [(all_rounds[start : start + size], chances[start : start + size]) for start in starts]
    plain = size / costs.target_s(size)
    found: dict[str, float] = {}
    for name, drafting in (("levels", lambda length: costs.step_s * length), ("block", lambda _: costs.step_s)):
        fixed = [
            batch_speed([(rounds, [k] * size) for rounds, _ in groups], costs, drafting(k)) for k in range(1, depth + 1)
        ]
        with_prefixes = [
            (rounds, prefixes([survival(row) for row in rows], size, lambda count: 1.0 / costs.target_s(count)))
            for rounds, rows in groups
        ]
        found |= {f"{name}, one length": max([plain, *fixed]) / plain}
        found |= {f"{name}, prefixes": batch_speed(with_prefixes, costs, drafting(depth)) / plain}
    return found


def batch_speed(groups: Sequence[tuple[Sequence[Round], Sequence[int]]], costs: Costs, draft_s: float) -> float:
    """Tokens per second of batches whose chains are scored up to these lengths."""
    tokens = sum(
        1 + min(round_.accepted, n) for rounds, lengths in groups for round_, n in zip(rounds, lengths, strict=True)
    )
    return tokens / sum(draft_s + costs.target_s(len(lengths) + sum(lengths)) for _, lengths in groups)


def fixed_rate(fixed: dict[int, float]) -> float:
    """Tokens per second of the best fixed length."""
    return max(fixed.values())


def recorded(args: argparse.Namespace, temperature: float) -> dict[str, list[Round]]:
    """Rounds by kind of text."""
    target, tokenizer = load_model(args.target, dtype=args.dtype), load_tokenizer(args.target)
    is_model = args.drafter.startswith("model")
    chain = f"k={args.depth}" if is_model else f"depth={args.depth},nodes={args.depth},width=1"
    drafter = build_drafter(f"{args.drafter},{chain}", target, target_source=args.target, tokenizer=tokenizer)
    watching = Watching(args.depth)
    llm, found = assemble(target, drafter, "auto", watching, tokenizer), dict[str, list[Round]]()
    for kind, texts in {"code": (*CODE, *MORE_CODE), "prose": (*PROSE, *MORE_PROSE)}.items():
        watching.rounds = []
        prompts = list(texts[: args.prompts])
        seeds = list(range(len(prompts)))
        llm.generate(prompts, max_new_tokens=args.new_tokens, temperature=temperature, seed=seeds, ignore_eos=True)
        found[kind] = watching.rounds
    return found


def kept_rounds(args: argparse.Namespace, temperature: float) -> dict[str, list[Round]]:
    """:func:`recorded`, or what was recorded before."""
    file = None if args.rounds is None else args.rounds.with_suffix(f".{temperature:g}.json")
    if file is not None and file.exists():
        stored = json.loads(file.read_text())
        return {
            kind: [Round([tuple(row) for row in row_["signals"]], row_["accepted"], row_["depth"]) for row_ in rows]
            for kind, rows in stored.items()
        }
    found = recorded(args, temperature)
    if file is not None:
        file.write_text(json.dumps({kind: [vars(row_) for row_ in rounds] for kind, rounds in found.items()}))
    return found


def main() -> None:
    """Areas and speeds; with ``--json`` all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default="model", help="a spec, without its length")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--costs", nargs="+", default=["0.05:0.01", "0.1:0.05", "0.25:0.01", "0.25:0.1", "0.4:0.1"])
    parser.add_argument("--batch", type=int, default=8, help="requests of the third comparison")
    parser.add_argument("--rounds", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(environment(), args.drafter)
    rows = list[dict[str, Any]]()
    for temperature in args.temperatures:
        for kind, rounds in kept_rounds(args, temperature).items():
            depth = rounds[0].depth
            figures = ", ".join(f"{name} {value:.3f}" for name, value in areas(rounds).items())
            print(f"T={temperature:g} {kind}: {len(rounds)} rounds of {depth}; areas {figures}", flush=True)
            for pair in args.costs:
                step, row = map(float, pair.split(":"))
                costs = Costs(step, lambda n, row=row: 1.0 + row * (n - 1))  # type: ignore[misc]
                found = compared(rounds, costs, depth) | in_batches(rounds, costs, depth, args.batch)
                rows.append({"temperature": temperature, "kind": kind, "costs": pair, **areas(rounds), **found})
                print(f"  c {step:g}, row {row:g}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
