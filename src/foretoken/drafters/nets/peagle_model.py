"""P-EAGLE's network as a :class:`~foretoken.models.base.LanguageModel`: a cache for each of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.drafters.nets.peagle import PeagleNet
from foretoken.models.base import LanguageModel
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import SCRATCH_ROOM
from foretoken.models.network.call import Call


class PeagleModel(FeatureModel):
    """Arguments are those of :class:`~foretoken.models.features.FeatureModel`."""

    model: PeagleNet

    def __init__(self, net: PeagleNet, parts: TargetParts, target: LanguageModel, project: Any | None = None) -> None:
        super().__init__(net, parts, target, project)
        self.num_layers = net.config.num_layers
        self.cache = TreeCache(self.num_layers, self.context_length + SCRATCH_ROOM)

    def embedded(self, ids: Tensor) -> Tensor:
        """[.., D] of ids, by the network's own embedding where it has one."""
        own = self.model.embed_tokens
        return super().embedded(ids) if own is None else F.embedding(ids, own.weight.detach()).float()

    def _keep(self, call: Call) -> Any:
        def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return call.cache.update(key, value, layer)

        return keep

    @torch.no_grad()
    def mask_states(self, count: int) -> Tensor:
        """[count, D] features of places behind a text."""
        return self.model.mask_feature.float().expand(count, -1)
