"""What a draft's margin tells of its acceptance, and what a stop by it would earn.

Chains of ``--depth`` tokens are drafted and verified, and at every position three signals are kept: the margin between
the best token's log-probability and the second's, the largest probability, and the entropy.  First: the area under the
curve of each, over all positions that were reached.  Second: time per token when such drafts are cut by (1) the
best fixed length, (2) the online margin estimator, which weighs what one more token is worth against what it costs, (3)
the best fixed bar on the largest probability, and (4) an oracle that knows what is accepted.  Seconds are those of v(n)
and of a draft step, measured here; a cut changes neither what is drafted before it nor what is accepted.

    python benchmarks/margin.py [--target builtin] [--drafter model] [--depth 8] [--new-tokens 128] [--json FILE]
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
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE
from torch import Tensor

from foretoken.controllers.base import Controller
from foretoken.controllers.margin import MarginEstimator, margin_of
from foretoken.controllers.stopping import entropy
from foretoken.core import Budget, Context, Limits, StepRecord
from foretoken.llm import assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.models.call_costs import quick_costs

SIGNALS = ("margin", "largest probability", "entropy")


@dataclass
class Round:
    """Signals by position, and how many tokens were accepted."""

    signals: list[tuple[float, float, float]] = field(default_factory=list)
    accepted: int = 0
    draft_s: float = 0.0
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
        seen = self._now[context.request_id] = Round()

        def look(distribution: Tensor | None, probability: float) -> bool:
            if distribution is not None:
                signals = margin_of(distribution), float(distribution.max()), entropy(distribution, probability)
                seen.signals.append(signals)
            return False

        return Budget(self.depth, 64, stop=look)

    def observe(self, context: Context, record: StepRecord) -> None:
        """Keep whole chains only: the last round of an answer is cut by its end."""
        seen = self._now.pop(context.request_id)
        if len(seen.signals) == record.num_draft_tokens == self.depth:
            seen.accepted, seen.draft_s, seen.depth = record.num_accepted_tokens, record.draft_s, record.depth
            self.rounds.append(seen)


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
    rows = [(one.signals[i], i < one.accepted) for one in rounds for i in range(min(one.accepted + 1, one.depth))]
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
    tokens = sum(1 + min(one.accepted, length) for one, length in zip(rounds, lengths, strict=True))
    return tokens / sum(costs.round_s(length) for length in lengths)


def margin_lengths(rounds: Sequence[Round], costs: Costs, depth: int) -> list[int]:
    """The online rule: one more token is drafted while it is expected to bring more than it costs at today's rate."""
    estimator, lengths = MarginEstimator(), list[int]()
    tokens = seconds = 0.0
    for one in rounds:
        rate = tokens / seconds if seconds else 1.0 / costs.round_s(0)
        chances, survival, length = list[float](), 1.0, 0
        while length < depth:
            expected = survival * estimator.curve(length).mean
            more_s = costs.round_s(length + 1) - costs.round_s(length)
            if estimator.is_warm and expected < rate * more_s:
                break
            chances.append(estimator.chance(length, one.signals[length][0]))
            survival *= chances[-1]
            length += 1
        lengths.append(length)
        accepted = min(one.accepted, length)
        estimator.observe([row[0] for row in one.signals[:length]], chances, accepted)
        tokens = 0.99 * tokens + 1 + accepted
        seconds = 0.99 * seconds + costs.round_s(length)
    return lengths


def bar_lengths(rounds: Sequence[Round], bar: float, depth: int) -> list[int]:
    """A draft ends behind the first token whose distribution has no probability above the bar."""
    return [next((i + 1 for i in range(depth) if one.signals[i][1] < bar), depth) for one in rounds]


def compared(rounds: Sequence[Round], costs: Costs, depth: int) -> dict[str, float]:
    """Speed of every policy over plain decoding."""
    plain = 1.0 / costs.round_s(0)
    fixed = {k: speed(rounds, [k] * len(rounds), costs) for k in range(depth + 1)}
    bars = [speed(rounds, bar_lengths(rounds, bar / 20, depth), costs) for bar in range(20)]
    chosen = margin_lengths(rounds, costs, depth)
    known = [max(range(one.accepted + 1), key=lambda n, o=one: (1 + n) - fixed_rate(fixed) * costs.round_s(n))  # type: ignore[misc]
             for one in rounds]  # fmt: skip
    best = max(fixed, key=fixed.__getitem__)
    return {
        "best length": best,
        "fixed": fixed[best] / plain,
        "margin": speed(rounds, chosen, costs) / plain,
        "margin, length": sum(chosen) / len(chosen),
        "largest probability": max(bars) / plain,
        "oracle": speed(rounds, known, costs) / plain,
    }


def fixed_rate(fixed: dict[int, float]) -> float:
    """Tokens per second of the best fixed length."""
    return max(fixed.values())


def main() -> None:
    """Two tables; with ``--json`` all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default="model", help="a spec, without its length")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target, tokenizer = load_model(args.target, dtype=args.dtype), load_tokenizer(args.target)
    length = {"model": f"k={args.depth}"}.get(args.drafter.partition(":")[0].partition(",")[0])
    chain = length or f"depth={args.depth},nodes={args.depth},width=1"
    drafter = build_drafter(f"{args.drafter},{chain}", target, target_source=args.target, tokenizer=tokenizer)
    curve, rows = quick_costs(target), list[dict[str, Any]]()
    texts = {"code": (*CODE, *MORE_CODE), "prose": (*PROSE, *MORE_PROSE)}
    print(environment())
    for temperature in args.temperatures:
        watching = Watching(args.depth)
        llm = assemble(target, drafter, "auto", watching, tokenizer)
        for kind, prompts in texts.items():
            watching.rounds = []
            for seed, prompt in enumerate(prompts[: args.prompts]):
                llm.generate(
                    prompt, max_new_tokens=args.new_tokens, temperature=temperature, seed=seed, ignore_eos=True
                )
            rounds = watching.rounds
            step_s = sorted(one.draft_s / one.depth for one in rounds)[len(rounds) // 2]
            found = {"temperature": temperature, "kind": kind, "rounds": len(rounds), **areas(rounds)}
            found |= {"c": step_s / curve.of(1), **compared(rounds, Costs(step_s, curve.of), watching.depth)}
            rows.append(found)
            shown = [
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
            ]
            print("; ".join(shown), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
