"""The network of a trained head in one call of our library, with the best tokens per node.

A head of one decoder layer takes dozens of tensor calls per tree level, and spends more time on the vocabulary
projection and the top-k search than on its layer.  Here it is described to ``native/forward.cpp`` once, with its
weights and the 8-bit rows of its draft vocabulary.  One call then drafts a level for all requests and returns states,
best tokens and their log-probabilities.  Its twin is the network itself, run by
:mod:`foretoken.models.forward.heads.lean`, which also reads long chunks of text, where arithmetic dominates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.base import Feed, Rows
from foretoken.models.cache.masks import LayerMask, RowPlan, row_allowed
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.native_rows import NativeRows, stacked_mask
from foretoken.models.forward.heads.pieces import HeadParts
from foretoken.models.forward.native_parts import BestTokens, Description, watched
from foretoken.models.linear.draft_packing import packed
from foretoken.models.native import forward as native_forward
from foretoken.models.native import why_not
from foretoken.models.native.library import NotCoveredError


@dataclass(frozen=True)
class HeadRows(Rows):
    """Logits and, if requested, the likeliest draft tokens per row; the logits are then the library's raw ones.

    Attributes:
        tokens: the target's ids, best first.
        values: their log-probabilities.
        transform_logits: the family's transformation of the logits.
    """

    tokens: list[list[int]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    transform_logits: Callable[[Tensor], Tensor] | None = None

    def whole(self) -> Tensor:
        """Logits [wanted, V_d] in float32."""
        return self.logits if self.transform_logits is None else self.transform_logits(self.logits.float())


class NativeHead(NativeRows):
    """A head's network in our library, described by its :class:`HeadParts` (``pieces``).

    Args:
        embedded: embeddings [n, D] of ids, as the network reads them.
    """

    name = "native"

    def __init__(self, net: Any, embedded: Callable[[Tensor], Tensor], project: Any) -> None:
        reason = why_not()
        if reason is not None:
            raise NotCoveredError(reason)
        if not hasattr(net, "pieces"):
            raise NotCoveredError("its network is of an unsupported kind")
        self.net, self.embedded, self.project = net, embedded, project
        super().__init__(net.pieces().layer.config)
        self.describe()

    # -- the network as data -----------------------------------------------------------------------------------------

    def describe(self) -> None:
        pieces: HeadParts = self.net.pieces()
        self._watch, self._description = watched(self.net), Description()
        norm, product = self._description.norm, self._description.product
        described = [self._layer(pieces.layer, pieces.before), *map(self._layer, pieces.further)]
        layers = self._description.keep(native_forward.array(native_forward.LayerStruct, described))
        self.num_layers = len(described)
        self.width = int(pieces.layer.config.hidden_size)
        head = native_forward.ProductStruct(None, 0)
        if pieces.predicts:
            head = product(self._projection())
        begins = native_forward.WIDE
        if not pieces.wide:
            begins = native_forward.ALONE if pieces.entry is None else native_forward.JOINED
        entry = native_forward.ProductStruct(None, 0) if pieces.entry is None else product(packed(pieces.entry))
        self.fuse, self.before_all = None if pieces.fuse is None else packed(pieces.fuse), pieces.before_all
        self.has_mlp = hasattr(pieces.layer, "down_proj")
        self.hands_on_normed, self.predicts, self.reads_tokens = pieces.hands_on_normed, pieces.predicts, bool(begins)
        self._model = native_forward.ModelStruct(
            *(ctypes.addressof(layers), self.num_layers, self.width, *self.size, norm(pieces.last), head),
            *(begins, norm(pieces.of_beside), norm(pieces.of_state), entry),
        )

    def _projection(self) -> Any:
        if not isinstance(self.project, DraftHead):
            raise NotCoveredError("its vocabulary projection is of an unsupported kind")
        product, ids = self.project.native(), self.project.ids
        self.num_tokens = product.shape[0]
        self.ids = None if ids is None else ids.tolist()
        return product

    def _layer(self, layer: Any, before: nn.Module | None = None) -> native_forward.LayerStruct:
        norm, product = self._description.norm, self._description.product
        before = getattr(layer, "input_layernorm", None) or before
        after, mlp = None, (native_forward.ProductStruct(None, 0), native_forward.ProductStruct(None, 0))
        if hasattr(layer, "down_proj"):
            after = layer.post_attention_layernorm
            mlp = product(packed(layer.gate_proj, layer.up_proj)), product(packed(layer.down_proj))
        return native_forward.LayerStruct(
            *(norm(module) for module in (before, None, after, None, layer.q_norm, layer.k_norm)),
            *(product(packed(layer.q_proj, layer.k_proj, layer.v_proj)), product(packed(layer.o_proj)), *mlp),
            *(self.size[2] ** -0.5, 1.0, 0, 0, 0, native_forward.SILU),
        )

    # -- a call ------------------------------------------------------------------------------------------------------

    def run(
        self, feeds: Sequence[Feed], plans: Sequence[RowPlan], layer: LayerMask, window: Window, top: int
    ) -> list[HeadRows]:
        """Append nodes, for which the cache has room.

        Args:
            feeds: feeds of sequences whose scratch already has the nodes.
            plans: location of each sequence's new nodes.
            layer: its attention pattern.
            window: the window for long texts.
            top: number of best tokens returned for every row that needs logits; 0: float32 logits, as scaled by the
                family.
        """

        def masks(rows: Sequence[int], of: Sequence[RowPlan], used: int) -> list[Tensor | None]:
            layer_mask = window.within(layer) if layer.kind == "full" and window.cut(of) is not None else layer
            if len(rows) > 1 or not of[0].is_chain or of[0].new > 1 or layer_mask != LayerMask():
                return [stacked_mask(rows, [row_allowed(plan, layer_mask, used) for plan in of])]
            return [None]

        order, groups, pointed_to = self.grouped([feed.sequence for feed in feeds], plans, masks)
        counts = [plans[i].new for i in order]
        rows = sum(counts)
        states: list[Any] = [feeds[i].states for i in order]
        x = (states[0] if len(states) == 1 else torch.cat(states)).to(torch.bfloat16).contiguous()
        if self.before_all is not None:  # the library has no place for it
            x = self.before_all(x)
        beside = None
        if self.reads_tokens:
            ids = torch.tensor([token for i in order for token in feeds[i].tokens])
            beside = self.embedded(ids).to(torch.bfloat16).contiguous()
        output = x.new_empty(rows, self.width)
        num_scored, scored = self._scored_rows(feeds, order, counts)
        cos, sin = self.turns([plans[i] for i in order])
        logits, best, scale = x.new_empty(len(scored), self.num_tokens if scored else 0), None, self.project.scale
        if top and scored and scale is not None:
            best = BestTokens(len(scored), min(top, self.num_tokens), scale)
        tapped = native_forward.pointers([None] * self.num_layers + [None if self.hands_on_normed else output])
        numbers = native_forward.numbers(scored)
        turns = (ctypes.c_void_p(cos.data_ptr()), ctypes.c_void_p(sin.data_ptr()))
        call = native_forward.CallStruct(
            *(rows, len(groups), ctypes.addressof(groups), x.data_ptr(), 0, self.num_layers),
            *(b"\0" * self.num_layers, (b"\0" if self.has_mlp else b"\1") * self.num_layers, 1, cos.shape[1]),
            *(ctypes.addressof(turns[0]), ctypes.addressof(turns[1]), ctypes.addressof(tapped)),
            *(output.data_ptr() if self.hands_on_normed else None, len(scored), ctypes.addressof(numbers), None),
            *(logits.data_ptr(), None if beside is None else beside.data_ptr()),
            native_forward.BestStruct() if best is None else best.struct,
        )
        native_forward.run(self._model, call, torch.get_num_threads())
        del pointed_to
        if best is None and scored:
            logits = self.project.transform_logits(logits.float())
        likeliest = None if best is None else (best.tokens(self.ids), best.values())
        return self._handed_out(order, counts, num_scored, output, logits, likeliest)

    def _scored_rows(
        self, feeds: Sequence[Feed], order: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Number of last rows with logits per feed, and the indices of all such rows."""
        if not self.predicts:
            return [0] * len(order), []
        requested = [feeds[i].wanted for i in order]
        num_scored = [count if number is None else number for number, count in zip(requested, counts, strict=True)]
        want, end = list[int](), 0
        for count, number in zip(counts, num_scored, strict=True):
            end += count
            want.extend(range(end - number, end))
        return num_scored, want

    def _handed_out(
        self,
        order: Sequence[int],
        counts: Sequence[int],
        num_scored: Sequence[int],
        output: Tensor,
        logits: Tensor,
        best: tuple[list[Any], list[Any]] | None,
    ) -> list[HeadRows]:
        by_feed: dict[int, HeadRows] = {}
        row = start = 0
        for i, count, number in zip(order, counts, num_scored, strict=True):
            state = {"state": output[row : row + count]}
            rows = logits[start : start + number]
            if best is None:
                by_feed[i] = HeadRows(rows, state)
            else:
                tokens, values = (column[start : start + number] for column in best)
                by_feed[i] = HeadRows(rows, state, tokens, values, self.project.transform_logits)
            row, start = row + count, start + number
        return [by_feed[i] for i in range(len(order))]
