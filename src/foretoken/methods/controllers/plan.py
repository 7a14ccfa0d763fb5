"""Plans: who drafts in a round, in which order and how much, and what a batch gains per second by it (its goodput).

A plan is an order of drafts, each for where those before it have no guess.  How much of the *text* has guesses of a
drafter (n-grams: where something repeats) does not depend on what is drafted there:

    rounds per token  R = sum over drafts of (share of the text) / (tokens of such a round)
    goodput             = B / (R T)         T: seconds of a round of the batch, with all drafts that any request needs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core import Budget, Limits
from foretoken.methods.controllers.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter (its index) that is asked for ``depth`` tokens.

    Attributes:
        tokens: of a round in which it has a guess, the target's own included.
        nodes: that the target scores for one request then.
        seconds: of drafting for the batch.
        hoped: upper confidence bound of the tokens, by which drafts are chosen.
        share: of the text, for how much it has a guess.
        evidence: drafts that this rests on.
    """

    member: int
    depth: int
    tokens: float
    nodes: float
    seconds: float
    hoped: float
    share: float = 1.0
    evidence: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round does: drafts in the order in which they are asked (none: plain decoding), and what it is expected to
    bring: tokens per request, their upper confidence bound, and seconds of the batch."""

    drafts: tuple[Draft, ...] = ()
    tokens: float = 1.0
    hoped: float = 1.0
    seconds: float = 1.0

    @property
    def goodput(self) -> float:
        """Tokens per second and request, if drafts are as good as they may be."""
        return self.hoped / self.seconds

    def budget(self, members: Sequence[Limits], grouped: bool) -> Budget:
        """As a drafter understands it; one that is no group is not told a ``member``."""
        budget: Budget | None = None
        for draft in reversed(self.drafts):
            nodes = max(members[draft.member].max_nodes, draft.depth)
            budget = Budget(draft.depth, nodes, member=draft.member if grouped else None, otherwise=budget)
        return budget or Budget(0, 0)

    def described(self, members: Sequence[Limits], plain_s: float) -> str:
        """What a round of it costs and brings, for people."""
        lengths = [f"{d.depth} draft{'s' if d.depth > 1 else ''} of {members[d.member].name}" for d in self.drafts]
        who = ", else ".join(lengths) or "no drafts"
        return f"a round with {who} costs {self.seconds / plain_s:.2f} plain rounds and brings {self.tokens:.2f} tokens"


def planned(drafts: Sequence[Draft], batch: int, costs: CostModel, pads: bool = False) -> RoundPlan:
    """The plan of some drafts in this order, with plain decoding where none has a guess, for ``batch`` requests.

    ``pads``: the target runs as many nodes for every request as for the one with most; not to know it costs .02 of the
    speed where it does (``benchmarks/auto_simulated.py`` with such a target).
    """
    bare, rounds, hoped = 1.0, [], []  # share of the text without a guess; rounds per token, by draft
    for draft in drafts:
        rounds.append(bare * draft.share / draft.tokens)
        hoped.append(bare * draft.share / draft.hoped)
        bare *= 1.0 - draft.share
    tokens, most = 1.0 / (sum(rounds) + bare), 1.0 / (sum(hoped) + bare)
    seconds, reached, widths = 0.0, 1.0, []
    for draft, part in zip(drafts, rounds, strict=True):
        seconds += draft.seconds * (1.0 - (1.0 - reached) ** batch)
        widths.append((draft.nodes, part * tokens))
        reached = max(reached - part * tokens, 0.0)
    widths.append((1.0, reached))
    return RoundPlan(tuple(drafts), tokens, most, seconds + _target_s(widths, batch, costs, pads))


def _target_s(widths: Sequence[tuple[float, float]], batch: int, costs: CostModel, pads: bool) -> float:
    """Seconds of a round without its drafting, whose requests have so many nodes in such parts of the rounds; the last
    part has no guess.

    Rounds in which nobody has a guess are apart: the first node beyond the roots may cost more than all others.
    """
    if not pads:
        bare, plain_s = widths[-1][1] ** batch, costs.round_s(batch, batch)
        if bare >= 1.0:
            return plain_s
        nodes = batch * (sum(nodes * part for nodes, part in widths) - bare) / (1.0 - bare)
        return bare * plain_s + (1.0 - bare) * costs.round_s(batch, nodes)
    seconds, none_wider = 0.0, 1.0
    for nodes, part in sorted(widths, reverse=True):
        fewer = max(none_wider - part, 0.0)
        seconds += (none_wider**batch - fewer**batch) * costs.round_s(batch, batch * nodes)
        none_wider = fewer
    return seconds


def best_plan(
    drafts: Sequence[Draft], batch: int, costs: CostModel, pads: bool = False
) -> tuple[RoundPlan, RoundPlan | None]:
    """The plan with the highest goodput, and the best one that drafts: each member at the length that is best for it,
    asked in the order of their rates down to any place, or alone."""
    ranked = best_drafts(drafts, batch, costs)
    orders = [ranked[:place] for place in range(1, len(ranked) + 1)] + [[draft] for draft in ranked[1:]]
    plain = planned((), batch, costs)
    rival = max((planned(order, batch, costs, pads) for order in orders), key=lambda plan: plan.goodput, default=None)
    return (plain if rival is None or plain.goodput >= rival.goodput else rival), rival


def best_drafts(drafts: Sequence[Draft], batch: int, costs: CostModel) -> list[Draft]:
    """Each member at the length that is best for it, the member with the highest rate first."""
    best: dict[int, tuple[float, Draft]] = {}
    for draft in drafts:
        rate = draft.hoped / (draft.seconds + costs.round_s(batch, batch * draft.nodes))
        if draft.member not in best or rate > best[draft.member][0]:
            best[draft.member] = rate, draft
    return [draft for _, draft in sorted(best.values(), key=lambda pair: -pair[0])]
