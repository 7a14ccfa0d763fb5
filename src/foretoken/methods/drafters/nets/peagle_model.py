"""P-EAGLE's network as a :class:`~foretoken.models.base.LanguageModel`: a cache for each of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.methods.drafters.nets.peagle import PeagleNet
from foretoken.models.forward.heads.features import FeatureModel, HeadForward
from foretoken.models.network.call import NetworkCall


class PeagleForward(HeadForward):
    """The layers of the network."""

    model: PeagleNet

    def __init__(self, net: PeagleNet, *rest: Any) -> None:
        super().__init__(net, *rest)
        self.num_layers = self.depth = net.config.num_layers

    def embedded(self, ids: Tensor) -> Tensor:
        """[.., D] of ids, by the network's own embedding where it has one."""
        own = self.model.embed_tokens
        return super().embedded(ids) if own is None else F.embedding(ids, own.weight.detach()).float()

    def _keep(self, call: NetworkCall) -> Any:
        def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return call.cache.update(key, value, layer)

        return keep


class PeagleModel(FeatureModel):
    """Arguments are those of :class:`~foretoken.models.forward.heads.features.HeadForward`."""

    model: PeagleNet
    kind = PeagleForward

    @torch.no_grad()
    def mask_states(self, count: int) -> Tensor:
        """[count, D] features of places behind a text."""
        return self.model.mask_feature.float().expand(count, -1)
