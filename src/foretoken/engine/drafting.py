"""The first stages of a round: draft budgets, draft trees, and what is kept of them.

The controller sets the budget, the drafter builds the tree, and the controller may cut it. A request may name a group
member, or bring its own tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretoken.core import Budget, TokenTree
from foretoken.core.outside import is_outside
from foretoken.engine.errors import blaming
from foretoken.engine.request import Running, Turn
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.outside import check_budgets, check_kept
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.group import GroupDrafter
from foretoken.methods.drafters.outside import check_count, check_proposal, entries_of, has_outside, within
from foretoken.methods.drafters.texts import BESIDE, DraftTexts, Pace
from foretoken.methods.trees.operations import select, truncate
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.clock import now


def check_target(target: LanguageModel, drafter: Drafter) -> None:
    """Raise ``CapabilityError`` for a target that lacks a capability the drafter, or a member of a group, needs."""
    if isinstance(drafter, GroupDrafter):
        for member in reversed(drafter.drafters):  # the last one of ``known`` is the user's
            check_target(target, member)
    needed = ["rollback"]
    if drafter.traits.draws_trees:
        needed += ["tree_mask", "keep_path"]
    if drafter.taps:
        needed.append("taps")
    if drafter.traits.runs_target:
        needed.append("layer_windows")
    offered = target.capabilities
    for name in needed:
        if not getattr(offered, name):
            reason = offered.missing.get(name, f"the target lacks {name}")
            chain = ",".join(f"{option}={value}" for option, value in drafter.chain.items())
            cure = f"; {chain} drafts chains" if chain and name in ("tree_mask", "keep_path") else ""
            raise CapabilityError(f"drafter {drafter.name!r} needs a target with {name}: {reason}{cure}")


def described(drafter: Drafter | None) -> list[dict[str, Any]]:
    """Entries that describe a drafter. Raises ``DrafterError`` with class and line for what one from outside raises."""
    with blaming():
        return [] if drafter is None else entries_of(drafter)


def drop_scratch(target: LanguageModel, run: Running) -> None:
    """Remove the nodes that a failed attempt left."""
    if run.open_sequence.scratch_tokens and not run.open_sequence.provisional:
        target.commit(run.open_sequence, ())


class Drafting:
    """Drafts for the requests of one engine.

    Args:
        members: names of a group's drafters, in order.
        pace: limit of the tokens that draft models prefill in a round.

    Attributes:
        has_outside: whether the drafter or a group member comes from outside the package; its proposals are checked
            strictly.
        read_s: seconds of draft models' prefill, counted once for requests that share it.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        controller: Controller | None,
        members: Sequence[str],
        pace: Pace,
    ) -> None:
        self.target, self.drafter, self.controller, self.members = target, drafter, controller, members
        self.pace, self.read_s = pace, 0.0
        self.has_outside = has_outside(drafter)
        self._device = target.device

    def check_member(self, name: str | None) -> None:
        """Raise ``ValueError`` for an unknown member name, or for any name if the controller never drafts."""
        if name is not None and name not in self.members:
            members = ", ".join(self.members)
            hint = f"choose one of {members}" if members else "this drafter is not a router: leave it out"
            raise ValueError(f"drafter={name!r} of a request names a member of a router: {hint}")
        if name is not None and self.drafter is None:
            raise ValueError(f"drafter={name!r} of a request has no effect: the controller never drafts, leave it out")

    def begin(self, turns: Sequence[Turn]) -> None:
        """Set empty drafts. A request with its own tree builds it here, which runs the target and is not part of the
        round."""
        for turn in turns:
            run = turn.run
            turn.tree = TokenTree.root_only(run.context.root)
            if run.language_round is not None:
                start_s = now(self._device)
                drop_scratch(self.target, run)
                turn.tree, turn.rule = run.language_round.propose(self.target, run.context)
                turn.planned = False  # not decided by the controller
                spent = now(self._device) - start_s
                self.read_s += spent
                run.stats.prefill_s += spent
                run.stats.total_s += spent

    def propose(self, turns: Sequence[Turn]) -> None:
        """Get budgets from the controller, and trees within them from the drafter."""
        open_turns = [turn for turn in turns if turn.rule is None]
        if self.drafter is None or self.controller is None or not open_turns:
            return
        chosen, budgets = [], []
        foresight = self.drafter.foresight
        plans = self.controller.budgets([turn.run.context for turn in open_turns])
        if is_outside(type(self.controller)):
            check_budgets(plans, len(open_turns), self.controller)
        for turn, plan in zip(open_turns, plans, strict=True):
            budget = self._as_asked(turn.run, plan)
            wider = budget if foresight is None else foresight.minimum_budget(turn.run.context, budget)
            turn.planned, turn.allowed = wider is plan, self._allowed(turn.run)
            budget = fitted(wider, turn.allowed)
            if budget.max_depth > 0 and budget.max_nodes > 0:
                turn.was_asked = True
                chosen.append(turn)
                budgets.append(budget)
        if chosen:
            proposed = self.drafter.propose_batch([turn.run.context for turn in chosen], budgets)
            if self.has_outside:
                check_count(proposed, len(chosen), self.drafter)
            for turn, tree, budget in zip(chosen, proposed, budgets, strict=True):
                check_proposal(tree, turn.run.context, self.drafter, self.target, self.has_outside)
                if self.has_outside:
                    turn.tree = within(tree, budget, self.drafter)
                else:
                    turn.tree = truncate(tree, budget.deepest)

    def cut(self, turns: Sequence[Turn]) -> None:
        """Drop the draft nodes that the controller does not keep, before they are scored."""
        planned = [turn for turn in turns if turn.was_asked and turn.planned]
        if self.controller is None or not planned:
            return
        trees = [turn.tree for turn in planned]
        beside = [turn.tree for turn in turns if not (turn.was_asked and turn.planned)]
        kept = self.controller.kept([turn.run.context for turn in planned], trees, beside)
        if is_outside(type(self.controller)):
            check_kept(kept, trees, self.controller)
        for turn, nodes in zip(planned, kept, strict=True):
            turn.tree = select(turn.tree, nodes)

    def _as_asked(self, run: Running, budget: Budget) -> Budget:
        """The controller's budget, or that of the member named by the request."""
        name = run.request.drafter
        if name is None or self.drafter is None:
            return budget
        member = self.members.index(name)
        limits = self.drafter.limits.members[member]
        return Budget(limits.max_depth, limits.max_nodes, member=member)

    def _allowed(self, run: Running) -> int:
        """The longest draft for the remaining room (one token of every round is the target's), for the length that the
        target processes in one way, and by the request's limit."""
        depth = run.context.max_length - len(run.context.tokens) - 1
        depth = min(depth, self.target.room(run.open_sequence) - 1)  # the root takes one
        if run.request.max_draft_tokens is not None:
            depth = min(depth, run.request.max_draft_tokens)
        return max(depth, 0)

    # -- prefill of draft models -------------------------------------------------------------------------------------

    def allow_reading(self, runs: Sequence[Running], piece_size: int) -> None:
        """Allow draft models as many prefill tokens beside a round as the target (``piece_size``), and more than the
        sequences grow meanwhile."""
        self.pace.remaining, self.pace.spent_s = max(piece_size, 2 * BESIDE), 0.0
        for run in runs:
            drafts = DraftTexts.of(run.context)
            drafts.waits = drafts.has_read = False

    def note_reading(self, turns: Sequence[Turn]) -> float:
        """Add the draft models' prefill to the requests' statistics. Returns its seconds."""
        spent = self.pace.spent_s
        self.read_s += spent
        for turn in turns:
            drafts = DraftTexts.of(turn.run.context)
            stats = turn.run.stats
            stats.num_draft_prompt_tokens_computed = drafts.num_read
            if drafts.has_read:
                stats.prefill_s += spent
                stats.total_s += spent
            if drafts.waits and not turn.tree.num_drafts:
                turn.planned = False  # else the controller would learn that nothing is drafted
        return spent


def fitted(budget: Budget, depth: int) -> Budget:
    """A budget, with its alternatives, for drafts of at most ``depth`` levels."""
    if depth < budget.max_depth:
        budget = replace(budget, max_depth=depth)
    return budget if budget.otherwise is None else replace(budget, otherwise=fitted(budget.otherwise, depth))
