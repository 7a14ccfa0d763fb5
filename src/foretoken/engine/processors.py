"""Logits processors of requests: pure functions of (prefix, scores), and so exact on every branch of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


class OfAnswer:
    """A processor that sees only the answer, without the ``skipped`` tokens before it.

    For a model with an encoder, Transformers passes the decoder's tokens to processors; a constraint sees only the
    output.
    """

    def __init__(self, processor: Callable[[Tensor, Tensor], Tensor], skipped: int) -> None:
        self._processor, self._skipped = processor, skipped

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The processor's scores [1, V] for the answer so far."""
        return self._processor(input_ids[:, self._skipped :], scores)


class MinTokens:
    """Forbids the end of the text before ``count`` output tokens, unless nothing else may follow.

    It runs after all other rules, so a complete constraint or an exhausted set of allowed tokens takes precedence.
    """

    def __init__(self, ends: Iterable[int], prompt_length: int, count: int) -> None:
        self._ends, self._length = frozenset(ends), prompt_length + count

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] without the end tokens, while the output is too short and may continue."""
        if input_ids.shape[-1] >= self._length:
            return scores
        longer = _without(scores, self._ends)
        return longer if bool((longer > -torch.inf).any()) else scores


class AllowedTokens:
    """Allows only these tokens and the end of the text."""

    def __init__(self, allowed: Iterable[int], ends: Iterable[int]) -> None:
        self._allowed = frozenset(allowed) | frozenset(ends)
        self._others: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] without all other tokens."""
        key = (scores.shape[-1], scores.device)
        if key not in self._others:
            others = torch.ones(key[0], dtype=torch.bool)
            others[[token for token in self._allowed if token < key[0]]] = False
            self._others[key] = others.to(scores.device)
        return scores.masked_fill(self._others[key], -torch.inf)


class BadWords:
    """Forbids these sequences of tokens."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words if word]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] without the last token of every word that is otherwise complete."""
        longest = max((len(word) for word in self._words), default=0)
        text = input_ids[0, max(0, input_ids.shape[-1] - longest) :].tolist()
        ends = [word[-1] for word in self._words if len(word) == 1 or tuple(text[1 - len(word) :]) == word[:-1]]
        return _without(scores, ends)


def _without(scores: Tensor, tokens: Iterable[int]) -> Tensor:
    """Scores [1, V] without these tokens; ids outside the vocabulary are ignored."""
    ids = sorted({token for token in tokens if token < scores.shape[-1]})
    if ids:
        scores = scores.clone()
        scores[:, ids] = -torch.inf
    return scores
