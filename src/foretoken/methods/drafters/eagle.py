"""One decoder layer predicts the target's next feature; its drafts grow as a tree by their confidence.

EAGLE, Li et al. 2024 (arXiv 2401.15077), with the dynamic trees of EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from typing import Any

from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.store import load_net
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel


class EagleDrafter(FeatureDrafter):
    """Drafts a dynamic tree of the head's predictions."""

    name = "eagle"
    net_config = EagleConfig
    net_class = EagleNet

    @classmethod
    def build(
        cls, path: str | None, context: BuildContext, *, nodes: int | None = None, vocab: str = "", **options: Any
    ) -> EagleDrafter:
        """Build from a spec ``eagle[:FOLDER]``."""
        net, parts, measured = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        ids = chosen_ids(vocab, context, parts.vocab_size, measured.get("frequent", ()), others=True)
        model = FeatureModel(net, parts, context.target, DraftHead(parts, ids))
        return cls.sized(model, context.target, nodes, options)
