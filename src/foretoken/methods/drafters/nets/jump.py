"""The predictor of jump drafting: from an upper layer's state to the next token's state in the middle of the target.

"Jump", the drafter of the package economize 0.3.2 (``tskip`` in its code).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class JumpConfig:
    """Shape of the predictor, and the layers that draft.

    Attributes:
        hidden_size: D.
        start: m, number of skipped layers at the bottom, whose output is predicted; 0: none, the input of the first
            layer is predicted; by default two thirds of all.
        stop: r, the last layer that runs; by default ``start`` + 1.
        state: u, the layer whose state of the previous token is read, from ``start`` to ``stop``, which is the default.
        width: inner width of the linear maps, the predictor's (half from the state, half from the embedding) and the
            readout's; 0: the hidden size.
        inner: width of a gated branch beside the predictor's linear one; 0: none.
        readout: whether a linear map precedes the final norm after layer ``stop``.
    """

    hidden_size: int
    start: int
    stop: int
    state: int
    width: int = 0
    inner: int = 0
    readout: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size < 2 or self.hidden_size % 2:
            raise ValueError(f"jump needs an even hidden size, not {self.hidden_size}")
        if not 0 <= self.start < self.stop:
            raise ValueError(f"jump needs 0 <= start < stop, not start={self.start} and stop={self.stop}")
        if not self.start <= self.state <= self.stop:
            raise ValueError(f"jump needs state from start={self.start} to stop={self.stop}, not {self.state}")
        if self.width < 0 or self.width % 2:
            raise ValueError(f"jump needs an even width from 0 on, not {self.width}")
        if self.inner < 0:
            raise ValueError(f"jump needs inner >= 0, not {self.inner}")

    def check(self, num_layers: int, embedding_size: int) -> None:
        """Check compatibility with a target.

        Raises:
            ValueError: the target has fewer layers than ``stop``, or embeddings of another width.
        """
        if self.stop > num_layers:
            raise ValueError(f"jump reads the output of layer {self.stop}, and the target has {num_layers} layers")
        if self.hidden_size != embedding_size:
            raise ValueError(f"jump has width {self.hidden_size}, and the target's embeddings have {embedding_size}")


class JumpNet(nn.Module):
    """``e + gain * y(z) + bias`` with ``z = [rms(s) P_s ; rms(e) P_e]``, in float32.

    ``s`` is the state of the previous token, ``e`` the embedding of the token.
    """

    def __init__(self, config: JumpConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        width = config.width or size
        self.state_proj = nn.Linear(size, width // 2, bias=False)
        self.embed_proj = nn.Linear(size, width // 2, bias=False)
        self.skip = nn.Linear(width, size, bias=False)
        spread = 1e-3  # of the initial outputs, approximately: the predictor starts as the token's embedding
        nn.init.normal_(self.skip.weight, std=spread / width**0.5)
        self.gate_proj = nn.Linear(width, config.inner, bias=False) if config.inner else None
        self.up_proj = nn.Linear(width, config.inner, bias=False) if config.inner else None
        self.down_proj = nn.Linear(config.inner, size, bias=False) if config.inner else None
        if self.down_proj is not None:
            nn.init.normal_(self.down_proj.weight, std=spread / config.inner**0.5)
        self.gain = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.narrow = nn.Linear(size, width, bias=False) if config.readout and width != size else None
        self.readout = nn.Linear(width, size, bias=False) if config.readout else None
        if self.readout is not None:
            nn.init.zeros_(self.readout.weight)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Predicted states [..., D] of tokens after layer ``start``.

        Args:
            embeddings: [..., D] of the tokens.
            states: [..., D] of the tokens before them after layer ``state``.
        """
        embedded = embeddings.float()
        z = torch.cat([self.state_proj(_rms(states.float())), self.embed_proj(_rms(embedded))], -1)
        y: Tensor = self.skip(z)
        if self.gate_proj is not None and self.up_proj is not None and self.down_proj is not None:
            y = y + self.down_proj(F.silu(self.gate_proj(z)) * self.up_proj(z))
        return embedded + self.gain * y + self.bias

    def read_out(self, states: Tensor) -> Tensor:
        """Input of the target's final norm, from states [..., D] after layer ``stop``."""
        if self.readout is None:
            return states
        wide = states.float()
        return wide + self.readout(wide if self.narrow is None else self.narrow(wide))


def _rms(rows: Tensor) -> Tensor:
    """The predictor's input norm, without weights."""
    return F.rms_norm(rows, rows.shape[-1:], eps=1e-6)
