"""The ``Controller`` protocol: how much to guess next, including nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from foretoken.core import Budget, Context, Limits, StepRecord
from foretoken.core.costs import RoundCosts


class Controller(ABC):
    """One policy for the draft budget.

    Exactness: a policy may look at the context, at earlier rounds and at draft *distributions*; a decision made after a
    token was drawn may only suppress later tokens (``methods/verification.md`` section 0, adaptedness).  An option
    outside its range is a ``ValueError`` of the constructor.
    """

    name: ClassVar[str]
    watches: bool = True
    """Whether it wants to be told of the round that it has just given budgets for."""
    weighs_costs: bool = False
    """Whether it wants to begin with what rounds and drafts cost here: :mod:`foretoken.loading.measured.calibration`"""
    uses_costs: bool = False
    """Whether :meth:`start_from` does anything: else nobody is warned of a profile's costs from elsewhere."""

    @property
    def drafts(self) -> bool:
        """Whether any round can get a draft; if not, the engine runs no drafter code at all."""
        return True

    def attach(self, limits: Limits) -> None:  # noqa: B027
        """Learn what the drafter can draft, before the first round."""

    def start_from(self, costs: RoundCosts) -> None:  # noqa: B027
        """Begin with costs and acceptances that were measured before (``foretoken tune``)."""

    @abstractmethod
    def budget(self, context: Context, batch_size: int) -> Budget:
        """The budget of the next round of a request."""

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        """The budgets of all requests of the next round; override when they depend on each other."""
        return [self.budget(context, len(contexts)) for context in contexts]

    def observe(self, context: Context, record: StepRecord) -> None:  # noqa: B027
        """Learn from a finished round."""

    def explain(self, context: Context) -> str:
        """Why the request drafts as it does just now, in one line; empty where there is nothing to say."""
        return ""

    def report(self) -> dict[str, Any]:
        """What the policy knows and does just now, for JSON."""
        return {}

    def finish(self, context: Context) -> None:  # noqa: B027
        """The request ended."""
