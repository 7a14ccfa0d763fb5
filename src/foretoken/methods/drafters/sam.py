"""SAM-Decoding: copy after the longest suffix that occurred before (Hu et al. 2024,
https://arxiv.org/abs/2411.10666)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from foretoken.core import Budget, Context
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.datastore import DEPTH, SEPARATOR, Datastore
from foretoken.methods.drafters.sources import NOTHING, Automaton, NgramSource, SourceDraft, SourceDrafter


class DatastoreCorpus:
    """Texts in a datastore; its suffix array gives the same match as an automaton, in 8 bytes per token."""

    SCANNED = 4096

    def __init__(self, datastore: Datastore) -> None:
        self.datastore = datastore

    def after(self, context: Sequence[int], count: int) -> tuple[int, list[int]]:
        """The first occurrence of the longest suffix (among the first 4096 rows if it is very frequent)."""
        matched, low, high = self.datastore.longest(context, DEPTH)
        if not matched:
            return 0, []
        row = low + int(np.argmin(self.datastore.order[low : min(high, low + self.SCANNED)]))
        tokens = self.datastore.continuations(np.array([row]), matched, count)[0].tolist()
        return matched, tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class _SamSource(NgramSource):
    def __init__(self, drafter: SamDrafter) -> None:
        super().__init__()
        self.drafter = drafter
        self.automaton, self.end = Automaton(), 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)
        for token in tokens:
            self.end = self.automaton.append(self.end, token)

    def propose(self, budget: Budget) -> SourceDraft:
        options, corpus = self.drafter, self.drafter.corpus
        most = min(options.max_depth, budget.max_depth, budget.max_nodes)
        # The longest suffix that also ends elsewhere, so that the end of the tokens does not match itself.
        state = self.automaton.link[self.end]
        matched = self.automaton.length[state] if state > 0 else 0
        if corpus is not None:
            length, tokens = corpus.after(self.text[-DEPTH:], most)
            if length - options.bias > matched and length >= options.min_match and tokens:
                return SourceDraft.copied(tokens[: options.draft_length(length, most)], length)
        if matched < options.min_match:
            return NOTHING
        return SourceDraft.copied(self._after(state, options.draft_length(matched, most)), matched)

    def _after(self, state: int, count: int) -> list[int]:
        """Tokens after the first occurrence, or after that of a shorter suffix if the former ends too soon."""
        automaton, best = self.automaton, list[int]()
        while len(best) < count and state > 0:
            after = automaton.first_end[state] + 1
            other = automaton.text[after : after + count].tolist()
            if len(other) > len(best):
                best = other
            state = automaton.link[state]
        return best


class SamDrafter(SourceDrafter):
    """Copies what followed the first occurrence of the longest suffix, of any length.

    Args:
        k: maximum draft tokens.
        alpha: draft tokens per matched token.
        min_match: shortest match that is used.
        bias: number of tokens by which a match in the corpus must be longer than one in the request's tokens.
        corpus: texts that are known beforehand (token ids each).
    """

    name = "sam"

    def __init__(
        self,
        k: int = 16,
        alpha: float = 4.0,
        min_match: int = 1,
        bias: int = 5,
        corpus: Iterable[Sequence[int]] | DatastoreCorpus | None = None,
    ) -> None:
        if k < 1 or min_match < 1 or not 0 < alpha < math.inf:
            raise ValueError(f"sam needs k >= 1, min_match >= 1 and alpha > 0, not {k}, {min_match} and {alpha}")
        self.max_depth, self.alpha, self.min_match, self.bias = k, alpha, min_match, bias
        if isinstance(corpus, Iterable):
            corpus = DatastoreCorpus(Datastore.from_documents(corpus))
        self.corpus = corpus

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> SamDrafter:
        """Build from a spec ``sam[:FILE]``: FILE is a datastore, which serves as the static automaton."""
        if path is None:
            return cls(**options)
        datastore = Datastore.open(path, context.tokenizer)
        datastore.check_vocabulary(context.target.vocab_size)
        return cls(corpus=DatastoreCorpus(datastore), **options)

    def open(self, context: Context) -> NgramSource:
        return _SamSource(self)

    def draft_length(self, matched: int, most: int) -> int:
        return max(1, min(most, int(self.alpha * matched)))
