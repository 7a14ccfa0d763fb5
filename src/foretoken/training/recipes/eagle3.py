"""Training of EAGLE-3: drafts from positions all over a text, with the target's distribution as the only label (arXiv
2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.eagle3 import Eagle3Drafter, draft_logits
from foretoken.methods.drafters.nets.eagle3 import LAST, Eagle3Config, Eagle3Net, default_layers
from foretoken.training.recipes.base import Batch, check_depths, token_counts
from foretoken.training.recipes.features import FeatureRecipe, TopKSettings


@dataclass(frozen=True)
class Eagle3Settings(TopKSettings, Eagle3Config):
    """The network's shape and its loss.

    Attributes:
        unroll: trained draft steps (the paper's 7 cost twice as much).
        decay: a step's weight is ``decay`` times that of the step before it.
    """

    unroll: int = 4
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unroll < 1 or self.decay <= 0:
            raise ValueError(f"eagle3 needs unroll >= 1 and decay > 0, not {self.unroll} and {self.decay}")


class Eagle3Recipe(FeatureRecipe):
    """Training-time test: the network is trained on its own outputs, as in drafting."""

    config_class: ClassVar[type[Any]] = Eagle3Settings
    fixed = (*FeatureRecipe.fixed, "vocab_size")
    target_defaults: ClassVar[tuple[str, ...]] = ("draft_vocab", "layers")
    drafter_class: ClassVar[type[Any]] = Eagle3Drafter
    config: Eagle3Settings
    net: Eagle3Net

    @property
    def taps(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self.config.taps, "last")))

    def from_target(self) -> dict[str, Any]:
        return {
            **super().from_target(),
            "vocab_size": self.parts.vocab_size,
            # Size of the draft vocabulary, if the target has as many tokens
            "draft_vocab": min(self.parts.vocab_size, 4096),
            "layers": default_layers(self.parts.num_layers),
        }

    def configure(self, settings: Mapping[str, str]) -> Any:
        config: Eagle3Settings = super().configure(settings)
        if config.layers != LAST:
            check_depths("layers", config.layers, self.parts.num_layers)
        return config

    @property
    def num_layers(self) -> int:
        return self.net.num_layers

    def embedded(self, ids: Tensor) -> Tensor:
        """By the network's own embedding if it has one."""
        own = self.net.embed_tokens
        return super().embedded(ids) if own is None else F.embedding(ids, own.weight)

    def build(self) -> nn.Module:
        """A new network over the first tokens, started as the target's own head on its deepest fused state."""
        net: Any = super().build()
        size = self.config.hidden_size
        if net.fc is not None:
            net.fc.weight.data.mul_(0.1)[:, -size:] += torch.eye(size)
        if net.embed_tokens is not None:
            net.embed_tokens.weight.data.copy_(self.parts.embed.weight.detach()[: self.config.vocab_size].float())
        weight = getattr(self.parts.final_norm, "weight", None)
        if isinstance(weight, Tensor):
            net.norm.weight.data.copy_(weight.detach())
        self._start_head(net)
        return net

    def _start_head(self, net: Any) -> None:
        if net.lm_head is not None:
            net.lm_head.weight.data.copy_(self.parts.head.weight.detach()[net.vocabulary])

    def prepare(self, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Set the draft vocabulary to the most frequent tokens of the training text; the lower id wins a tie."""
        self.net.choose(torch.from_numpy(most_frequent(tokens, self.config.vocab_size, self.config.num_draft_ids)))
        self._start_head(self.net)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        features = self.net.fuse([batch.taps[tap].float() for tap in self.config.taps])
        return self.unrolled_loss(batch, features, self.config.unroll, self.config.decay, generator)

    @property
    def draft_ids(self) -> Tensor:
        return self.net.vocabulary

    def draft_logits(self, output: Tensor, step: int = 0) -> Tensor:
        return draft_logits(self.net, self.parts, self.net.head_state(output))

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return Eagle3Drafter.of(self.net, self.parts, self.target, **self.shape)


def most_frequent(
    tokens: np.ndarray[Any, np.dtype[Any]], vocab_size: int, count: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The ``count`` most frequent of ``vocab_size`` ids in a text, in ascending order; the lower id wins a tie."""
    counts = token_counts(tokens, vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count])
