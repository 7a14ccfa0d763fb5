"""Log-probabilities of tokens, as OpenAI's ``logprobs`` reports them: the model's own, before any sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.largest import largest


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one token.

    Attributes:
        logprob: natural log-probability.
        rank: its place among all tokens by likelihood, from 1; behind those that are equally likely.
        top: the most likely tokens with theirs, in descending order; the same number for the token itself.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of the n next tokens, and of the ``count`` most likely ones, from logits [n, V]."""
    if not tokens:
        return []
    wide = torch.log_softmax(logits[: len(tokens)].to(torch.promote_types(logits.dtype, torch.float32)), -1)
    chosen = wide.gather(1, torch.tensor(tokens, device=wide.device)[:, None])
    ranks = (wide >= chosen).sum(1).tolist()
    values, ids = largest(wide, min(count, wide.shape[1]))
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, rank, tuple(zip(ids, values, strict=True)))
        for token, value, rank, (ids, values) in zip(tokens, chosen[:, 0].tolist(), ranks, tops, strict=True)
    ]
