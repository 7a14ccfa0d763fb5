"""Two more after a full acceptance, one less otherwise: the schedule of Transformers' assisted generation."""

from __future__ import annotations

from foretoken.core import Budget, Context, Limits, StepRecord
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.stopping import levels


class HeuristicController(Controller):
    """A draft length per request that grows by ``up`` after a full acceptance and shrinks by ``down`` otherwise.

    A tree counts as accepted when a path of its full depth is: siblings are alternatives, of which at most one is
    right.

    Args:
        start: first length, from ``low`` to ``high``; by default the drafter's own, clipped to this range.
        up: growth of the length after a full acceptance.
        down: shrinkage of the length otherwise.
        low: smallest draft length.
        high: largest draft length.
        persist: continue with the last request's length, as Transformers' ``heuristic`` schedule does; the default
            starts over, as its ``heuristic_transient`` does.
    """

    name = "heuristic"

    def __init__(
        self, start: int | None = None, up: int = 2, down: int = 1, low: int = 1, high: int = 20, persist: bool = False
    ) -> None:
        if not (0 < low <= high) or up < 0 or down < 0 or (start is not None and not low <= start <= high):
            raise ValueError("heuristic needs 1 <= low <= high, start within them, up >= 0 and down >= 0")
        self.start, self.up, self.down, self.low, self.high = start, up, down, low, high
        self.persist = persist
        self._first = start or 5
        self._nodes = 64

    def attach(self, limits: Limits) -> None:
        self._first = self.start or limits.max_depth
        self._nodes = max(limits.max_nodes, self.high)

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(self._length(context), self._nodes)

    def _length(self, context: Context) -> int:
        return context.state.setdefault(self, min(max(self._first, self.low), self.high))

    def observe(self, context: Context, record: StepRecord) -> None:
        if record.num_draft_tokens == 0:
            return
        k = self._length(context)
        full = record.num_accepted_tokens == levels(record)
        context.state[self] = min(self.high, k + self.up) if full else max(self.low, k - self.down)
        if self.persist:
            self._first = context.state[self]
