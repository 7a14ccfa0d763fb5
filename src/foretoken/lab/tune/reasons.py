"""Why a drafter does not pay, in plain words."""

from __future__ import annotations

from dataclasses import replace

from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.lab.tune.candidates import Candidate

RARE = 0.5
"""Share of the rounds below which guesses count as rare."""
LITTLE = 1.25
"""Tokens a round below which there is little to gain, however cheap drafting and scoring are."""


def without_faults(candidate: Candidate, target: TargetCost, rest_s: float) -> tuple[float, float]:
    """The predicted speed-up if drafting were free, and if scoring more nodes were."""
    free = replace(candidate.cost, call_s=0.0, step_s=0.0)
    one = target.of(1)
    flat = TargetCost({1: one, 2: one})
    return (
        RoundCosts(target, {"": free}, rest_s).speedup("", candidate.depth),
        RoundCosts(flat, {"": candidate.cost}, rest_s).speedup("", candidate.depth),
    )


def why_not(candidate: Candidate, target: TargetCost, rest_s: float) -> str:
    """One clause that names what a losing drafter suffers from most.

    Where rounds hardly give more than one token that is acceptance; else what would help more: free drafting, or nodes
    that cost nothing.
    """
    cost, depth = candidate.cost, candidate.depth
    first = cost.survival[0] if cost.survival else 0.0
    if cost.expected_tokens(len(cost.survival)) < LITTLE:
        if cost.proposes < RARE:
            return f"rarely guesses: in {cost.proposes:.0%} of the rounds, and in {first:.0%} something is accepted"
        return f"rarely accepted: the first guess stands in {first:.0%} of the rounds"
    free, flat = without_faults(candidate, target, rest_s)
    if free >= flat:
        return f"too expensive: drafting {depth} deep takes {cost.seconds(depth) / target.of(1):.2f} target calls"
    nodes = 1 + round(cost.nodes_per_depth * depth * cost.proposes)
    return f"target calls grow with the draft: {nodes} nodes cost {target.relative(nodes):.2f} times one"
