"""DeepSeek-V3's multi-token prediction modules (arXiv 2412.19437, section 2.2), the last one used recursively."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.nets.decoder import DecoderLayer, Keep, LayerConfig, Mask, RmsNorm
from foretoken.models.forward.heads.mtp import FEEDS, TargetLayerModule
from foretoken.models.forward.heads.pieces import HeadParts
from foretoken.models.forward.heads.stacked import StackedModules


@dataclass(frozen=True)
class MtpConfig(LayerConfig):
    """Shape of the module.

    Attributes:
        layer: ``own``, the plain layer of these sizes; ``target``, the target's class, as in checkpoints.
        feed: the state that a step passes to the next one, before or behind the module's norm: ``pre_norm`` or
            ``post_norm``.
        experts: whether a layer of the target's class has experts; by default as in the target.
        modules: number of modules in sequence.
    """

    layer: str = "own"
    feed: str = "pre_norm"
    experts: bool = False
    modules: int = 1

    def __post_init__(self) -> None:
        if self.modules < 1:
            raise ValueError(f"mtp needs modules >= 1, not {self.modules}")
        if self.layer not in ("own", "target") or self.feed not in FEEDS:
            raise ValueError(
                f"mtp needs layer=own or layer=target and feed={' or feed='.join(FEEDS)}, "
                f"not {self.layer!r} and {self.feed!r}"
            )


class MtpNet(nn.Module):
    """``proj([norm(embedding of the next token); norm(state)])``, a full decoder layer, and a norm before the head."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.feed = config.feed
        self.enorm, self.hnorm = RmsNorm(size, config.eps), RmsNorm(size, config.eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(config)
        self.norm = RmsNorm(size, config.eps)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, mask: Mask = None, keep: Keep | None = None
    ) -> Tensor:
        """Embeddings of tokens t + 1 and states of tokens t, both [b, n, D] -> the next step's states [b, n, D]."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(features)], -1))
        output: Tensor = self.layer(x, positions, mask, keep)
        return self.norm(output) if self.feed == "post_norm" else output

    def head_state(self, output: Tensor) -> Tensor:
        """Input [..., D] of the vocabulary projection."""
        return output if self.feed == "post_norm" else self.norm(output)

    def pieces(self) -> HeadParts:
        norms: dict[str, Any] = {"of_beside": self.enorm, "of_state": self.hnorm, "last": self.norm}
        return HeadParts(self.layer, entry=self.eh_proj, hands_on_normed=self.feed == "post_norm", **norms)


def module_for(config: MtpConfig, network: nn.Module) -> nn.Module:
    """A new module of this shape, or several of them as :class:`StackedModules`; ``network`` is the target, for its
    layer class."""
    if config.modules > 1:
        single = replace(config, modules=1)
        return StackedModules([module_for(single, network) for _ in range(config.modules)])
    if config.layer == "own":
        return MtpNet(config)
    return TargetLayerModule(network, config.experts, config.feed)
