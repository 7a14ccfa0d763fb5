"""The draft length with most accepted tokens per second of the batch, by a measured cost model; zero included.

SmartSpec / TurboSpec, https://arxiv.org/abs/2406.14066: E = (1 - a^(k+1)) / (1 - a) tokens of a round with drafts of k
tokens of which each is accepted with chance a; k* = argmax of the batch's E over the time of its round.
"""

from __future__ import annotations

from foretoken.controllers.base import Controller
from foretoken.controllers.costs import RoundCosts
from foretoken.controllers.learned import LearnedCosts
from foretoken.types import Budget, Context, Limits, StepRecord


class GoodputController(Controller):
    """One length for the whole batch, from a moving average of the acceptance rate.

    Args:
        k: longest draft; the drafter's own by default.
        memory: draft tokens after which one counts 1/e in the moving average.
        explore: rounds of only drafting, or of only plain decoding, after which one round does the other (with one
            token): how it notices that what pays has changed.
    """

    name = "goodput"

    def __init__(self, k: int | None = None, memory: float = 100.0, explore: int = 64) -> None:
        if k is not None and k < 1:
            raise ValueError(f"goodput needs k >= 1, not {k}")
        if memory < 1 or explore < 1:
            raise ValueError(f"goodput needs memory >= 1 and explore >= 1, not {memory} and {explore}")
        self.k, self.memory, self.explore = k, memory, explore
        self._start: RoundCosts | None = None
        self.attach(Limits("", 5, 64))

    def attach(self, limits: Limits) -> None:
        """Take the length from the drafter when it was not given."""
        self.limits = limits
        self.longest = self.k or limits.max_depth
        self._reset()

    def start_from(self, costs: RoundCosts) -> None:
        """Begin with measured costs, and with the acceptance that was measured with them."""
        self._start = costs
        self._reset()

    def _reset(self) -> None:
        self.costs = LearnedCosts([self.limits.name], self._start)
        known = None if self._start is None else self._start.drafters.get(self.limits.name)
        self.acceptance = known.survival[0] if known is not None and known.survival else 0.7
        self.alike, self._last_round = 0, -1
        self._drafted = False

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The best length for a batch of this size by what is known."""
        k = self.best(batch_size)
        if self.alike >= self.explore:
            k = 0 if k else 1
        return Budget(k, max(self.limits.max_nodes, k)) if k else Budget(0, 0)

    def best(self, batch: int) -> int:
        """argmax over k of the expected tokens per second."""
        if not self.costs.known:
            return min(3, self.longest)  # the first rounds: something must be seen of both costs
        plain = self.costs.target_s(batch) + self.costs.rest_s(batch, batch)
        best, goodput, tokens = 0, 1.0 / plain, 1.0
        for k in range(1, self.longest + 1):
            tokens += self.acceptance**k
            draft_s = self.costs.draft_s(0, k, batch)
            if draft_s is None:
                draft_s = self.limits.relative_cost * k * plain
            nodes = batch * (k + 1)
            rate = tokens / (self.costs.target_s(nodes) + draft_s + self.costs.rest_s(batch, nodes))
            if rate > goodput:
                best, goodput = k, rate
        return best

    def observe(self, context: Context, record: StepRecord) -> None:
        """Update the moving average, and once per round the costs."""
        for place in range(min(record.depth, record.num_accepted_tokens + 1)):
            stood = float(place < record.num_accepted_tokens)
            self.acceptance += (stood - self.acceptance) / self.memory
        if record.round_id == self._last_round:
            return
        self._last_round = record.round_id
        drafted = record.depth > 0
        self.alike = self.alike + 1 if drafted == self._drafted else 0
        self._drafted = drafted
        self.costs.observe(record, 0 if record.depth else None, record.depth, record.batch_size)
