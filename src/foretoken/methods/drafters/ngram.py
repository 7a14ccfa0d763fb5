"""Prompt lookup: copy the tokens after the most recent occurrence of the longest matching n-gram.

Saxena, "Prompt lookup decoding" (2023).  The index of n-grams grows with the sequence, so a proposal costs a few
dictionary look-ups whatever the length of the context.

One rule is added to the paper's (``periodic``): a copy that reaches the end of the text starts again at its beginning.
The most recent match in a text that repeats itself lies one period back, so the paper's rule drafts one period at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Budget, Context, check_least
from foretoken.methods.drafters.base import Traits
from foretoken.methods.drafters.sources import NOTHING, NgramSource, SourceDraft, SourceDrafter

EVIDENCE = 3
"""Matching tokens that are evidence of a period: as measured, two cost acceptance in code and save hardly a round."""

Ends = dict[tuple[int, ...], list[int]]


class PromptSource(NgramSource):
    """End positions of every n-gram of a request's tokens.

    The n-gram at the end of the tokens is always its own last occurrence, so the previous one is the match.
    """

    def __init__(self, sizes: range, match: str, most: int, periodic: bool) -> None:
        super().__init__()
        self.sizes, self.match, self.most, self.periodic = sizes, match, most, periodic
        self.ends: list[Ends] = [{} for _ in sizes]

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.text)
        self.text.extend(tokens)
        for end in range(start + 1, len(self.text) + 1):
            for n, ends in zip(self.sizes, self.ends, strict=True):
                if end >= n:
                    ends.setdefault(tuple(self.text[end - n : end]), []).append(end)

    def rewind(self, length: int) -> None:
        """Remove the n-grams that end after ``length`` from the index."""
        for end in range(len(self.text), length, -1):
            for n, ends in zip(self.sizes, self.ends, strict=True):
                if end >= n:
                    key = tuple(self.text[end - n : end])
                    ends[key].pop()
                    if not ends[key]:
                        del ends[key]
        super().rewind(length)

    def propose(self, budget: Budget) -> SourceDraft:
        for i in range(len(self.sizes) - 1, -1, -1):
            n = self.sizes[i]
            ends = self.ends[i].get(tuple(self.text[-n:]), ()) if n < len(self.text) else ()
            if len(ends) > 1:
                end = ends[-2] if self.match == "recent" else ends[0]
                return SourceDraft.copied(self._after(end, min(self.most, budget.max_depth, budget.max_nodes)), n)
        return NOTHING

    def _after(self, end: int, most: int) -> list[int]:
        """At most ``most`` tokens after a match that ends at ``end``."""
        text, period = self.text, len(self.text) - end
        if self.periodic and period < most and end >= EVIDENCE and text[end - EVIDENCE : end] == text[-EVIDENCE:]:
            return [text[end + i % period] for i in range(most)]
        return text[end : end + most]


class NgramDrafter(SourceDrafter):
    """Deterministic chains from the request's own text.

    Args:
        n: longest n-gram that is looked up; shorter ones are tried after it.
        min_n: shortest n-gram that is looked up.
        k: maximum copied tokens.
        match: ``"recent"`` (the most recent occurrence) or ``"first"`` (the earliest, as Transformers and vLLM do).
        periodic: with ``match=recent``, whether a copy that reaches the end of the text repeats itself, if three tokens
            match; otherwise it ends there, as in other engines.
    """

    name = "ngram"
    traits = Traits(
        rewinds=True, learns=False, copies_text=True, free_for=lambda context: True
    )  # a proposal costs a few look-ups

    def __init__(self, n: int = 3, k: int = 8, min_n: int = 1, match: str = "recent", periodic: bool = True) -> None:
        if not 1 <= min_n <= n:
            raise ValueError(f"ngram needs 1 <= min_n <= n, not min_n={min_n}, n={n}")
        check_least(self.name, 1, k=k)
        if match not in ("recent", "first"):
            raise ValueError(f"match must be 'recent' or 'first', not {match!r}")
        self.n, self.min_n, self.max_depth, self.match = n, min_n, k, match
        self.periodic = periodic and match == "recent"

    def open(self, context: Context) -> NgramSource:
        return PromptSource(range(self.min_n, self.n + 1), self.match, self.max_depth, self.periodic)
