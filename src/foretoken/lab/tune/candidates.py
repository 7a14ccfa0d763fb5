"""Figures from a drafter's rounds: cost, acceptance, best draft length, and the reason why it does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.lab.tune.race import RaceRound, Standing


@dataclass(frozen=True)
class Scouted:
    """A drafter after a short race against plain decoding, with its full budget.

    Attributes:
        depth: the longest requested draft.
        trees: whether its drafts branch, so that a shorter draft is another tree and not a prefix of the longer one.
        copies: whether it copies text instead of running a network.
    """

    spec: str
    depth: int
    trees: bool
    copies: bool
    standing: Standing

    @property
    def cost(self) -> DrafterCost:
        """Cost and acceptance of the drafter."""
        return cost_of(self.standing.rounds, self.depth, self.copies)

    def cost_at(self, depth: int) -> DrafterCost:
        """The cost of drafts of at most ``depth`` levels; a drafter that ends drafts early runs fewer."""
        cost = self.cost
        depths = [round_.depth for round_ in _roomy(self.standing.rounds, self.depth) if round_.depth > 0]
        if not depths:
            return cost
        levels = fmean(min(drafted, depth) for drafted in depths) / depth
        per_level = cost.nodes_per_depth * self.depth / fmean(depths)
        return replace(cost, step_s=cost.step_s * levels, nodes_per_depth=per_level * levels)


@dataclass(frozen=True)
class Candidate:
    """One configuration: a drafter's spec and its draft length.

    Attributes:
        predicted: tokens per second over plain decoding's.
        cost: the drafter's cost in the prediction.
    """

    drafter: str
    depth: int
    predicted: float
    cost: DrafterCost

    @property
    def controller(self) -> str:
        """Spec of a controller with this draft length."""
        return f"constant,k={self.depth}"


def cost_of(rounds: Sequence[RaceRound], depth: int, copies: bool) -> DrafterCost:
    """Cost and acceptance of drafts of ``depth``, from the rounds with room for them.

    A drafter with a network costs a step per level.  One that copies text does one lookup, whatever the length.
    """
    roomy = _roomy(rounds, depth)
    drafting = [round_ for round_ in roomy if round_.depth > 0]
    survival = survival_of([(rounds, depth)])
    if not drafting:
        return DrafterCost(0.0, 0.0, survival, 0.0, 1.0)
    proposes = len(drafting) / len(roomy)  # costs are averages over all rounds, with or without a draft
    call_s = proposes * median(round_.draft_s for round_ in drafting) if copies else 0.0
    step_s = 0.0 if copies else proposes * median(round_.draft_s / round_.depth for round_ in drafting)
    per_depth = fmean(round_.nodes - 1 for round_ in drafting) / depth
    return DrafterCost(call_s, step_s, survival, proposes, per_depth)


def survival_of(trials: Sequence[tuple[Sequence[RaceRound], int]]) -> list[float]:
    """Probability that at least 1, 2, ... draft tokens are accepted.

    ``trials`` are pairs of rounds and draft length; a round counts up to its own length.
    """
    survival, probability = [], 1.0
    for depth in range(1, max(length for _, length in trials) + 1):
        reached = [
            round_.accepted >= depth
            for rounds, length in trials
            if length >= depth
            for round_ in _roomy(rounds, length)
            if round_.accepted >= depth - 1
        ]
        probability *= sum(reached) / max(len(reached), 1)
        survival.append(probability)
    return survival


def best_candidate(tried: Scouted, target: TargetCost, rest_s: float) -> Candidate:
    """The draft length with the best goodput by the cost model, scaled to the measured speed.

    A chain's shorter drafts are prefixes of its longest one, so that every length can be predicted.  A tree of less
    depth is another tree, so only the measured depth is known.
    """

    def modelled(depth: int) -> float:
        return RoundCosts(target, {tried.spec: tried.cost_at(depth)}, rest_s).speedup(tried.spec, depth)

    scale = tried.standing.speedup / modelled(tried.depth)
    depths = [tried.depth] if tried.trees else range(1, tried.depth + 1)
    predicted = {depth: scale * modelled(depth) for depth in depths}
    # The longest of equally good lengths: noise must not cut drafts that cost nothing.
    best = max(depth for depth in depths if predicted[depth] >= 0.995 * max(predicted.values()))
    return Candidate(tried.spec, best, predicted[best], tried.cost_at(best))


def without_faults(candidate: Candidate, target: TargetCost, rest_s: float) -> tuple[float, float]:
    """The predicted speed-up with free drafting, and with free scoring of extra nodes."""
    free = replace(candidate.cost, call_s=0.0, step_s=0.0)
    call_s = target.of(1)
    flat = TargetCost({1: call_s, 2: call_s})
    return (
        RoundCosts(target, {"": free}, rest_s).speedup("", candidate.depth),
        RoundCosts(flat, {"": candidate.cost}, rest_s).speedup("", candidate.depth),
    )


def why_not(candidate: Candidate, target: TargetCost, rest_s: float) -> str:
    """One clause on the main reason why a drafter loses.

    Acceptance, if rounds give hardly more than one token; else whichever would help more: free drafting or free nodes.
    """
    cost, depth = candidate.cost, candidate.depth
    first = cost.survival[0] if cost.survival else 0.0
    # Tokens per round below which cheaper drafting and scoring gain little
    if cost.expected_tokens(len(cost.survival)) < 1.25:
        # Share of rounds below which drafts count as rare
        if cost.proposes < 0.5:
            return f"rarely drafts: in {cost.proposes:.0%} of the rounds, and a token is accepted in {first:.0%}"
        return f"rarely accepted: the first draft token is accepted in {first:.0%} of the rounds"
    free, flat = without_faults(candidate, target, rest_s)
    if free >= flat:
        return f"too expensive: drafting {depth} deep takes {cost.seconds(depth) / target.of(1):.2f} target calls"
    nodes = 1 + round(cost.nodes_per_depth * depth * cost.proposes)
    return f"target calls grow with the draft: {nodes} nodes cost {target.relative(nodes):.2f} times one"


def _roomy(rounds: Sequence[RaceRound], depth: int) -> list[RaceRound]:
    """The rounds with room for a whole draft, or all rounds if there are none."""
    return [round_ for round_ in rounds if round_.room > depth] or list(rounds)
