"""PaSS's look-ahead tokens: k rows after the target's token embedding.  Monea et al. 2023 (arXiv 2311.13581)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PassTokensConfig:
    """Shape of the rows.

    Attributes:
        hidden_size: width of the target's token embedding.
        k: look-ahead tokens; number i (from 1) is i positions after a token and predicts position i + 1 after it.
    """

    hidden_size: int
    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"pass_tokens needs k >= 1, not {self.k}")


class PassTokens(nn.Module):
    """The learned rows: ``learned`` [1, k, D].

    Three-dimensional because the trainer treats two dimensions as a matrix that mixes features, while these rows are
    independent embeddings.
    """

    def __init__(self, config: PassTokensConfig) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(1, config.k, config.hidden_size))

    @property
    def rows(self) -> Tensor:
        """[k, D] embeddings of the look-ahead tokens: a view, which changes in training."""
        return self.learned[0]
