"""Logits processors of requests: pure functions of (prefix, scores), and so exact on every branch of a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class MinTokens:
    """Nothing ends the text before it has ``count`` output tokens.

    Args:
        ends: ids that end a text.
        prompt_length: tokens of the prompt.
        count: output tokens that there must be.
    """

    def __init__(self, ends: Iterable[int], prompt_length: int, count: int) -> None:
        self._ends, self._length = sorted(ends), prompt_length + count

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which what ends a text is impossible, as long as it is too short."""
        if input_ids.shape[-1] >= self._length or not self._ends:
            return scores
        scores = scores.clone()
        scores[:, self._ends] = -torch.inf
        return scores


class AllowedTokens:
    """No other tokens than these and the end of the text."""

    def __init__(self, allowed: Iterable[int], ends: Iterable[int]) -> None:
        self._allowed = sorted({*allowed, *ends})

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which everything else is impossible."""
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self._allowed] = scores[:, self._allowed]
        return kept


class BadWords:
    """No sequence of tokens that spells one of these."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words if word]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which the last token of every word that is otherwise complete is impossible."""
        longest = max((len(word) for word in self._words), default=0)
        text = input_ids[0, max(0, input_ids.shape[-1] - longest) :].tolist()
        ends = [word[-1] for word in self._words if len(word) == 1 or tuple(text[1 - len(word) :]) == word[:-1]]
        if not ends:
            return scores
        scores = scores.clone()
        scores[:, ends] = -torch.inf
        return scores
