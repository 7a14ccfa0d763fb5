"""Tokens of several requests with noise, in shared calls where that saves time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from foretoken.core import argmaxes
from foretoken.core.sampling import Sampler


def fixed_tokens(
    samplers: Sequence[Sampler], logits: Sequence[Tensor], lengths: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The tokens that several requests with noise take: the argmax of each one's ``ranking``.

    Args:
        samplers: of requests with the same recipe, so that the first one's probabilities apply to all.
        logits: [N_i, V] per request.
        lengths: N_i per request, as for :meth:`foretoken.core.sampling.Sampler.ranking`.
    """
    if samplers[0].cuts and logits[0].device.type == "cpu":
        return [
            sampler.winners(rows, positions, None)
            for sampler, rows, positions in zip(samplers, logits, lengths, strict=True)
        ]
    tokens = iter(argmaxes(race(samplers, logits, lengths))[0])
    return [list(islice(tokens, len(each))) for each in lengths]


def race(samplers: Sequence[Sampler], logits: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> Tensor:
    """[N, V] scores whose argmax is the token, all rows of all requests; arguments as for :func:`fixed_tokens`."""
    if len(samplers) == 1:
        return samplers[0].with_noise(samplers[0].log_probs(logits[0]), lengths[0])
    log_probs = samplers[0].log_probs(torch.cat(list(logits)))
    if log_probs.device.type == "cpu":
        parts = log_probs.split([*map(len, lengths)])
        each = zip(samplers, parts, lengths, strict=True)
        return torch.cat([sampler.with_noise(part, positions) for sampler, part, positions in each])
    noise = [
        row for sampler, each in zip(samplers, lengths, strict=True) for row in sampler.noise_rows(each, log_probs)
    ]
    return torch.stack(noise).add_(log_probs)
