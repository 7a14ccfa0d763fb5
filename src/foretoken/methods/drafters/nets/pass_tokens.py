"""PaSS's look-ahead tokens: k rows behind the target's token embedding.  Monea et al. 2023 (arXiv 2311.13581)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PassTokensConfig:
    """Shape of the rows.

    Attributes:
        hidden_size: width of the target's token embedding.
        k: look-ahead tokens; number i (from 1) stands i places behind a token and guesses the one i + 1 places behind.
    """

    hidden_size: int
    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"pass_tokens needs k >= 1, not {self.k}")


class PassTokens(nn.Module):
    """All that is learned: ``learned`` [1, k, D].

    Three-dimensional because the trainer takes whatever has two dimensions for a matrix that mixes features, and these
    are embeddings: their rows have nothing to do with each other.
    """

    def __init__(self, config: PassTokensConfig) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(1, config.k, config.hidden_size))

    @property
    def rows(self) -> Tensor:
        """[k, D] what the look-ahead tokens are embedded as: a view, which changes as they are trained."""
        return self.learned[0]
