"""Prompt lookup: copy what followed the most recent occurrence of the longest matching n-gram.

Saxena, "Prompt lookup decoding" (2023).  The index of n-grams grows with the text, so a proposal costs a few
dictionary look-ups whatever the length of the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.drafters.base import Drafter
from foretoken.types import Budget, Context, TokenTree


@dataclass
class _Index:
    """Where every n-gram of a text last ended; ``previous`` is the end before that.

    The n-gram that ends the text is always its own last occurrence, so the one before is the match.
    """

    length: int = 0
    last: list[dict[tuple[int, ...], int]] = field(default_factory=list)
    previous: list[dict[tuple[int, ...], int]] = field(default_factory=list)
    first: list[dict[tuple[int, ...], int]] = field(default_factory=list)


class NgramDrafter(Drafter):
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

    def start(self, context: Context) -> None:
        """Index the prompt."""
        self._update(context)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """The tokens after the match; the root alone when nothing matches."""
        index = self._update(context)
        tokens = context.tokens
        for n in range(min(self.n, len(tokens) - 1), self.min_n - 1, -1):
            key = tuple(tokens[-n:])
            table = index.previous if self.match == "recent" else index.first
            end = table[n - self.min_n].get(key)
            if end is not None and end < len(tokens):
                copied = tokens[end : end + min(self.max_depth, budget.max_depth, budget.max_nodes)]
                return TokenTree.chain(context.root, copied)
        return TokenTree.root_only(context.root)

    def _update(self, context: Context) -> _Index:
        sizes = range(self.min_n, self.n + 1)
        index: _Index | None = context.state.get(self)
        if index is None:
            index = context.state[self] = _Index(0, [{} for _ in sizes], [{} for _ in sizes], [{} for _ in sizes])
        tokens = context.tokens
        for end in range(index.length + 1, len(tokens) + 1):
            for i, n in enumerate(sizes):
                if end >= n:
                    key = tuple(tokens[end - n : end])
                    before = index.last[i].get(key)
                    if before is not None:
                        index.previous[i][key] = before
                    index.last[i][key] = end
                    index.first[i].setdefault(key, end)
        index.length = len(tokens)
        return index
