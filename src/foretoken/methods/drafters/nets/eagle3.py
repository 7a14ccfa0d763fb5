"""EAGLE-3's network: one wide layer over three depths of the target.  Li et al. 2025 (arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.nets.decoder import DecoderLayer, Keep, LayerConfig, Mask, RmsNorm
from foretoken.models.forward.heads.pieces import HeadParts

LAST = "last"
"""Value of ``layers`` for the target's state after its final norm."""


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """Shape of the network: the target's layer, twice as wide at the attention's input.

    Attributes:
        vocab_size: V of the target.
        draft_vocab: size V_d of the draft vocabulary, the most frequent tokens of the training text; 0 means all, and
            the default is 4,096.
        layers: depths of the target that are fused, joined by commas; k is the output of the first k layers, 0 the
            embedding.  By default 2, L // 2 and L - 3.  ``last``: the state after the final norm, as it is.
        share_head: use the rows of the draft vocabulary in the target's projection instead of a separate one.
        num_layers: decoder layers, of which only the first one reads the embedding.
        norm_before_residual: whether the residual stream begins with the normed feature.
        norm_before_fc: whether the fused states are normed side by side, with one norm.
        fc_norm: whether they are normed one by one, each with its own norm.
        norm_output: whether a step passes its state to the next one behind the last norm (EAGLE-3.1).
        head_norms: whether every head of the queries and keys is normed (Qwen3).
        own_embedding: whether it has a token embedding, trained with the rest, instead of the target's (P-EAGLE's paper
            trains one).
    """

    vocab_size: int = 0
    draft_vocab: int = 0
    layers: str = ""
    share_head: bool = False
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_norms: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 1 or not 0 <= self.draft_vocab <= self.vocab_size:
            raise ValueError(f"eagle3 needs draft_vocab from 0 (all) to {self.vocab_size}, not {self.draft_vocab}")
        if self.layers != LAST and not all(part.isdecimal() for part in self.layers.split(",")):
            raise ValueError(f"layers={self.layers!r} must be depths of the target joined by commas, for example 2,4,5")
        if self.num_layers < 1:
            raise ValueError(f"eagle3 needs num_layers >= 1, not {self.num_layers}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are two norms in one place: set one of them")
        if self.layers == LAST and (self.norm_before_fc or self.fc_norm):
            raise ValueError("norm_before_fc and fc_norm need fused depths: layers=last has no fc")

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the fused hidden states; a depth may occur twice."""
        if self.layers == LAST:
            return (LAST,)
        return tuple(f"layer:{int(part)}" for part in self.layers.split(","))

    @property
    def num_draft_ids(self) -> int:
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
        self.config, count = config, len(config.taps)
        # One norm of all fused states, or one of each
        widths = [count * size] * config.norm_before_fc + [size] * count * config.fc_norm
        self.fused_norms = nn.ModuleList(RmsNorm(width, config.eps) for width in widths)
        self.fc = None if config.layers == LAST else nn.Linear(count * size, size, bias=False)
        self.input_layernorm, self.hidden_norm = RmsNorm(size, config.eps), RmsNorm(size, config.eps)
        self.midlayer = DecoderLayer(config, input_norm=False, wide=True, head_norms=config.head_norms)
        further = range(1, config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, head_norms=config.head_norms) for _ in further)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.norm = RmsNorm(size, config.eps)
        self.lm_head = None if config.share_head else nn.Linear(size, config.num_draft_ids, bias=False)
        self.register_buffer("d2t", torch.zeros(config.num_draft_ids, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.num_draft_ids)

    def choose(self, tokens: Tensor) -> None:
        """Set the draft vocabulary to ``tokens`` [V_d], target ids in ascending order.

        Raises:
            ValueError: not V_d distinct ids of the target in ascending order.
        """
        wrong = len(tokens) != self.config.num_draft_ids or bool((tokens.diff() < 1).any())
        if wrong or int(tokens[0]) < 0 or int(tokens[-1]) >= self.config.vocab_size:
            raise ValueError(
                f"a draft vocabulary must be {self.config.num_draft_ids} ascending ids below {self.config.vocab_size}"
            )
        tokens = tokens.to(self.d2t.device)
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    def target_ids(self, tokens: Tensor) -> Tensor:
        return tokens + self.d2t[tokens]

    @property
    def vocabulary(self) -> Tensor:
        """[V_d] target ids of the draft vocabulary."""
        return self.target_ids(torch.arange(self.config.num_draft_ids, device=self.d2t.device))

    @property
    def num_layers(self) -> int:
        return 1 + len(self.layers)

    def normed(self, states: Tensor) -> Tensor:
        """Concatenated hidden states [..., n D] of the target, as ``fc`` reads them."""
        if not self.fused_norms:
            return states
        parts = states.chunk(len(self.fused_norms), -1)
        return torch.cat([norm(part) for norm, part in zip(self.fused_norms, parts, strict=True)], -1)

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Features [..., D] from the target's hidden states at all depths, each [..., D]."""
        states = self.normed(torch.cat(taps, -1))
        return states if self.fc is None else self.fc(states)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, mask: Mask = None, keep: Any = None
    ) -> Tensor:
        """Embeddings of tokens t + 1 and features of tokens t, both [b, n, D] -> features of tokens t + 1 [b, n, D].

        Features are fused ones or earlier outputs; the residual stream carries them, unchanged or normed.

        Args:
            keep: a ``Keep``, or a ``LayerKeep`` if there are several layers.
        """
        normed = self.hidden_norm(features)
        beside = torch.cat([self.input_layernorm(embeddings), normed], -1)
        stream = normed if self.config.norm_before_residual else features
        x: Tensor = self.midlayer(stream, positions, mask, self._of_layer(keep, 0), beside)
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, positions, mask, self._of_layer(keep, index))
        return self.norm(x) if self.config.norm_output else x

    def _of_layer(self, keep: Any, index: int) -> Keep | None:
        return keep if keep is None or self.num_layers == 1 else partial(keep, index)

    def head_state(self, output: Tensor) -> Tensor:
        """Input [..., D] of the vocabulary projection."""
        return output if self.config.norm_output else self.norm(output)

    def pieces(self) -> HeadParts:
        config = self.config
        norms: dict[str, Any] = {"of_beside": self.input_layernorm, "last": self.norm}
        norms["before_all" if config.norm_before_residual else "of_state"] = self.hidden_norm
        return HeadParts(
            self.midlayer,
            wide=True,
            further=list(self.layers),
            fuse=self.fc,
            hands_on_normed=config.norm_output,
            **norms,
        )
