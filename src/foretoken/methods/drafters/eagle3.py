"""A layer over three depths of the target drafts from a small vocabulary, as a growing tree.

EAGLE-3, Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.store import load_net
from foretoken.models.base import LanguageModel
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts


class Eagle3Drafter(FeatureDrafter):
    """A dynamic tree over the draft vocabulary.

    The network reads fused features for committed tokens and its own outputs for draft tokens.
    """

    name = "eagle3"
    net_config = Eagle3Config
    net_class = Eagle3Net

    @property
    def net(self) -> Eagle3Net:
        return self.model.model

    @property
    def taps(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(self.net.config.taps))

    @classmethod
    def build(
        cls, path: str | None, context: BuildContext, *, nodes: int | None = None, vocab: str = "", **options: Any
    ) -> Eagle3Drafter:
        """Build from a spec ``eagle3[:FOLDER]``.

        Args:
            vocab: draft vocabulary, of the trained one: its N lowest ids, or those in a JSON file; by default all.
        """
        net, parts, _ = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        trained = net.vocabulary.tolist()
        ids = chosen_ids(vocab, context, parts.vocab_size, trained) if vocab else None
        model = FeatureModel(net, parts, context.target, vocabulary_head(net, parts, ids))
        return cls.sized(model, context.target, nodes, options)

    @classmethod
    def of(cls, net: Eagle3Net, parts: TargetParts, target: LanguageModel, **options: Any) -> Eagle3Drafter:
        """Construct the drafter over a network in its current state; the projection is a copy."""
        return cls(FeatureModel(net, parts, target, vocabulary_head(net, parts)), **options)

    @torch.inference_mode()
    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        states = torch.cat([hidden[tap] for tap in self.net.config.taps], -1)
        return self.model.fused(self.net.normed(states.float() if self.net.fused_norms else states))


def vocabulary_head(net: Eagle3Net, parts: TargetParts, ids: Tensor | None = None) -> DraftHead:
    """The projection to ``ids`` [V_d], by default all of the network's tokens, on the target's device."""
    net = net.to(parts.device)
    weight = None if net.lm_head is None else net.lm_head.weight.detach()
    if ids is not None and weight is not None:
        row_of = {token: row for row, token in enumerate(net.vocabulary.tolist())}
        weight = weight[[row_of[token] for token in ids.tolist()]]
    return DraftHead(parts, net.vocabulary if ids is None else ids, weight)


def draft_logits(net: Eagle3Net, parts: TargetParts, states: Tensor) -> Tensor:
    """Logits [m, V_d] of states [m, D] after the network's norm; gradients flow through."""
    if net.lm_head is not None:
        return net.lm_head(states)
    return parts.logits(states, net.vocabulary)
