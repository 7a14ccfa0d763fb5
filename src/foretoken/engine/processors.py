"""Logits processors of requests: pure functions of (prefix, scores), and so exact on every branch of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


class OfAnswer:
    """A processor that sees the answer alone, without the ``skipped`` tokens before it.

    Of a model with an encoder, Transformers shows processors the decoder's text; a constraint knows outputs only.
    """

    def __init__(self, processor: Callable[[Tensor, Tensor], Tensor], skipped: int) -> None:
        self._processor, self._skipped = processor, skipped

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] as the processor makes them of the answer so far."""
        return self._processor(input_ids[:, self._skipped :], scores)


class MinTokens:
    """Nothing ends the text before it has ``count`` output tokens, unless nothing else may follow.

    It comes after all other rules: where a constraint is complete, or what is allowed runs out, they win over it.
    """

    def __init__(self, ends: Iterable[int], prompt_length: int, count: int) -> None:
        self._ends, self._length = frozenset(ends), prompt_length + count

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which what ends a text is impossible, as long as it is too short and may go on."""
        if input_ids.shape[-1] >= self._length:
            return scores
        longer = _without(scores, self._ends)
        return longer if bool((longer > -torch.inf).any()) else scores


class AllowedTokens:
    """No other tokens than these and the end of the text."""

    def __init__(self, allowed: Iterable[int], ends: Iterable[int]) -> None:
        self._allowed = frozenset(allowed) | frozenset(ends)
        self._others: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which everything else is impossible."""
        key = (scores.shape[-1], scores.device)
        if key not in self._others:
            others = torch.ones(key[0], dtype=torch.bool)
            others[[token for token in self._allowed if token < key[0]]] = False
            self._others[key] = others.to(scores.device)
        return scores.masked_fill(self._others[key], -torch.inf)


class BadWords:
    """No sequence of tokens that spells one of these."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words if word]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which the last token of every word that is otherwise complete is impossible."""
        longest = max((len(word) for word in self._words), default=0)
        text = input_ids[0, max(0, input_ids.shape[-1] - longest) :].tolist()
        ends = [word[-1] for word in self._words if len(word) == 1 or tuple(text[1 - len(word) :]) == word[:-1]]
        return _without(scores, ends)


def _without(scores: Tensor, tokens: Iterable[int]) -> Tensor:
    """Scores [1, V] in which these tokens are impossible; those that the vocabulary does not have are so anyway."""
    ids = sorted({token for token in tokens if token < scores.shape[-1]})
    if ids:
        scores = scores.clone()
        scores[:, ids] = -torch.inf
    return scores
