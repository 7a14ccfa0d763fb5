"""The ``Controller`` protocol: the draft budget of the next round, including none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from foretoken.core import Budget, Context, Limits, StepRecord, TokenTree
from foretoken.core.costs import RoundCosts


class Controller(ABC):
    """One policy for the draft budget.

    Exactness: a policy may use the context, earlier rounds and draft *distributions*. A decision made after a token was
    drawn may only suppress later tokens: where a token's own value decides whether it is verified, the output does not
    have the target's distribution. The constructor raises ``ValueError`` for an option outside its range.
    """

    name: ClassVar[str]
    weighs_costs: bool = False
    """Whether it needs initial costs of rounds and drafts: :mod:`foretoken.loading.measured.calibration`"""
    uses_costs: bool = False
    """Whether :meth:`start_from` has any effect; else a profile's costs from another machine cause no warning."""

    @property
    def drafts(self) -> bool:
        """Whether any round can get a draft; if not, the engine runs no drafter code at all."""
        return True

    def attach(self, limits: Limits) -> None:  # noqa: B027
        """Take over the drafter's limits, before the first round."""

    def start_from(self, costs: RoundCosts) -> None:  # noqa: B027
        """Start from measured costs and acceptance rates (``foretoken tune``)."""

    @abstractmethod
    def budget(self, context: Context, batch_size: int) -> Budget:
        """The budget of the next round of a request."""

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        """The budgets of all requests of the next round; override when they depend on each other."""
        return [self.budget(context, len(contexts)) for context in contexts]

    def kept(
        self, contexts: Sequence[Context], trees: Sequence[TokenTree], beside: Sequence[TokenTree]
    ) -> Sequence[Sequence[int]]:
        """The nodes of every proposed tree that the target scores, ascending and with their parents; all by default.

        Whether a *drawn* node is kept may depend on the tokens before it and on distributions, as in
        ``TokenTree.survival``, never on its own token or a later one of its request.

        Args:
            contexts: the requests that were drafted for by this controller's budgets.
            trees: their proposals.
            beside: trees of the round's other requests, which stay as they are.
        """
        return [range(len(tree)) for tree in trees]

    def observe(self, context: Context, record: StepRecord) -> None:  # noqa: B027
        """Learn from a finished round."""

    def explain(self, context: Context) -> str:
        """Reason for the request's current drafting, in one line; may be empty."""
        return ""

    def report(self) -> dict[str, Any]:
        """State of the policy, for JSON."""
        return {}

    def finish(self, context: Context) -> None:  # noqa: B027
        """Release the state of an ended request."""
