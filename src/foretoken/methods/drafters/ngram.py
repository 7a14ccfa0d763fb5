"""Prompt lookup: copy the tokens after the most recent occurrence of the longest matching n-gram.

Saxena, "Prompt lookup decoding" (2023).  The index of n-grams grows with the sequence, so a proposal costs a few
dictionary look-ups whatever the length of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Budget, Context, check_least
from foretoken.methods.drafters.base import Traits
from foretoken.methods.drafters.sources import NOTHING, NgramSource, SourceDraft, SourceDrafter

Ends = dict[tuple[int, ...], list[int]]


class PromptSource(NgramSource):
    """End positions of every n-gram of a request's tokens.

    The n-gram at the end of the tokens is always its own last occurrence, so the previous one is the match.
    """

    def __init__(self, sizes: range, match: str, most: int) -> None:
        super().__init__()
        self.sizes, self.match, self.most = sizes, match, most
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
                most = min(self.most, budget.max_depth, budget.max_nodes)
                return SourceDraft.copied(self.text[end : end + most], n)
        return NOTHING


class NgramDrafter(SourceDrafter):
    """Deterministic chains from the request's own text.

    Args:
        n: longest n-gram that is looked up; shorter ones are tried after it.
        min_n: shortest n-gram that is looked up.
        k: maximum copied tokens.
        match: ``"recent"`` (the most recent occurrence) or ``"first"`` (the earliest, as Transformers and vLLM do).
    """

    name = "ngram"
    traits = Traits(
        rewinds=True, learns=False, copies_text=True, free_for=lambda context: True
    )  # a proposal costs a few look-ups

    def __init__(self, n: int = 3, k: int = 8, min_n: int = 1, match: str = "recent") -> None:
        if not 1 <= min_n <= n:
            raise ValueError(f"ngram needs 1 <= min_n <= n, not min_n={min_n}, n={n}")
        check_least(self.name, 1, k=k)
        if match not in ("recent", "first"):
            raise ValueError(f"match must be 'recent' or 'first', not {match!r}")
        self.n, self.min_n, self.max_depth, self.match = n, min_n, k, match

    def open(self, context: Context) -> NgramSource:
        return PromptSource(range(self.min_n, self.n + 1), self.match, self.max_depth)
