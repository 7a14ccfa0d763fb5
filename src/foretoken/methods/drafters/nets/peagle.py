"""P-EAGLE: EAGLE-3 with more layers, and a learned state for unknown positions (arXiv 2602.01469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.methods.drafters.nets.decoder import DecoderLayer, Keep, Mask
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.models.forward.heads.features import FeatureModel, HeadForward
from foretoken.models.forward.heads.lean import HeadRun
from foretoken.models.network.call import NetworkCall

DEEPEST = 64
"""Maximum positions of a pass."""


@dataclass(frozen=True)
class PeagleConfig(Eagle3Config):
    """Shape of the network.

    Attributes:
        num_layers: decoder layers, including the wide one.
        places: positions that it was trained to predict in one pass.
        mask_token: id whose embedding accompanies the learned state.
        own_embedding: train a token embedding too, as in the paper, instead of reading the target's.
    """

    num_layers: int = 4
    places: int = 8
    mask_token: int = 0
    own_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1 or not 1 <= self.places <= DEEPEST:
            raise ValueError(
                f"peagle needs num_layers >= 1 and places from 1 to {DEEPEST}, not {self.num_layers} and {self.places}"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token must be a token of the target, from 0 to {self.vocab_size - 1}, not {self.mask_token}"
            )


class PeagleNet(Eagle3Net):
    """EAGLE-3's inputs; a position after the sequence has the mask's embedding and the learned ``mask_hidden``."""

    config: PeagleConfig

    def __init__(self, config: PeagleConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers - 1))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.taps) * config.hidden_size))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None

    @property
    def mask_feature(self) -> Tensor:
        """[D] the feature of a position after the sequence."""
        return self.fc(self.mask_hidden)[0, 0]

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, mask: Mask = None, keep: Any = None
    ) -> Tensor:
        """[b, n, D] of embeddings and features [b, n, D].

        The arguments are those of :class:`~foretoken.methods.drafters.nets.eagle3.Eagle3Net`, except that ``keep`` is a
        ``LayerKeep`` of all layers (or runs a single one itself).
        """
        x = super().forward(embeddings, features, positions, mask, _of_layer(keep, 0))
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, positions, mask, _of_layer(keep, index))
        return x


def _of_layer(keep: Any, index: int) -> Keep | None:
    if keep is None or isinstance(keep, HeadRun):
        return keep
    return lambda key, value: keep(index, key, value)


class _PeagleForward(HeadForward):
    model: PeagleNet

    def __init__(self, net: PeagleNet, *rest: Any) -> None:
        super().__init__(net, *rest)
        self.num_layers = self.depth = net.config.num_layers

    def embedded(self, ids: Tensor) -> Tensor:
        """[.., D] of ids, by the network's own embedding if it has one."""
        embedding = self.model.embed_tokens
        return super().embedded(ids) if embedding is None else F.embedding(ids, embedding.weight.detach()).float()

    def _keep(self, call: NetworkCall) -> Any:
        return lambda layer, key, value: call.cache.update(key, value, layer)


class PeagleModel(FeatureModel):
    """Arguments are those of :class:`~foretoken.models.forward.heads.features.HeadForward`."""

    model: PeagleNet
    kind = _PeagleForward

    @torch.no_grad()
    def mask_states(self, count: int) -> Tensor:
        """[count, D] features of positions after a sequence."""
        return self.model.mask_feature.float().expand(count, -1)
