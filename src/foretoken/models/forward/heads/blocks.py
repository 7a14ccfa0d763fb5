"""Heads of residual blocks (Medusa's, Hydra's) in one call into our library, projection and best tokens included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.pieces import BlockParts
from foretoken.models.forward.native_parts import BestTokens, Description, watched
from foretoken.models.linear.draft_packing import packed
from foretoken.models.native import forward as native_forward
from foretoken.models.native import why_not
from foretoken.models.native.library import NotCoveredError


@dataclass(frozen=True)
class Guessed:
    """Output of the heads for some rows; the rows of a head are contiguous.

    Attributes:
        logits: [heads * n, V_d] as returned by the library.
        tokens: the target's likeliest ids per row, best first; empty if the family transforms its logits nonlinearly.
        transform_logits: the family's transformation of the logits.
    """

    logits: Tensor
    tokens: list[list[int]] = field(default_factory=list)
    transform_logits: Callable[[Tensor], Tensor] | None = None

    def whole(self) -> Tensor:
        """Logits [heads * n, V_d] in float32."""
        return self.logits.float() if self.transform_logits is None else self.transform_logits(self.logits.float())


class NativeBlocks:
    """Heads run by the library, following the network's weights.

    Args:
        pieces: returns their components.
        projections: one vocabulary projection for all heads, or one each: a :class:`DraftHead`, or the network's own
            linear layer.
        head: the draft head of the projections.

    Raises:
        NotCoveredError: the library does not support the network.
    """

    name = "native"

    def __init__(
        self, net: nn.Module, pieces: Callable[[], BlockParts], projections: Sequence[Any], head: DraftHead
    ) -> None:
        reason = why_not()
        if reason is not None:
            raise NotCoveredError(reason)
        self.net, self.pieces, self.projections, self.head = net, pieces, projections, head
        self.ids = None if head.ids is None else head.ids.tolist()
        self.describe()

    def describe(self) -> None:
        """Describe the current weights to the library."""
        pieces = self.pieces()
        self._watch, self._description = watched(self.net), Description()
        first = packed(*pieces.first)
        self.heads, self.inner = len(pieces.rest), first.shape[1]
        self.width = first.shape[0] // len(pieces.first)
        depth = len(pieces.rest[0])
        rest = [packed(layers[i]) for i in range(depth) for layers in pieces.rest]
        projections = [
            projection.native() if isinstance(projection, DraftHead) else packed(projection)
            for projection in self.projections
        ]
        self.num_tokens = projections[0].shape[0]
        products = self._description.products(rest) if rest else None, self._description.products(projections)
        self._blocks = native_forward.BlocksStruct(
            *(self.heads, self.width, int(pieces.residual), self._description.product(first)),
            *(products[0], depth, products[1], int(len(projections) == 1)),
        )

    def has_changed(self) -> bool:
        """Whether the network changed since it was described."""
        return self._watch.has_changed()

    def __call__(self, inputs: Tensor, top: int) -> Guessed:
        """Output for inputs [n, in], with the ``top`` best tokens; 0: none."""
        x = inputs.to(torch.bfloat16).contiguous()
        rows = self.heads * len(x)
        states, logits = x.new_empty(rows, self.width), x.new_empty(rows, self.num_tokens)
        scale = self.head.scale
        best = BestTokens(rows, min(top, self.num_tokens), scale) if top and scale is not None else None
        best_struct = native_forward.BestStruct() if best is None else best.struct
        call = native_forward.BlocksCallStruct(len(x), x.data_ptr(), states.data_ptr(), logits.data_ptr(), best_struct)
        native_forward.run_blocks(self._blocks, call, torch.get_num_threads())
        return Guessed(logits, [] if best is None else best.tokens(self.ids), self.head.transform_logits)
