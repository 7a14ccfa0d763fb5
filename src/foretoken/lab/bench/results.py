"""Results of a benchmark: one arm on one batch of prompts, and the cells computed from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from math import atan, cos, pi, sin, sqrt
from typing import Any

import numpy as np

from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.core.io.finite import finite
from foretoken.lab.bench.costs import DraftRound, draft_seconds, drafter_cost, predicted_speedup
from foretoken.lab.bench.specs import PLAIN

OVERALL = "overall"

Condition = tuple[float, int]
"""Temperature and batch size."""
Key = tuple[str, float, int, str, int]
"""Arm, temperature, batch size, category, unit."""


@dataclass
class UnitResult:
    """One arm on one unit, a batch of prompts at a setting; seconds count every round of the batch once.

    Attributes:
        unit: its index within the category.
        prompts, outputs: indices of its prompts within the category, and their answers, without fillers of the batch.
        seconds: total decoding time, without the prefill.
        decoded: number of tokens decoded in that time, those of fillers included.
        prefill_s: seconds of prefill, of fillers included.
        mean_acceptance_length: as reported by another engine; ``None`` for our own arms, which have counts.
        drafts, drafted, accepted, per_pos: rounds, draft tokens, accepted ones, and those by depth; ``None`` as above.
        draft_s, target_s, verify_s: parts of the seconds; ``None`` as above.
        rounds: per round [nodes, depth, draft seconds].
        trace: rounds of the first request, if traced.
        seeds: per prompt, if seed and prompt alone determine a sampled output; ``None`` for greedy outputs, other
            engines, and verifiers that draw their own random numbers.
    """

    arm: str
    temperature: float
    batch: int
    category: str
    unit: int
    prompts: list[int]
    outputs: list[list[int]]
    seconds: float
    decoded: int
    prefill_s: float
    mean_acceptance_length: float | None = None
    drafts: int | None = None
    drafted: int = 0
    accepted: int = 0
    per_pos: list[int] = field(default_factory=list)
    draft_s: float | None = None
    target_s: float | None = None
    verify_s: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    trace: list[dict[str, Any]] | None = None
    seeds: list[int] | None = None

    @property
    def fixed(self) -> bool:
        """Whether the outputs must equal plain decoding's."""
        return self.temperature == 0 or self.seeds is not None

    @property
    def key(self) -> Key:
        return (self.arm, self.temperature, self.batch, self.category, self.unit)

    @property
    def setting(self) -> Condition:
        return (self.temperature, self.batch)

    @property
    def draft_rounds(self) -> list[DraftRound]:
        """The rounds as input of the cost model."""
        return [DraftRound(int(nodes), int(depth), seconds) for nodes, depth, seconds in self.rounds]


def dumps(value: Any) -> str:
    """One line of JSON: NaN and infinity become null, and all characters are ASCII, so that no text breaks a line."""
    return json.dumps(finite(value), allow_nan=False)


def rate(results: Iterable[UnitResult]) -> float:
    """Tokens per second over several results."""
    units = list(results)
    seconds = sum(r.seconds for r in units)
    return sum(r.decoded for r in units) / seconds if seconds > 0 else 0.0


def speedup_ci95(arm: Sequence[UnitResult], plain: Sequence[UnitResult]) -> list[float]:
    """95 % interval of the ratio of rates: Student's t with the spread of the linearised ratio over units.

    The contribution of unit i to the ratio R of sums, relative to R, is to first order z_i = n (a_i/A - s_i/S - p_i/P +
    q_i/Q): its share of the arm's tokens A and seconds S, and of plain decoding's P and Q.  These add up to 0, and the
    interval is R (1 -+ t sqrt(sum z^2 / (n (n - 1)))) with n - 1 degrees of freedom; a negative end is 0.

    A single unit has no spread: both ends are its ratio, and :func:`interval` shows a dash.
    """
    table = np.array(
        [[a.decoded, a.seconds, p.decoded, p.seconds] for a, p in zip(arm, plain, strict=True)], dtype=float
    )
    sums, count = table.sum(0), len(table)
    if not sums.all():
        return [0.0, 0.0]
    ratio = float((sums[0] / sums[1]) / (sums[2] / sums[3]))
    if count == 1:
        return [ratio, ratio]
    parts = count * (table / sums) @ np.array([1, -1, -1, 1])
    error = sqrt(float((parts**2).sum()) / (count * (count - 1)))
    return [ratio * max(0.0, 1 - t95(count - 1) * error), ratio * (1 + t95(count - 1) * error)]


@lru_cache
def t95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t with ``freedom`` degrees of freedom."""
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _within(middle, freedom) >= 0.95 else (middle, high)
    return high


def _within(bound: float, freedom: int) -> float:
    """Probability that |t| is below a bound, by the finite sums in powers of cos(atan(t / sqrt(freedom)))."""
    angle = atan(bound / sqrt(freedom))
    odd = freedom % 2
    term, total = (cos(angle) if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cos(angle) ** 2 * power / (power + 1)
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


def interval(cell: Mapping[str, Any]) -> str:
    """The 95 % interval of a cell as text."""
    low, high = cell["speedup_ci95"]
    return "-" if low == high else f"{low:.2f}-{high:.2f}"


def acceptance_length(results: Sequence[UnitResult]) -> float | None:
    """Tokens per round of a request, including the target's own."""
    counted = [r for r in results if r.drafts]
    if counted:
        return 1.0 + sum(r.accepted for r in counted) / sum(r.drafts or 0 for r in counted)
    lengths = [(r.mean_acceptance_length, r.decoded) for r in results if r.mean_acceptance_length]
    rounds = sum(decoded / length for length, decoded in lengths)
    return sum(decoded for _, decoded in lengths) / rounds if rounds else None


def comparable(arm: Sequence[UnitResult], plain: Sequence[UnitResult]) -> bool:
    """Whether an arm's outputs must equal plain decoding's token by token: greedy, or coupled by seeds."""
    return all(a.fixed and p.fixed and a.seeds == p.seeds for a, p in zip(arm, plain, strict=True))


def cell(
    arm: Sequence[UnitResult], plain: Sequence[UnitResult], category: str, predicted: float | None
) -> dict[str, Any]:
    """Public fields of one arm in one category at one setting; both sequences hold the same units in order."""
    first = arm[0]
    spent = sum(r.seconds for r in arm)
    has_counts = all(r.draft_s is not None for r in arm)
    draft_s, target_s = (sum(getattr(r, name) or 0.0 for r in arm) for name in ("draft_s", "target_s"))
    drafted, base = sum(r.drafted for r in arm), rate(plain)
    same = all(a.outputs == p.outputs for a, p in zip(arm, plain, strict=True)) if comparable(arm, plain) else None
    return {
        "arm": first.arm,
        "category": category,
        "temperature": first.temperature,
        "batch": first.batch,
        "prompts": sum(len(r.prompts) for r in arm),
        "new_tokens": sum(len(output) for r in arm for output in r.outputs),
        "tokens_per_s": rate(arm),
        "speedup": rate(arm) / base if base else 0.0,
        "speedup_ci95": speedup_ci95(arm, plain),
        "mean_acceptance_length": acceptance_length(arm),
        "acceptance_rate": (sum(r.accepted for r in arm) / drafted if drafted else 0.0) if has_counts else None,
        "identical": same,
        "draft_s": draft_s if has_counts else None,
        "target_s": target_s if has_counts else None,
        "overhead_s": max(0.0, spent - draft_s - target_s) if has_counts else None,
        "predicted_speedup": predicted,
    }


def drafted(results: Sequence[UnitResult]) -> dict[str, Any]:
    """Keys of a cell and its number of draft tokens; ``None`` if an engine does not report them."""
    first = results[0]
    is_counted = all(r.drafts is not None for r in results)
    return {
        "arm": first.arm,
        "category": first.category,
        "temperature": first.temperature,
        "batch": first.batch,
        "drafted": sum(r.drafted for r in results) if is_counted else None,
    }


def rest_s(plain: Sequence[UnitResult]) -> float:
    """Seconds of a plain round outside the target call."""
    rounds = sum(len(r.rounds) for r in plain)
    spent = sum(r.seconds - (r.draft_s or 0.0) - (r.target_s or 0.0) for r in plain)
    return max(0.0, spent / rounds) if rounds else 0.0


def anchored(target: TargetCost, plain: Sequence[UnitResult]) -> TargetCost:
    """The measured cost curve, scaled to match the plain rounds of the run.

    v(n) is measured separately; during the run the machine may be busier or the contexts longer.
    """
    rounds = [one_round for r in plain for one_round in r.rounds]
    calls_s = sum(r.target_s or 0.0 for r in plain)
    if not rounds or calls_s <= 0:
        return target
    mean_nodes = round(sum(one_round[0] for one_round in rounds) / len(rounds))
    scale = calls_s / len(rounds) / target.of(mean_nodes)
    return TargetCost({n: seconds * scale for n, seconds in target.seconds.items()})


def prediction(
    cell_results: Sequence[UnitResult], all_results: Sequence[UnitResult], target: TargetCost, rest: float
) -> float | None:
    """Speed-up of one cell by the cost model: 1 for plain decoding, ``None`` for other engines, whose rounds are
    unknown.

    Args:
        cell_results: the cell's results, for draft lengths and acceptance.
        all_results: the arm's results of every category at this setting, for the cost of drafting.
    """
    if cell_results[0].arm == PLAIN:
        return 1.0
    rounds = [draft_round for r in cell_results for draft_round in r.draft_rounds]
    if not rounds:
        return None
    cost = draft_seconds([draft_round for r in all_results for draft_round in r.draft_rounds])
    tokens = sum(r.decoded for r in cell_results)
    return predicted_speedup(target, rest, cost, rounds, tokens, cell_results[0].batch)


def arm_cost(results: Sequence[UnitResult]) -> DrafterCost | None:
    """An arm's cost and survival for the summary; ``None`` for arms without drafts and other engines."""
    rounds = [draft_round for r in results for draft_round in r.draft_rounds]
    if not any(draft_round.depth for draft_round in rounds):
        return None
    return drafter_cost(positions(results), rounds, results[0].batch)


def round_costs(results: Sequence[UnitResult], arms: Sequence[str], target: TargetCost) -> RoundCosts:
    """Measured costs of all arms at one setting."""
    costs = {arm: arm_cost([r for r in results if r.arm == arm]) for arm in arms}
    drafters = {arm: cost for arm, cost in costs.items() if cost is not None}
    plain = [r for r in results if r.arm == PLAIN]
    return RoundCosts(anchored(target, plain), drafters, rest_s(plain))


def positions(results: Sequence[UnitResult]) -> list[float]:
    """Share of rounds accepted at least up to each depth."""
    rounds = sum(r.drafts or 0 for r in results)
    counts = zip_longest(*(r.per_pos for r in results), fillvalue=0)
    return [sum(count) / rounds for count in counts] if rounds else []


def positions_at(results: Sequence[UnitResult], arms: Sequence[str], setting: Condition) -> dict[str, Any]:
    """Summary fields: :func:`positions` of every arm with rounds at one setting, and the setting."""
    shares = {arm: positions([r for r in results if r.arm == arm and r.setting == setting]) for arm in arms}
    where = {"temperature": setting[0], "batch": setting[1]}
    return {"positions": {arm: reached for arm, reached in shares.items() if reached}, "positions_at": where}


def time_split(results: Sequence[UnitResult]) -> dict[str, float] | None:
    """An arm's seconds by stage; ``None`` for other engines."""
    timed = [r for r in results if r.draft_s is not None]
    if not timed:
        return None
    parts = {name: sum(getattr(r, name) or 0.0 for r in timed) for name in ("draft_s", "target_s", "verify_s")}
    spent = sum(r.seconds for r in timed)
    return {
        **parts,
        "overhead_s": max(0.0, spent - parts["draft_s"] - parts["target_s"] - parts["verify_s"]),
        "prefill_s": sum(r.prefill_s for r in timed),
        "total_s": spent,
        "rounds": sum(len(r.rounds) for r in timed),
    }
