"""Base of drafters that predict a block of positions in one pass of a network over the target's hidden states.

Drafts are built from a block in :mod:`foretoken.methods.drafters.parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context
from foretoken.methods.drafters.base import BuildContext, share_of_bytes
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.methods.drafters.nets.store import load_net
from foretoken.methods.drafters.parallel import ParallelDrafter, Predictions
from foretoken.methods.drafters.reading import FeatureReader
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.native_net import BlockRows
from foretoken.models.forward.parts import TargetParts


class OnePassDrafter(FeatureReader, ParallelDrafter):
    """A network over the target's hidden states that runs once per draft, and a vocabulary projection."""

    model: FeatureModel

    @property
    def head(self) -> DraftHead:
        return self.model.project

    def describe(self) -> list[dict[str, Any]]:
        runs = {"forward": self.model.forward_name, "native_off": self.model.native_off}
        return [{**entry, "vocabulary": self.head.size, **runs} for entry in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """A share for every level of one run of the network and the vocabulary projection."""
        return share_of_bytes((self.model.weight_bytes + self.head.weight_bytes) // self.max_depth, target_bytes)


class BlockDrafter(OnePassDrafter):
    """Trees of the lattice, or drawn chains and trees.

    Args:
        model: the network over the target's hidden states.
        depth: maximum tokens of a path; 0: all that a block predicts.
        window: positions that layers without their own reach attend to; 0: all.
        sink: first positions that these attend to as well.
    """

    model: BlockModel
    net_config: ClassVar[type[BlockConfig]] = BlockConfig
    net_class: ClassVar[type[BlockNet]] = BlockNet

    def __init__(
        self,
        model: BlockModel,
        nodes: int = 16,
        depth: int = 0,
        width: int = 8,
        draw: str = "iid",
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        self.net: BlockNet = model.model
        most = self.net.config.drafts
        if not 0 <= depth <= most:
            raise ValueError(f"{self.name} needs depth from 1 to {most} (the size of its block) or 0, not {depth}")
        self._shape(nodes, depth or most, width, draw, tree)
        super().__init__(model, wanted=0)
        model.window, model.top = Window(window, sink), self._candidates
        self.taps = tuple(dict.fromkeys(self.net.config.tap_names))

    @classmethod
    def build(
        cls, path: str | None, context: BuildContext, *, nodes: int | None = None, vocab: str = "", **options: Any
    ) -> Self:
        """Build from a spec ``NAME[:FOLDER]``.

        Args:
            vocab: as for :class:`~foretoken.methods.drafters.features.FeatureDrafter`.
        """
        net, parts, measured = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        if vocab and net.vocabulary is not None:
            raise ValueError(f"this {cls.name} has its own draft vocabulary: leave vocab out")
        ids = None
        if net.vocabulary is None:
            ids = chosen_ids(vocab, context, parts.vocab_size, measured.get("frequent", ()), others=True)
        built = cls.sized(context.target, nodes, block_model(net, parts, context.target, ids), **options)
        built.start_from(measured)
        return built

    @classmethod
    def of(
        cls, net: BlockNet, parts: TargetParts, target: LanguageModel, ids: Tensor | None = None, **options: Any
    ) -> Self:
        """Construct the drafter over a network in its current state.

        Args:
            ids: [V_d] the draft vocabulary, if the network has none; all tokens by default.
        """
        return cls(block_model(net, parts, target, ids), **options)

    def start_from(self, measured: Mapping[str, Any]) -> None:
        """Take over what training measured.  Raises ``ValueError`` for invalid values."""

    @property
    def _candidates(self) -> int:
        """Maximum candidates per position."""
        return self.width

    @torch.inference_mode()
    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        return self.model.context([hidden[tap] for tap in self.net.config.tap_names])

    def _depth(self, context: Context, budget: Budget) -> int:
        return min(self.max_depth, budget.max_depth, budget.max_nodes)

    def _all_predictions(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Predictions]:
        """Predict with one call for the committed tokens and one for all blocks; requests without read tokens are left
        out."""
        level, _ = self.follow(contexts)
        ready = [i for i, c in enumerate(contexts) if level[i] and depths[i] > 0 and c.state[self].tokens]
        if not ready:
            return {}
        return dict(zip(ready, self._guess([contexts[i] for i in ready], max(depths[i] for i in ready)), strict=True))

    @torch.inference_mode()
    def _guess(self, contexts: Sequence[Context], depth: int) -> list[Predictions]:
        config = self.net.config
        sequences, roots = [c.state[self] for c in contexts], [c.root for c in contexts]
        first = 0 if config.from_anchor else 1
        guessing = range(first, first + depth)
        blocks = self.model.blocks(sequences, roots, config.rows_for(depth), guessing)
        return [self.predictions(*each, guessing) for each in zip(contexts, blocks, strict=True)]

    def predictions(self, context: Context, block: BlockRows, guessing: range) -> Predictions:
        return Predictions(context, block.logits, self.head, self._ranker(context), block.best)


def block_model(net: BlockNet, parts: TargetParts, target: LanguageModel, ids: Tensor | None = None) -> BlockModel:
    net = net.to(parts.device)
    weight = None if net.lm_head is None else net.lm_head.weight.detach()
    return BlockModel(net, parts, target, DraftHead(parts, ids if net.vocabulary is None else net.vocabulary, weight))
