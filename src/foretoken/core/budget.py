"""Draft budgets and stop rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class PathStop(ABC):
    """A stop rule that predicts from the draft model's hidden states whether a whole draft path is accepted.

    A drafter with a draft model keeps one probability per path (1 for the root, which is committed). After each forward
    of the draft model it calls :meth:`follow` for the paths that end with the tokens just fed. It drafts nothing after
    the children of a path for which :meth:`ends` is true. The children stay in the draft, because the rule has not seen
    them.

    A drafter without hidden states calls it as a plain stop rule, which never stops.

    Attributes:
        tap: the hidden states that it reads (see :mod:`foretoken.models.base`).
    """

    tap: str = "last"

    @abstractmethod
    def follow(self, above: Sequence[float], hidden: Tensor) -> list[float]:
        """Acceptance probabilities of n paths, from those of their parents and the hidden states [n, D] of their last
        tokens."""

    @abstractmethod
    def ends(self, likelihood: float) -> bool:
        """Whether drafting ends after the children of a path with this acceptance probability."""

    def __call__(self, distribution: Tensor | None, probability: float) -> bool:
        """Always false: a distribution carries no hidden states."""
        return False


@dataclass
class MovingThreshold:
    """A threshold that rises while too little is accepted and falls when a draft could have been longer.

    Draft & Verify, arXiv 2309.08168: ``rate`` and ``value`` are moving averages, and one round moves the value by at
    most ``(1 - smoothing) * step``.

    A draft ends where its signal is below ``value``, which stays within [0, 1], the range of all signals. ``rate`` is
    steered to ``aim``, and ``step`` is the change of the value before smoothing.
    """

    value: float
    aim: float = 0.9
    step: float = 0.01
    rate: float = 0.0
    rate_smoothing: float = 0.5
    smoothing: float = 0.9

    def update(self, drafted: int, accepted: int, cap: int) -> None:
        """Learn from a round of ``drafted`` > 0 tokens; at the cap it was not this threshold that ended the draft."""
        self.rate = self.rate_smoothing * self.rate + (1 - self.rate_smoothing) * accepted / drafted
        if self.rate < self.aim:
            goal = self.value + self.step
        else:
            goal = self.value if drafted >= cap else self.value - self.step
        self.value = min(max(self.smoothing * self.value + (1 - self.smoothing) * goal, 0.0), 1.0)


@dataclass(frozen=True)
class Budget:
    """Limits of one round's draft.

    Attributes:
        max_depth: longest draft; 0 means plain decoding, without any drafter code.
        max_nodes: most draft nodes, without the root.
        min_confidence: drafting stops after a token with a lower draft probability; the token stays in the draft.
        stop: a richer stop rule, called with the draft distribution [V] (``None`` if the drafter has none) and the
            drawn token's probability. True ends the draft *after* that token. A :class:`PathStop` also gets the draft
            model's hidden states.
        member: index of the group member that drafts; ``None`` leaves the choice to the group.
        otherwise: the budget of another member, used when this one proposes nothing.
        survival: whether the controller reads ``TokenTree.survival``, which a drafter may leave out.
    """

    max_depth: int = 5
    max_nodes: int = 64
    min_confidence: float = 0.0
    stop: Callable[[Tensor | None, float], bool] | None = None
    member: int | None = None
    otherwise: Budget | None = None
    survival: bool = False

    @property
    def deepest(self) -> int:
        """The longest draft that this budget or its alternatives allow."""
        return self.max_depth if self.otherwise is None else max(self.max_depth, self.otherwise.deepest)

    @property
    def widest(self) -> int:
        """The most draft nodes that this budget or its alternatives allow."""
        return self.max_nodes if self.otherwise is None else max(self.max_nodes, self.otherwise.widest)

    @property
    def asks_for_confidence(self) -> bool:
        """Whether a stop rule reads the distribution or probability of a drawn token."""
        return self.min_confidence > 0 or (self.stop is not None and self.path_stop is None)

    def stops_after(self, distribution: Tensor | None, probability: float) -> bool:
        """Whether drafting ends after a token of this probability."""
        return probability < self.min_confidence or (self.stop is not None and self.stop(distribution, probability))

    @property
    def path_stop(self) -> PathStop | None:
        """The stop rule, if it reads hidden states."""
        return self.stop if isinstance(self.stop, PathStop) else None


@dataclass(frozen=True)
class Limits:
    """Capacity and cost of a drafter, for controllers.

    Attributes:
        name: the drafter's registry name, or its whole spec if it was built from one.
        max_depth: default length of the longest draft.
        max_nodes: default number of draft nodes.
        relative_cost: estimated cost of one draft level in target calls, by network size (0 without a network); used
            until it is measured.
        members: limits of a group's members; ``Budget.member`` is an index into them.
        states: fingerprint of the network whose hidden states a :class:`PathStop` reads; ``None`` without one.
    """

    name: str
    max_depth: int
    max_nodes: int
    relative_cost: float = 0.1
    members: Sequence[Limits] = ()
    states: Any = None
