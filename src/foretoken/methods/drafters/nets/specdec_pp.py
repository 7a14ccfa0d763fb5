"""SpecDec++'s stop head: the probability that the target accepts the draft model's last token.  Arxiv 2405.19715."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class StopHeadConfig:
    """Shape of the head, and its training settings.

    Attributes:
        hidden_size: D of the draft model.
        blocks: number of residual blocks.
        mix: share of a text's tokens that are replaced by draft tokens in training.
        mismatch: weight of a rejection in the loss, in acceptances.
        judge: hash of the embedding of the target whose acceptance it learns (``Fingerprint.weights``).
        judge_layers: hash of that target's layers (``Fingerprint.layers``); empty in older files.
    """

    hidden_size: int
    blocks: int = 3
    mix: float = 0.15
    mismatch: float = 6.0
    judge: str = ""
    judge_layers: str = ""

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise ValueError(f"specdec_pp needs blocks >= 0, not {self.blocks}")
        if not 0 < self.mix <= 1:
            raise ValueError(f"specdec_pp needs a share mix in (0, 1], not {self.mix}")
        if self.mismatch <= 0:
            raise ValueError(f"specdec_pp needs a weight mismatch > 0, not {self.mismatch}")


class StopHead(nn.Module):
    """``h <- h + silu(W h + b)``, ``blocks`` times, then one linear map to the log-odds that the token is accepted."""

    def __init__(self, config: StopHeadConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.blocks))
        self.out = nn.Linear(size, 1)
        nn.init.zeros_(self.out.weight)  # every token is equally likely to be accepted at first

    def forward(self, states: Tensor) -> Tensor:
        """Log-odds [...] from the draft model's states [..., D] after the tokens."""
        for block in self.blocks:
            states = states + F.silu(block(states))
        return self.out(states)[..., 0]


def weighted_loss(log_odds: Tensor, acceptance: Tensor, mismatch: float) -> Tensor:
    """Cross-entropy in nats with soft labels, rejections counted ``mismatch`` times; a mean by weight.

    Args:
        log_odds: [m] of the head.
        acceptance: [m] acceptance probability of each token: ``min(1, p/q)``.
        mismatch: weight of a rejection.
    """
    log_odds, rejected = log_odds.float(), mismatch * (1 - acceptance)
    total = (acceptance * F.softplus(-log_odds) + rejected * F.softplus(log_odds)).sum()
    return total / (acceptance + rejected).sum().clamp(min=1e-9)  # without draft tokens the loss is 0


def best_constant(acceptance: Tensor, mismatch: float) -> Tensor:
    """The log-odds of a head that cannot distinguish tokens: the constant minimum of ``weighted_loss``."""
    return torch.logit(acceptance.mean() / (acceptance + mismatch * (1 - acceptance)).mean(), eps=1e-6)
