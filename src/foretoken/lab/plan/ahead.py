"""Gain from drafting the likely outcomes of a round during its verification.

Speculative speculative decoding (Saguaro), https://arxiv.org/abs/2603.03251.  An outcome (a, y) is the number a of
accepted draft tokens out of k and the token y after them.  While the target scores the drafts, the drafter guesses
``fanout`` tokens y for every a and drafts k tokens after each, all outcomes in calls of (k + 1) fanout rows.  If the
outcome is among them, the next draft is ready when the round ends; otherwise it is made as usual.

Words and units are those of :mod:`foretoken.lab.plan.speedup`.  The *contention factor* s is the slowdown of each of
two concurrent calls: 1 on separate devices, 2 if they share every limiting resource.  Above 2, concurrent calls are
slower than consecutive ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.lab.plan import speedup as theory
from foretoken.lab.plan.assumptions import Assumptions
from foretoken.lab.plan.speedup import SUM_TOLERANCE, Acceptance, trial_acceptance


@dataclass(frozen=True)
class AheadRow:
    """Drafts of k tokens, one request, all times in plain rounds.

    Attributes:
        rows: outcomes drafted for, the rows of a draft call.
        hits: probability that a round's outcome is among them.
        work: cost of drafting them alone.
        speedup: over plain decoding, drafting ahead.
        without: over plain decoding, drafting between rounds.
        contention: largest contention factor at which drafting ahead is no slower; ``None``: slower even at 1.
    """

    k: int
    rows: int
    hits: float
    work: float
    speedup: float
    without: float
    contention: float | None

    @property
    def pays(self) -> bool:
        """Whether it is faster than drafting between rounds."""
        return self.speedup > self.without

    def public(self) -> dict[str, Any]:
        """Fields of the ``--json`` output.  A contention factor without a limit is the text ``Infinity``, which JSON
        lacks as a number; ``null`` is ``None``."""
        unlimited = {"contention": "Infinity"} if self.contention == math.inf else {}
        return {**asdict(self), **unlimited, "pays": self.pays}


def hit_probability(acceptance: Acceptance, k: int, positions: Sequence[float], fanout: int) -> float:
    """Probability that the outcome of a round was drafted for.

    After a rejection (a < k) the next token is one of the drafter's lower-ranked candidates, by ``positions``; after k
    accepted draft tokens it is any token.

    Args:
        positions: probability that the target's token is the drafter's first, second, ... candidate.
        fanout: number of guessed tokens for every a.
    """
    _check_fanout(fanout)
    for probability in positions:
        theory.check_alpha(probability, "a probability of --positions")
    if math.fsum(positions) > 1.0 + SUM_TOLERANCE:
        raise ValueError(
            f"the probabilities of candidates sum to {math.fsum(positions):g} > 1: they exclude each other"
        )
    if len(positions) <= fanout:
        raise ValueError(
            f"{fanout} guesses besides a rejected token need the probabilities of {fanout + 1} "
            f"candidates, not {len(positions)}"
        )
    reached = theory.reached(acceptance, k)
    first = min(positions[0], 1.0)
    others = math.fsum(positions[1 : fanout + 1]) / (1.0 - first) if first < 1.0 else 1.0
    whole = reached[-1] if reached else 1.0
    return (1.0 - whole) * min(others, 1.0) + whole * min(math.fsum(positions[:fanout]), 1.0)


def ahead_row(
    assumptions: Assumptions, k: int, fanout: int, contention: float, positions: Sequence[float] | None = None
) -> AheadRow:
    """Estimate for drafting ahead with drafts of k tokens of one request.

    The target's call takes v + (s - 1) min(w, v), with w the concurrent work.  The round then waits for the rest of
    that work, max(w - v, 0), and drafts as usual if the outcome was not guessed.

    Args:
        assumptions: acceptance and costs; a draft call of n rows costs c v(n) / v(1), in proportion to the target's.
        fanout: number of guessed tokens for every number of accepted draft tokens.
        contention: s.
        positions: probabilities of candidates; defaults to fresh trials at the rate of the first position, an upper
            estimate.
    """
    _check_fanout(fanout)
    if k < 1:
        raise ValueError(f"drafting ahead needs drafts of k >= 1 tokens, not {k}")
    if not (math.isfinite(contention) and contention >= 1.0):
        raise ValueError(f"a contention factor must be a number >= 1 (1: nothing is shared), not {contention:g}")
    if positions is None:
        positions = trial_acceptance(theory.reached(assumptions.acceptance, 1)[0], fanout + 1)
    hits = hit_probability(assumptions.acceptance, k, positions, fanout)
    rows, plain = (k + 1) * fanout, assumptions.v(1)
    call = assumptions.v(assumptions.nodes(k)) / plain
    step, fixed = assumptions.c / plain, assumptions.overhead / plain
    work = step * (assumptions.v(k + 1) + k * assumptions.v(rows)) / plain
    beside, waits = min(work, call), max(work - call, 0.0)
    rest = waits + (1.0 - hits) * k * step + fixed
    spare = hits * k * step - waits
    most = (1.0 + spare / beside if beside > 0 else math.inf) if spare >= 0 else None
    tokens = assumptions.tokens(k)
    speedup = tokens / (call + (contention - 1.0) * beside + rest)
    without = tokens / (call + k * step + fixed)
    return AheadRow(k, rows, hits, work, speedup, without, most)


def ahead_summary(rows: Sequence[AheadRow], contention: float) -> str:
    """One or two sentences on whether drafting ahead pays."""
    best, usual = max(rows, key=lambda row: row.speedup), max(rows, key=lambda row: row.without)
    comparison = (
        f"k={best.k} with {best.speedup:.2f}x plain decoding, where drafting between the rounds gives "
        f"{usual.without:.2f}x (k={usual.k})."
    )
    if best.speedup > max(usual.without, 1.0):
        return (
            f"Draft ahead: {comparison} It pays up to a contention factor of {_factor(best.contention)} at k={best.k}."
        )
    most = max(rows, key=lambda row: -1.0 if row.contention is None else row.contention)
    where = (
        "no contention factor would make it pay"
        if most.contention is None
        else f"it would be no slower up to a contention factor of {_factor(most.contention)} (k={most.k})"
    )
    return f"Do not draft ahead at a contention factor of {contention:g}: {comparison} At these costs {where}."


def _check_fanout(fanout: int) -> None:
    if fanout < 1:
        raise ValueError(f"drafting ahead needs at least one guess for every outcome, not {fanout}")


def _factor(value: float | None) -> str:
    return "any size" if value is None or math.isinf(value) else f"{value:.2f}"
