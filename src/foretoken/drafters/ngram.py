"""Prompt lookup: copy what followed the most recent occurrence of the longest matching n-gram.

Saxena, "Prompt lookup decoding" (2023).  The index of n-grams grows with the text, so a proposal costs a few
dictionary look-ups whatever the length of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.drafters.sources import NOTHING, Guess, NgramSource, SourceDrafter
from foretoken.types import Budget, Context

Places = dict[tuple[int, ...], int]


class PromptSource(NgramSource):
    """Where every n-gram of a text ended first, last, and before that.

    The n-gram that ends the text is always its own last occurrence, so the one before is the match.
    """

    def __init__(self, sizes: range, match: str, most: int) -> None:
        super().__init__()
        self.sizes, self.match, self.most = sizes, match, most
        self.last: list[Places] = [{} for _ in sizes]
        self.earlier: list[Places] = [{} for _ in sizes]  # the first place, or the one before the last

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end in the new tokens."""
        start = len(self.text)
        self.text.extend(tokens)
        for end in range(start + 1, len(self.text) + 1):
            for n, last, earlier in zip(self.sizes, self.last, self.earlier, strict=True):
                if end >= n:
                    self._note(tuple(self.text[end - n : end]), end, last, earlier)

    def _note(self, key: tuple[int, ...], end: int, last: Places, earlier: Places) -> None:
        before = last.get(key)
        last[key] = end
        if before is not None and (self.match == "recent" or key not in earlier):
            earlier[key] = before

    def propose(self, budget: Budget) -> Guess:
        """The tokens after the match of the longest n-gram."""
        for i in range(len(self.sizes) - 1, -1, -1):
            n = self.sizes[i]
            end = self.earlier[i].get(tuple(self.text[-n:])) if n < len(self.text) else None
            if end is not None:
                most = min(self.most, budget.max_depth, budget.max_nodes)
                return Guess.copied(self.text[end : end + most], n)
        return NOTHING


class NgramDrafter(SourceDrafter):
    """Deterministic chains from the request's own text.

    Args:
        n: longest n-gram that is looked up; shorter ones are tried after it.
        min_n: shortest n-gram.
        k: most tokens that are copied.
        match: ``"recent"`` (the most recent occurrence) or ``"first"`` (the earliest, as Transformers and vLLM do).

    Raises:
        ValueError: an option outside its range.
    """

    name = "ngram"

    def __init__(self, n: int = 3, k: int = 8, min_n: int = 1, match: str = "recent") -> None:
        if not 1 <= min_n <= n:
            raise ValueError(f"ngram needs 1 <= min_n <= n, not min_n={min_n}, n={n}")
        if k < 1:
            raise ValueError(f"ngram needs k >= 1, not {k}")
        if match not in ("recent", "first"):
            raise ValueError(f"match must be 'recent' or 'first', not {match!r}")
        self.n, self.min_n, self.max_depth, self.match = n, min_n, k, match

    def open(self, context: Context) -> NgramSource:
        """An index of the request's text."""
        return PromptSource(range(self.min_n, self.n + 1), self.match, self.max_depth)
