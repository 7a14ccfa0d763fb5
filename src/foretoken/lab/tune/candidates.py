"""What a drafter's rounds say: what it costs, how far it is believed, the length that is best for it, and why it does
not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.lab.tune.race import RaceRound, Standing

NEAR = 0.995
"""Share of the best predicted speed at which a length counts as the best."""


@dataclass(frozen=True)
class Scouted:
    """A drafter that ran a short race against plain decoding, with its whole budget.

    Attributes:
        depth: the longest draft that it was asked for.
        trees: whether its drafts branch, so that a shorter draft is another tree and no piece of the longer one.
        copies: whether it copies from text instead of running a network.
    """

    spec: str
    depth: int
    trees: bool
    copies: bool
    standing: Standing

    @property
    def cost(self) -> DrafterCost:
        """What it costs and promises."""
        return cost_of(self.standing.rounds, self.depth, self.copies)

    def cost_at(self, depth: int) -> DrafterCost:
        """The same for drafts of at most so many levels, of which a drafter that ends its own drafts runs fewer."""
        cost = self.cost
        depths = [round_.depth for round_ in _roomy(self.standing.rounds, self.depth) if round_.depth > 0]
        if not depths:
            return cost
        levels = fmean(min(drafted, depth) for drafted in depths) / depth
        per_level = cost.nodes_per_depth * self.depth / fmean(depths)
        return replace(cost, step_s=cost.step_s * levels, nodes_per_depth=per_level * levels)


@dataclass(frozen=True)
class Candidate:
    """One configuration: a drafter's spec, and the length of its drafts.

    Attributes:
        predicted: tokens per second over plain decoding's.
        cost: the drafter's cost that the prediction is made of.
    """

    drafter: str
    depth: int
    predicted: float
    cost: DrafterCost

    @property
    def controller(self) -> str:
        """A controller that asks for just this."""
        return f"constant,k={self.depth}"


def cost_of(rounds: Sequence[RaceRound], depth: int, copies: bool) -> DrafterCost:
    """What drafts of ``depth`` cost and promise, from the rounds that had room for them.

    A drafter with a network costs a step per level; one that copies text looks up once, whatever the length.
    """
    roomy = _roomy(rounds, depth)
    drafting = [round_ for round_ in roomy if round_.depth > 0]
    survival = survival_of([(rounds, depth)])
    if not drafting:
        return DrafterCost(0.0, 0.0, survival, 0.0, 1.0)
    proposes = len(drafting) / len(roomy)  # costs are those of a round, with a guess or without
    call_s = proposes * median(round_.draft_s for round_ in drafting) if copies else 0.0
    step_s = 0.0 if copies else proposes * median(round_.draft_s / round_.depth for round_ in drafting)
    per_depth = fmean(round_.nodes - 1 for round_ in drafting) / depth
    return DrafterCost(call_s, step_s, survival, proposes, per_depth)


def survival_of(trials: Sequence[tuple[Sequence[RaceRound], int]]) -> list[float]:
    """Per depth (1 first) the chance that a draft is accepted at least so far, from trials (rounds and the length of
    their drafts) of several lengths: a round counts up to its own length."""
    survival, chance = [], 1.0
    for depth in range(1, max(length for _, length in trials) + 1):
        reached = [
            round_.accepted >= depth
            for rounds, length in trials
            if length >= depth
            for round_ in _roomy(rounds, length)
            if round_.accepted >= depth - 1
        ]
        chance *= sum(reached) / max(len(reached), 1)
        survival.append(chance)
    return survival


def best_candidate(tried: Scouted, target: TargetCost, rest_s: float) -> Candidate:
    """The draft length with the best goodput, by the cost model; the speed that was measured sets the scale.

    A chain's shorter drafts are pieces of its longest one, so that every length can be judged.  A tree with less depth
    is another tree: of it only what was measured is known.
    """

    def modelled(depth: int) -> float:
        return RoundCosts(target, {tried.spec: tried.cost_at(depth)}, rest_s).speedup(tried.spec, depth)

    scale = tried.standing.speedup / modelled(tried.depth)
    depths = [tried.depth] if tried.trees else range(1, tried.depth + 1)
    predicted = {depth: scale * modelled(depth) for depth in depths}
    # The longest of those that are as good as the best: noise must not cut drafts that cost nothing.
    best = max(depth for depth in depths if predicted[depth] >= NEAR * max(predicted.values()))
    return Candidate(tried.spec, best, predicted[best], tried.cost_at(best))


def without_faults(candidate: Candidate, target: TargetCost, rest_s: float) -> tuple[float, float]:
    """The predicted speed-up if drafting were free, and if scoring more nodes were."""
    free = replace(candidate.cost, call_s=0.0, step_s=0.0)
    call_s = target.of(1)
    flat = TargetCost({1: call_s, 2: call_s})
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
    # Tokens a round below which there is little to gain, however cheap drafting and scoring are
    if cost.expected_tokens(len(cost.survival)) < 1.25:
        # Share of the rounds below which guesses count as rare
        if cost.proposes < 0.5:
            return f"rarely guesses: in {cost.proposes:.0%} of the rounds, and in {first:.0%} something is accepted"
        return f"rarely accepted: the first guess stands in {first:.0%} of the rounds"
    free, flat = without_faults(candidate, target, rest_s)
    if free >= flat:
        return f"too expensive: drafting {depth} deep takes {cost.seconds(depth) / target.of(1):.2f} target calls"
    nodes = 1 + round(cost.nodes_per_depth * depth * cost.proposes)
    return f"target calls grow with the draft: {nodes} nodes cost {target.relative(nodes):.2f} times one"


def _roomy(rounds: Sequence[RaceRound], depth: int) -> list[RaceRound]:
    """The rounds in which the answer had room for a whole draft; all, where there are none."""
    return [round_ for round_ in rounds if round_.room > depth] or list(rounds)
