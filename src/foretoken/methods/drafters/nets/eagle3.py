"""EAGLE-3's network: one wide layer over three depths of the target.  Li et al. 2025 (arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.nets.decoder import DecoderLayer, Keep, LayerConfig, Mask, RmsNorm
from foretoken.models.forward.heads.pieces import HeadParts


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """Shape of the network: the target's layer, twice as wide at the attention's input.

    Attributes:
        vocab_size: V of the target.
        draft_vocab: size V_d of the draft vocabulary, the most frequent tokens of the training text; 0 means all, and
            the default is 4,096.
        layers: depths of the target that are fused, joined by commas; k is the output of the first k layers, 0 the
            embedding.  By default 2, L // 2 and L - 3.
        share_head: use the rows of the draft vocabulary in the target's projection instead of a separate one.
    """

    vocab_size: int = 0
    draft_vocab: int = 0
    layers: str = ""
    share_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 1 or not 0 <= self.draft_vocab <= self.vocab_size:
            raise ValueError(f"eagle3 needs draft_vocab from 0 (all) to {self.vocab_size}, not {self.draft_vocab}")
        if not all(part.isdecimal() for part in self.layers.split(",")):
            raise ValueError(f"layers={self.layers!r} must be depths of the target joined by commas, for example 2,4,5")

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the fused hidden states; a depth may occur twice."""
        return tuple(f"layer:{int(part)}" for part in self.layers.split(","))

    @property
    def guessed(self) -> int:
        return self.draft_vocab or self.vocab_size


def default_layers(count: int) -> str:
    """Low, middle and high of ``count`` layers: the paper's 2, L // 2, L - 3, or thirds if these are not distinct."""
    low, middle, high = 2, count // 2, count - 3
    if not low < middle < high:
        low, middle, high = (-(-count * third // 3) for third in (1, 2, 3))
    return f"{low},{middle},{high}"


class Eagle3Net(nn.Module):
    """Predicts the next feature from the next token's embedding and a fused feature, with a norm before the head.

    The buffers ``d2t`` (int64 [V_d], offsets: the target's id of draft id i is ``i + d2t[i]``) and ``t2d`` (bool [V],
    whether a token can be drafted) define the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.input_layernorm, self.hidden_norm = RmsNorm(size, config.eps), RmsNorm(size, config.eps)
        self.midlayer = DecoderLayer(config, input_norm=False, wide=True)
        self.norm = RmsNorm(size, config.eps)
        self.lm_head = None if config.share_head else nn.Linear(size, config.guessed, bias=False)
        self.register_buffer("d2t", torch.zeros(config.guessed, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.guessed)

    def choose(self, tokens: Tensor) -> None:
        """Set the draft vocabulary to ``tokens`` [V_d], target ids in ascending order.

        Raises:
            ValueError: not V_d distinct ids of the target in ascending order.
        """
        wrong = len(tokens) != self.config.guessed or bool((tokens.diff() < 1).any())
        if wrong or int(tokens[0]) < 0 or int(tokens[-1]) >= self.config.vocab_size:
            raise ValueError(
                f"a draft vocabulary must be {self.config.guessed} ascending ids below {self.config.vocab_size}"
            )
        tokens = tokens.to(self.d2t.device)
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    def target_ids(self, tokens: Tensor) -> Tensor:
        return tokens + self.d2t[tokens]

    @property
    def vocabulary(self) -> Tensor:
        """[V_d] target ids of the draft vocabulary."""
        return self.target_ids(torch.arange(self.config.guessed, device=self.d2t.device))

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Features [..., D] from the target's hidden states at all depths, each [..., D]."""
        return self.fc(torch.cat(taps, -1))

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, mask: Mask = None, keep: Keep | None = None
    ) -> Tensor:
        """Embeddings of tokens t + 1 and features of tokens t, both [b, n, D] -> features of tokens t + 1 [b, n, D].

        Features are fused ones or earlier outputs; the residual stream carries them unchanged.
        """
        beside = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], -1)
        return self.midlayer(features, positions, mask, keep, beside)

    def head_state(self, output: Tensor) -> Tensor:
        """Input [..., D] of the vocabulary projection."""
        return self.norm(output)

    def pieces(self) -> HeadParts:
        norms: dict[str, Any] = {"of_beside": self.input_layernorm, "of_state": self.hidden_norm, "last": self.norm}
        return HeadParts(self.midlayer, wide=True, fuse=self.fc, **norms)
