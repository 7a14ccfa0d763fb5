"""Divergences between a draft model's distribution q and the target's distribution p, per token.

DistillSpec, Zhou et al. 2023 (https://arxiv.org/abs/2310.08461), table of divergences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.methods.drafters.learning.losses import check_loss


def log_distribution(logits: Tensor) -> Tensor:
    """Float32 log-probabilities [..., V] of logits [..., V], none below -1e4.

    The limit is finite, so that 0 * log 0 is 0, and its float32 exponential is exactly 0.
    """
    return torch.log_softmax(logits.float(), -1).clamp(min=-1e4)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q) [...] in nats; q must cover p."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p) [...] in nats; q must stay within p."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) [...] in nats, with m = beta p + (1 - beta) q."""
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    p_side, q_side = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * p_side + (1 - beta) * q_side).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum |p - q| / 2 = 1 - sum min(p, q) [...]: the probability that a draft token of distribution q is rejected."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def divergence(name: str, target: Tensor, draft: Tensor, beta: float = 0.5) -> Tensor:
    """The divergence ``name`` per row [n] of two logits [n, V]; gradients flow into both.

    Raises:
        ValueError: as :func:`~foretoken.methods.drafters.learning.losses.check_loss`.
    """
    check_loss(name, beta)
    log_p, log_q = log_distribution(target), log_distribution(draft)
    if name == "jsd":
        return jensen_shannon(log_p, log_q, beta)
    return {"fkl": forward_kl, "rkl": reverse_kl, "tvd": total_variation}[name](log_p, log_q)
