"""A block network as a :class:`~foretoken.models.base.LanguageModel`, which runs one block at a time over its cache.

Feeds with states are committed positions; a feed without states is a block, which is dropped after it has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.methods.drafters.nets.block import BlockNet, block_mask
from foretoken.models.base import Feed, Rows, SequenceState
from foretoken.models.cache.masks import RowPlan
from foretoken.models.forward.heads.features import FeatureModel, HeadForward
from foretoken.models.forward.heads.native_net import BlockRows, NativeBlockNet
from foretoken.models.network.call import NetworkCall, Outputs


class _BlockForward(HeadForward):
    model: BlockNet

    def __init__(self, net: BlockNet, *rest: Any) -> None:
        super().__init__(net.float(), *rest)
        self.head = None
        self.layer_masks = {}  # the network makes its own
        self.num_layers = self.depth = net.config.layers

    def run(self, call: NetworkCall) -> Outputs:
        """No logits; the states [b, width, D] of blocks."""
        cut = call.cache.cut
        nothing = [torch.empty(0, self.vocab_size, device=self.device) for _ in call.wanted]
        if call.states is not None:
            for layer in range(self.num_layers):
                call.cache.update(*self.model.keys(call.states, call.positions, layer), layer)
            return nothing, {}
        used, rows = call.cache.get_mask_sizes(0)[0], call.ids.shape[1]
        config = self.model.config
        kinds = list(zip(config.reaches, config.causals, strict=True))
        by_kind = {kind: block_mask(call.positions[:, 0], rows, used, *kind) for kind in set(kinds)}
        masks = [by_kind[kind] if kind[0] or cut is None else cut.hidden(by_kind[kind]) for kind in kinds]

        def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            call.cache.cut = None if config.reaches[layer] else cut
            return call.cache.update(key, value, layer)

        embedded = self.model.embedded(call.ids, self.parts.embed.weight)
        return nothing, {"state": self.model(embedded, call.positions, masks, keep)}


class BlockModel(FeatureModel):
    """Cached sequences, and blocks after them.

    Args:
        net, parts, target, project: as for :class:`~foretoken.models.forward.heads.features.HeadForward`.
    """

    model: BlockNet
    kind = _BlockForward
    native: NativeBlockNet | None
    _guessing = range(0)
    """Rows of a call's blocks that need logits."""

    def _native(self) -> NativeBlockNet:
        return NativeBlockNet(self.model, self.parts.embed.weight, self.project)

    @torch.inference_mode()
    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """Fused states [n, D] from the target's hidden states at the tapped depths, each [n, D]."""
        return self.model.hidden_norm(self.fused(torch.cat(list(taps), -1)))

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ("state",)) -> list[Rows]:
        """Read positions, whose ``states`` are those of :meth:`BlockNet.context`, or run blocks: feeds without states.

        Raises:
            ValueError: two feeds for one sequence, or both sorts in one call.
        """
        reads = [feed.states is not None for feed in feeds]
        if all(reads):
            return super().forward(feeds, taps)
        if any(reads):
            raise ValueError("positions of a sequence and blocks need separate calls")
        self._check(feeds, ())
        return self._whole(feeds, taps)

    def _runs_native(self, feeds: Sequence[Feed]) -> bool:
        """Blocks run with the weights that read the positions before them."""
        return super()._runs_native(feeds) if feeds[0].states is not None else self.native is not None

    def _run_native(self, feeds: Sequence[Feed], plans: Sequence[RowPlan]) -> Sequence[Rows]:
        native: Any = self.native
        if feeds[0].states is not None:
            return native.read(feeds, plans)
        return native.blocks(feeds, plans, self.window, self._guessing, self.top)

    @torch.inference_mode()
    def blocks(
        self, sequences: Sequence[SequenceState], anchors: Sequence[int], rows: int, guessing: range = range(0)
    ) -> list[BlockRows]:
        """Run blocks after sequences that hold every token before their anchors.

        Args:
            guessing: predicting rows: logits are of these, states [rows, D] are of all.
        """
        mask = self.model.config.mask_token
        feeds = [
            Feed(sequence, [anchor, *[mask] * (rows - 1)], wanted=0)
            for sequence, anchor in zip(sequences, anchors, strict=True)
        ]
        self._guessing = guessing
        outputs: list[Any] = self.forward(feeds)
        for sequence in sequences:
            self.commit(sequence, ())
        if isinstance(outputs[0], BlockRows):
            return outputs
        states = torch.stack([row.taps["state"] for row in outputs])
        at = slice(guessing.start, guessing.stop)
        logits = (
            self.project(states[:, at].flatten(0, 1)).unflatten(0, (len(states), -1)) if guessing else states[:, :0]
        )
        return [BlockRows(*each) for each in zip(logits, [{"state": state} for state in states], strict=True)]
