"""Rules that select one of several drafts by the estimates of their sources.

``expected``: the largest expected number of accepted tokens, as SuffixDecoding chooses between its trees and a model
(arXiv 2411.04975, section 4).  ``match``: the longest matching n-gram, as SAM-Decoding chooses between its automata and
another drafter (arXiv 2411.10666, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core import Budget, Context
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.sources import SourceDraft, SourceDrafter

RULES = ("cost", "expected", "match")
"""``cost`` compares no drafts; the cheapest member drafts first."""


@dataclass(frozen=True)
class DraftRule:
    """A rule over the drafts of some members.

    Attributes:
        name: ``"expected"`` or ``"match"``.
        least: minimum estimate of a draft, below which the fallback drafts.
        bias: per member the number of tokens by which its match must be longer than those of others (``match`` only).
        weighed: the members whose drafts are compared.
        fallback: index of the fallback member; ``None``: there is none.
    """

    name: str
    least: float
    bias: Sequence[float]
    weighed: Sequence[SourceDrafter]
    fallback: int | None

    @classmethod
    def over(cls, name: str, least: float, bias: Sequence[float], drafters: Sequence[Drafter]) -> DraftRule | None:
        """A rule over members; ``None`` for ``cost``.  The last member is the fallback if ``least`` is above 0 or it
        gives no estimates."""
        if name not in RULES:
            raise ValueError(f"router needs rule={', '.join(RULES[:-1])} or {RULES[-1]}, not {name!r}")
        if not (math.isfinite(least) and least >= 0):
            raise ValueError(f"router needs least >= 0, not {least}")
        if name == "cost" and (least or bias):
            raise ValueError("router ignores least and bias with rule=cost: they need rule=expected or match")
        if bias and name != "match":
            raise ValueError("router needs rule=match for bias, which is a match length")
        if name == "cost":
            return None
        falls_back = least > 0 or not isinstance(drafters[-1], SourceDrafter)
        weighed = [d for d in (drafters[:-1] if falls_back else drafters) if isinstance(d, SourceDrafter)]
        if len(weighed) < len(drafters) - falls_back or not weighed:
            names = ", ".join(drafter.name for drafter in drafters)
            raise ValueError(
                f"router with rule={name} needs copying drafters, optionally followed by one other, not {names}: "
                "for example drafters=(suffix|ngram|model)"
            )
        if bias and (len(bias) != len(drafters) or not all(math.isfinite(number) and number >= 0 for number in bias)):
            raise ValueError(f"router needs a bias >= 0 for each of its {len(drafters)} drafters")
        fallback = len(drafters) - 1 if falls_back else None
        return cls(name, least, tuple(bias) or (0.0,) * len(drafters), weighed, fallback)

    def value(self, index: int, draft: SourceDraft) -> float:
        """The compared estimate."""
        if not draft.tokens:
            return -math.inf
        return draft.expected if self.name == "expected" else draft.match - self.bias[index]

    def best(self, context: Context, budget: Budget) -> tuple[int, SourceDraft, bool]:
        """The member with the best draft (the first one wins ties), that draft, and whether it reaches ``least``."""
        drafts = [member.draft(context, budget) for member in self.weighed]
        values = [self.value(index, draft) for index, draft in enumerate(drafts)]
        index = max(range(len(values)), key=values.__getitem__)
        return index, drafts[index], values[index] >= max(self.least, 0.0) and bool(drafts[index].tokens)
