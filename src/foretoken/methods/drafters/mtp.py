"""Multi-token prediction modules, a recursive one or several in sequence; also those of the target's checkpoint.

DeepSeek-V3 (arXiv 2412.19437); one module used recursively as in FastMTP.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet, module_for
from foretoken.methods.drafters.nets.store import build_net, read_description
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import USUAL
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.mtp import FEEDS, target_layer_module
from foretoken.models.forward.heads.stacked import StackedModel, StackedModules
from foretoken.models.forward.parts import TargetParts


def has_head(context: BuildContext) -> bool:
    """Whether the target's checkpoint holds a head that can run.

    False for a network passed by the caller, whose files would be read with every request.
    """
    if not isinstance(context.source, str | Path) or not context.target.capabilities.taps:
        return False
    try:
        if context.has_native_head():
            MtpDrafter.build(None, context)
            return True
    except (ValueError, OSError):  # tensors are missing or of another shape: the target loads without its head
        pass
    return False


class MtpDrafter(FeatureDrafter):
    """A chain of the module's likeliest tokens; a tree with ``width`` above 1.

    Of several modules the first one fills the first level, the second one the second, and the last one all further
    levels.

    Args:
        nodes: draft nodes that are kept of all candidates.
    """

    name = "mtp"
    net_config = MtpConfig
    net_class = MtpNet
    chain = MappingProxyType({})  # it is one unless a spec asks for more
    traits = replace(FeatureDrafter.traits, free_for=has_head)

    def __init__(
        self,
        model: FeatureModel,
        nodes: int = 4,
        depth: int = 4,
        width: int = 1,
        grow: str = "eagle2",
        draw: str = "iid",
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        super().__init__(model, nodes, depth, width, grow, draw, window, sink, tree)

    @classmethod
    def build(
        cls, path: str | None, context: BuildContext, *, feed: str = "", vocab: str = "", **options: Any
    ) -> MtpDrafter:
        """Build from a spec ``mtp[:FOLDER]``; without a folder from the head of the target's checkpoint.

        Args:
            feed: the state that a step passes to the next one, behind or before the module's norm: ``post_norm`` or
                ``pre_norm``; by default as the module was trained (``post_norm`` for those of checkpoints).
            vocab: as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        """
        if feed not in ("", *FEEDS):
            raise ValueError(f"mtp needs {' or '.join(f'feed={name}' for name in FEEDS)}, not {feed!r}")
        target = context.target
        parts = TargetParts(target)
        head = DraftHead(parts, chosen_ids(vocab, context, parts.vocab_size))
        if path is None and not context.has_trained(cls.name):
            modules = [
                target_layer_module(parts.network, weights, feed or "post_norm") for weights in context.native_head()
            ]
            net: nn.Module = StackedModules(modules) if len(modules) > 1 else modules[0]
        else:
            folder = context.folder(cls.name, path)
            description = read_description(folder, cls.name, parts.fingerprint())
            config = {**description["config"], **({"feed": feed} if feed else {})}
            net = build_net(folder, lambda shape: module_for(shape, parts.network), MtpConfig, {"config": config})
        return cls(cls.model_of(net, parts, target, head), **options)

    @staticmethod
    def model_of(net: nn.Module, parts: TargetParts, target: LanguageModel, head: DraftHead) -> FeatureModel:
        kind = StackedModel if isinstance(net, StackedModules) else FeatureModel
        return kind(net, parts, target, head)  # type: ignore[arg-type]
