"""A block network (DFlash and its successors) in our library.

A product projects the target's states to positions, one call stores their keys and values in all layers, and another
runs the rows of a block and returns the best tokens per position.  The network itself, run by PyTorch, is the twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.base import Feed, Rows
from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.native_rows import NativeRows, stacked_mask
from foretoken.models.forward.heads.pieces import BlockNetParts, LayerParts
from foretoken.models.forward.native_parts import BestTokens, Description, watched
from foretoken.models.linear.draft_packing import packed
from foretoken.models.native import forward as native_forward
from foretoken.models.native import why_not
from foretoken.models.native.library import NotCoveredError

NO_PRODUCT = native_forward.ProductStruct(None, 0)
NO_NORM = native_forward.NormStruct(None, 0.0)


@dataclass(frozen=True)
class BlockRows(Rows):
    """Float32 logits and states of a block's positions, and their candidates.

    Attributes:
        best: log-probabilities and draft ids, each [k, C], of the best tokens; ``None``: not computed.
    """

    best: tuple[Tensor, Tensor] | None = None


class NativeBlockNet(NativeRows):
    """A block network in our library, following the network's weights.

    Args:
        net: a network with ``pieces``, its :class:`~foretoken.models.forward.heads.pieces.BlockNetParts`, and
            ``embedded``.
        embedding: the target's embedding [V, D].
    """

    name = "native"
    predicts = True

    def __init__(self, net: Any, embedding: Tensor, project: DraftHead) -> None:
        reason = why_not() or net.pieces().not_covered
        if reason:
            raise NotCoveredError(reason)
        super().__init__(net.pieces().config)
        self.net, self.embedding, self.project = net, embedding, project
        self.describe()

    # -- the network as data -----------------------------------------------------------------------------------------

    def describe(self) -> None:
        pieces: BlockNetParts = self.net.pieces()
        self._watch, self._description = watched(self.net), Description()
        norm, product = self._description.norm, self._description.product
        self.kinds = list(dict.fromkeys(zip(pieces.config.reaches, pieces.config.causals, strict=True)))
        kinds = [self.kinds.index(kind) for kind in zip(pieces.config.reaches, pieces.config.causals, strict=True)]
        self.width, self.num_layers = int(pieces.config.hidden_size), len(pieces.layers)
        self.fuse = packed(pieces.fuse)
        if not isinstance(self.project, DraftHead):
            raise NotCoveredError("its vocabulary projection is of an unsupported kind")
        self.num_tokens = self.project.native().shape[0]
        heads, kv_heads, dim = self.size
        beside = native_forward.ALONE, NO_NORM, NO_NORM, NO_PRODUCT
        readers = self._layer_array([self._reader(layer) for layer in pieces.layers])
        self._reader_model = native_forward.ModelStruct(
            *(readers, self.num_layers, self.width, 0, kv_heads, dim, NO_NORM, NO_PRODUCT, *beside)
        )
        layers = self._layer_array([self._layer(*each) for each in zip(pieces.layers, kinds, strict=True)])
        self._model = native_forward.ModelStruct(
            *(layers, self.num_layers, self.width, heads, kv_heads, dim),
            *(norm(pieces.last), product(self.project.native()), *beside),
        )

    def _layer_array(self, layers: Sequence[native_forward.LayerStruct]) -> int:
        return ctypes.addressof(self._description.keep(native_forward.array(native_forward.LayerStruct, layers)))

    def _reader(self, layer: LayerParts) -> native_forward.LayerStruct:
        """For positions of the text, a layer only stores keys and values."""
        key = self._description.norm(layer.attention.k_norm)
        keys = self._description.product(packed(layer.attention.k_proj, layer.attention.v_proj))
        return native_forward.LayerStruct(*[NO_NORM] * 5, key, keys)

    def _layer(self, layer: LayerParts, kind: int) -> native_forward.LayerStruct:
        norm, product, attention, mlp = self._description.norm, self._description.product, layer.attention, layer.mlp
        return native_forward.LayerStruct(
            *(norm(layer.before_attention), NO_NORM, norm(layer.before_mlp), NO_NORM),
            *(norm(attention.q_norm), norm(attention.k_norm)),
            *(product(packed(attention.q_proj, attention.k_proj, attention.v_proj)), product(packed(attention.o_proj))),
            *(product(packed(mlp.gate_proj, mlp.up_proj)), product(packed(mlp.down_proj))),
            *(self.size[2] ** -0.5, 1.0, kind, 0, 0, native_forward.SILU),
            *(self._around(layer.around_attention), self._around(layer.around_mlp)),
        )

    def _around(self, convolution: Any) -> native_forward.ConvolutionStruct:
        if convolution is None:
            return native_forward.ConvolutionStruct(NO_PRODUCT, None, 0, 1)
        if convolution.group % 16:  # groups must consist of whole vectors of the widest kind
            raise NotCoveredError(f"convolution groups must be a multiple of 16 channels, not {convolution.group}")
        base = self._description.keep(convolution.base_kernel.detach().float().contiguous())
        kernels = self._description.product(packed(convolution.kernel_projection))
        return native_forward.ConvolutionStruct(kernels, base.data_ptr(), convolution.taps, convolution.group)

    # -- calls -------------------------------------------------------------------------------------------------------

    def read(self, feeds: Sequence[Feed], plans: Sequence[RowPlan]) -> list[Rows]:
        """Store keys and values of positions whose ``states`` are the network's inputs, without logits.  The scratch
        already has the nodes, and the cache has room."""
        order, groups, pointed_to = self.grouped([feed.sequence for feed in feeds], plans, lambda *_: ())
        x = torch.cat([feeds[i].states for i in order]).to(torch.bfloat16).contiguous()  # type: ignore[misc]
        self._run(self._reader_model, x, groups, [plans[i] for i in order], kinds=0)
        del pointed_to
        nothing = x.new_empty(0, self.num_tokens)
        return [Rows(nothing, {}) for _ in feeds]

    def blocks(
        self, feeds: Sequence[Feed], plans: Sequence[RowPlan], window: Window, guessing: range, top: int
    ) -> list[BlockRows]:
        """Run blocks with equally many rows, already in the scratch; their keys and values are stored after the text.

        Args:
            window: the window for long texts, in layers without their own reach.
            guessing: the rows of a block that predict tokens.
            top: number of best tokens per position; 0: none.
        """

        def masks(rows: Sequence[int], of: Sequence[RowPlan], used: int) -> list[Tensor | None]:
            if len(rows) == 1 and self.kinds == [(0, False)] and window.cut(of) is None:
                return [None]
            return [
                stacked_mask(rows, [visible_slots(plan, used, *kind, window) for plan in of]) for kind in self.kinds
            ]

        order, groups, pointed_to = self.grouped([feed.sequence for feed in feeds], plans, masks)
        rows, count = len(feeds[0].tokens), len(feeds)
        ids = torch.tensor([feeds[i].tokens for i in order])
        x = self.net.embedded(ids, self.embedding).to(torch.bfloat16).flatten(0, 1).contiguous()
        states = torch.empty_like(x)
        want = native_forward.numbers([block * rows + row for block in range(count) for row in guessing])
        logits, scale = x.new_empty(len(want), self.num_tokens), self.project.scale
        best = (
            BestTokens(len(want), min(top, self.num_tokens), scale) if top and len(want) and scale is not None else None
        )
        logits_call = (len(want), ctypes.addressof(want), None, logits.data_ptr(), None)
        best_struct = native_forward.BestStruct() if best is None else best.struct
        self._run(
            self._model, x, groups, [plans[i] for i in order], len(self.kinds), states, (*logits_call, best_struct)
        )
        del pointed_to
        whole = self.project.transform_logits(logits.float()).unflatten(0, (count, -1))
        pair = None if best is None else [tensor.unflatten(0, (count, -1)) for tensor in best.tensors()]
        states = states.unflatten(0, (count, -1))
        by_feed = {
            i: BlockRows(whole[n], {"state": states[n]}, None if pair is None else (pair[0][n], pair[1][n]))
            for n, i in enumerate(order)
        }
        return [by_feed[i] for i in range(count)]

    def _run(
        self,
        model: native_forward.ModelStruct,
        x: Tensor,
        groups: Any,
        plans: Sequence[RowPlan],
        kinds: int,
        last: Tensor | None = None,
        logits_call: Any = None,
    ) -> None:
        """Run all layers over rows x [n, D]; the normed outputs go to ``last``, and ``logits_call`` describes the
        logits."""
        cos, sin = self.turns(plans)
        turns = (ctypes.c_void_p * 1)(cos.data_ptr()), (ctypes.c_void_p * 1)(sin.data_ptr())
        skipped = b"\1" if last is None else b"\0"
        taps = native_forward.pointers([None] * (self.num_layers + 1))
        native_forward.run(
            model,
            native_forward.CallStruct(
                *(len(x), len(groups), ctypes.addressof(groups), x.data_ptr(), 0, self.num_layers),
                *(b"\0" * self.num_layers, skipped * self.num_layers, kinds, cos.shape[1]),
                *(ctypes.addressof(turns[0]), ctypes.addressof(turns[1]), ctypes.addressof(taps)),
                *(
                    None if last is None else last.data_ptr(),
                    *(logits_call or (0, None, None, None, None, native_forward.BestStruct())),
                ),
            ),
            torch.get_num_threads(),
        )


def visible_slots(plan: RowPlan, used: int, reach: int, causal: bool, window: Window) -> NDArray[np.bool_]:
    """[rows, used] whether a block's rows see the slots of their sequence: those before the block, and each other.

    Args:
        plan: location of the rows; slot s holds position s.
        used: number of slots.
        reach: how far a row sees in both directions; 0: the whole block, and the text within ``window``.
        causal: whether a row sees only earlier rows of its block.
        window: the window for long texts.
    """
    slots, rows = np.arange(used), plan.committed + np.arange(plan.new)[:, None]
    allowed = slots <= (rows if causal else rows[-1])
    if reach:
        allowed = allowed & (abs(rows - slots) <= reach)
    elif window.size:
        allowed = allowed & ((slots >= plan.committed - window.size) | (slots < window.sink))
    return np.broadcast_to(allowed, (plan.new, used))
