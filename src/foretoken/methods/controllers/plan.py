"""Plans of a round: the drafters, their order and draft lengths, and the batch's tokens per second (its goodput).

A plan is an order of drafts, each for requests without a proposal from those before it. The share of the *text* for
which a drafter proposes (n-grams: where something repeats) does not depend on the drafts:

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
    """A drafter (by index) with a draft of ``depth`` tokens.

    Attributes:
        tokens: tokens of a round with its proposal, the target's own included.
        nodes: nodes that the target then scores for one request.
        seconds: drafting time for the batch.
        hoped: upper confidence bound of the tokens, by which drafts are chosen.
        share: share of the text for which it proposes.
        evidence: number of drafts that these estimates rest on.
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
    """A round's drafts in the order in which they are tried (none: plain decoding), with its expected tokens per
    request, their upper confidence bound, and the batch's seconds."""

    drafts: tuple[Draft, ...] = ()
    tokens: float = 1.0
    hoped: float = 1.0
    seconds: float = 1.0

    @property
    def goodput(self) -> float:
        """Tokens per second and request, by the upper confidence bound."""
        return self.hoped / self.seconds

    def budget(self, members: Sequence[Limits], grouped: bool) -> Budget:
        """The plan as a drafter's budget, without ``member`` for a single drafter."""
        budget: Budget | None = None
        for draft in reversed(self.drafts):
            nodes = max(members[draft.member].max_nodes, draft.depth)
            budget = Budget(draft.depth, nodes, member=draft.member if grouped else None, otherwise=budget)
        return budget or Budget(0, 0)

    def described(self, members: Sequence[Limits], plain_s: float) -> str:
        """Cost and gain of a round of the plan, for people."""
        lengths = [f"{d.depth} draft{'s' if d.depth > 1 else ''} of {members[d.member].name}" for d in self.drafts]
        who = ", else ".join(lengths) or "no drafts"
        return f"a round with {who} costs {self.seconds / plain_s:.2f} plain rounds and brings {self.tokens:.2f} tokens"


def planned(drafts: Sequence[Draft], batch: int, costs: CostModel, pads: bool = False) -> RoundPlan:
    """The plan of drafts in this order, with plain decoding where none proposes, for ``batch`` requests.

    ``pads``: the target runs as many nodes for every request as for the widest. Ignoring this where it does costs .02
    of the speed (``benchmarks/auto_simulated.py`` with such a target).
    """
    bare, rounds, hoped = 1.0, [], []  # share of the text without a proposal; rounds per token, by draft
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
    """Seconds of a round without its drafting. ``widths`` are pairs of a number of nodes and its share of the requests'
    rounds; the last has no proposal.

    Rounds without any proposal are separate, because the first node beyond the roots may cost more than all others.
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
    """The plan with the highest goodput, and the best one with drafts. Each member drafts at its best length; the
    candidates are every prefix of the members by rate, and each member alone."""
    ranked = best_drafts(drafts, batch, costs)
    orders = [ranked[:count] for count in range(1, len(ranked) + 1)] + [[draft] for draft in ranked[1:]]
    plain = planned((), batch, costs)
    rival = max((planned(order, batch, costs, pads) for order in orders), key=lambda plan: plan.goodput, default=None)
    return (plain if rival is None or plain.goodput >= rival.goodput else rival), rival


def best_drafts(drafts: Sequence[Draft], batch: int, costs: CostModel) -> list[Draft]:
    """Each member at its best length, the member with the highest rate first."""
    best: dict[int, tuple[float, Draft]] = {}
    for draft in drafts:
        rate = draft.hoped / (draft.seconds + costs.round_s(batch, batch * draft.nodes))
        if draft.member not in best or rate > best[draft.member][0]:
            best[draft.member] = rate, draft
    return [draft for _, draft in sorted(best.values(), key=lambda pair: -pair[0])]
