"""How much a drafter may guess, and when it should stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class PathStop(ABC):
    """A stop rule that reads the draft model's hidden states: how likely is it that a whole path of the draft is
    accepted?

    A drafter with a draft model keeps one chance per path (1 for the root, which is committed).  After every forward of
    the draft model it asks :meth:`follow` for the chances of the paths that end with the tokens it has just fed, and
    drafts nothing behind the tokens drawn after a path for which :meth:`ends` is true.  Those tokens stay in the draft:
    the rule has not seen them.

    As a plain stop rule, for a drafter without hidden states, it never stops.

    Attributes:
        tap: the hidden states that it reads (see :mod:`foretoken.models.base`).
    """

    tap: str = "last"

    @abstractmethod
    def follow(self, above: Sequence[float], hidden: Tensor) -> list[float]:
        """Chances that n paths are accepted, from those of the paths one token shorter and the states [n, D] of the
        tokens."""

    @abstractmethod
    def ends(self, likelihood: float) -> bool:
        """Whether the token drawn after a path with this chance is the last one."""

    def __call__(self, distribution: Tensor | None, probability: float) -> bool:
        """Never: a distribution says nothing of hidden states."""
        return False


@dataclass(frozen=True)
class Budget:
    """How much a drafter may guess this round.

    Attributes:
        max_depth: longest draft; 0 means plain decoding and no drafter code runs.
        max_nodes: most draft nodes (the root not counted).
        min_confidence: stop drafting after a token whose own draft probability is below this (it stays in the draft).
        stop: a richer rule of the same sort: called with the draft distribution [V] (``None`` if the drafter has none)
            and the drawn token's probability; true ends the draft *after* that token.  A :class:`PathStop` is also told
            the hidden states of the draft model.
        member: which member of a group of drafters drafts (its index); ``None`` leaves the choice to the group.
        otherwise: the budget of another member, for when that one guesses nothing.
    """

    max_depth: int = 5
    max_nodes: int = 64
    min_confidence: float = 0.0
    stop: Callable[[Tensor | None, float], bool] | None = None
    member: int | None = None
    otherwise: Budget | None = None

    @property
    def deepest(self) -> int:
        """The longest draft that this budget or its alternatives allow."""
        return self.max_depth if self.otherwise is None else max(self.max_depth, self.otherwise.deepest)

    @property
    def asks_for_confidence(self) -> bool:
        """Whether a stop rule looks at the distribution or at the probability of a drawn token."""
        return self.min_confidence > 0 or (self.stop is not None and self.path_stop is None)

    def stops_after(self, distribution: Tensor | None, probability: float) -> bool:
        """Whether drafting ends after a token of this probability."""
        return probability < self.min_confidence or (self.stop is not None and self.stop(distribution, probability))

    @property
    def path_stop(self) -> PathStop | None:
        """The stop rule, if it is one that reads hidden states."""
        return self.stop if isinstance(self.stop, PathStop) else None


@dataclass(frozen=True)
class Limits:
    """What a drafter can draft, as a controller sees it.

    Attributes:
        name: the drafter's registry name, or its whole spec where it was built from one.
        max_depth: longest draft that it makes by default.
        max_nodes: most draft nodes that it makes by default.
        relative_cost: what a level of its drafts costs by its size, in target calls (0: it runs no network): a guess
            until it is measured.
        members: the same of the drafters that a group chooses from; ``Budget.member`` counts in this order.
        states: fingerprint of the network whose hidden states a :class:`PathStop` is told; ``None`` if there is none.
    """

    name: str
    max_depth: int
    max_nodes: int
    relative_cost: float = 0.1
    members: Sequence[Limits] = ()
    states: Any = None
