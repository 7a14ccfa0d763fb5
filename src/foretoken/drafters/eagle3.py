"""A layer over three depths of the target guesses from a small vocabulary; its drafts grow as a tree.

EAGLE-3, Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.drafters.base import BuildContext
from foretoken.drafters.features import FeatureDrafter, load_net
from foretoken.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.models.base import LanguageModel
from foretoken.models.features import FeatureModel
from foretoken.models.packing import Projection, pays_packed
from foretoken.models.parts import TargetParts


class Eagle3Drafter(FeatureDrafter):
    """A dynamic tree over the draft vocabulary.

    The network reads fused features for committed tokens and its own outputs for drafted ones.
    """

    name = "eagle3"

    def __init__(
        self,
        model: FeatureModel,
        nodes: int = 16,
        depth: int = 5,
        width: int = 4,
        grow: str = "eagle2",
        draw: str = "iid",
    ) -> None:
        super().__init__(model, nodes, depth, width, grow, draw)
        self.net: Eagle3Net = model.model
        self._ids: Tensor | None = None
        self.taps = tuple(dict.fromkeys(self.net.config.taps))

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> Eagle3Drafter:
        """From a spec ``eagle3[:FOLDER]``.

        Raises:
            ValueError: no folder, one trained for another target, or damaged files.
        """
        net, parts = load_net(context, cls.name, path, Eagle3Config, Eagle3Net)
        ids = net.vocabulary
        if bool(((ids < 0) | (ids >= parts.vocab_size)).any()):
            raise ValueError(f"d2t names tokens outside the target's vocabulary of {parts.vocab_size}: copy it again")
        model = FeatureModel(net.to(parts.device), parts, context.target, draft_projection(net, parts))
        return cls.sized(model, context.target, options)

    @classmethod
    def of(cls, net: Eagle3Net, parts: TargetParts, target: LanguageModel, **options: Any) -> Eagle3Drafter:
        """A drafter over a network as it is now: the projection is a copy."""
        net = net.to(parts.device)
        return cls(FeatureModel(net, parts, target, draft_projection(net, parts)), **options)

    @torch.inference_mode()
    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        """Fused features [n, D]."""
        return self.net.fuse([hidden[tap].float() for tap in self.net.config.taps])

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return self.net.target_ids(tokens)

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids: what the draft vocabulary lacks is impossible."""
        if self._ids is None:
            self._ids = self.net.target_ids(torch.arange(logits.shape[-1], device=logits.device))
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        wide[:, self._ids] = logits
        return wide


def draft_logits(net: Eagle3Net, parts: TargetParts, states: Tensor) -> Tensor:
    """Logits [m, V_d] of states [m, D] behind the network's norm; gradients flow through."""
    if net.lm_head is not None:
        own: Tensor = net.lm_head(states)
        return own
    weight, bias = target_rows(net, parts)
    bias = None if bias is None else bias.to(states.dtype)
    return parts.behind(torch.nn.functional.linear(states, weight.to(states.dtype), bias))


def target_rows(net: Eagle3Net, parts: TargetParts) -> tuple[Tensor, Tensor | None]:
    """Rows [V_d, D] of the target's projection that belong to the draft vocabulary, and their biases."""
    bias = parts.head.bias
    return parts.head.weight.detach()[net.vocabulary], None if bias is None else bias.detach()[net.vocabulary]


def draft_projection(net: Eagle3Net, parts: TargetParts) -> Callable[[Tensor], Tensor]:
    """The same for drafting, float32: in packed bfloat16 where that is the fastest way."""
    weight, bias = target_rows(net, parts) if net.lm_head is None else (net.lm_head.weight.detach(), None)
    half = weight.to(torch.bfloat16)
    weight = half if pays_packed(half) else weight
    packed = Projection(weight, bias)
    behind = parts.behind if net.lm_head is None else lambda logits: logits
    return lambda states: behind(packed(states).float())
