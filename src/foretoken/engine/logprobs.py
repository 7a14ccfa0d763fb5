"""Log-probabilities of tokens, as OpenAI's ``logprobs`` reports them: of the model itself, before any sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.largest import largest


@dataclass(frozen=True)
class TokenLogprobs:
    """One token.

    Attributes:
        logprob: its natural log-probability.
        top: the likeliest tokens and theirs, the likeliest first.  The token's own value is the same number in both.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """What logits [n, V] say of the n tokens that followed, and of the ``count`` likeliest ones."""
    if not tokens:
        return []
    wide = torch.log_softmax(logits[: len(tokens)].to(torch.promote_types(logits.dtype, torch.float32)), -1)
    chosen = wide.gather(1, torch.tensor(tokens, device=wide.device)[:, None])[:, 0].tolist()
    values, ids = largest(wide, min(count, wide.shape[1]))
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, chosen, tops, strict=True)
    ]
