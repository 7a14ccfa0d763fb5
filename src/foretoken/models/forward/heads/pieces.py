"""Components of trained heads' networks, for code that does not run their own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class HeadParts:
    """Components of a head's network.

    Attributes:
        layer: a decoder layer, or only its attention, with a ``LayerConfig``.
        before: norm of the attention input, if any; unused for a wide layer.
        entry: projection from embedding and state (concatenated) to the layer's input; ``None``: the state alone is the
            input.
        of_beside, of_state: norms of the embedding and the state.
        before_all: norm of the state in its place, for the residual stream too.
        wide: whether attention reads both concatenated, with the state as residual stream.
        further: decoder layers after ``layer``.
        last: norm before the vocabulary projection.
        hands_on_normed: whether the next step reads the state after that norm.
        fuse: projection from the target's hidden states of several depths to one state.
        predicts: whether there is a vocabulary projection.
    """

    layer: Any
    before: nn.Module | None = None
    entry: nn.Linear | None = None
    of_beside: nn.Module | None = None
    of_state: nn.Module | None = None
    before_all: nn.Module | None = None
    wide: bool = False
    further: Sequence[Any] = ()
    last: nn.Module | None = None
    hands_on_normed: bool = False
    fuse: nn.Linear | None = None
    predicts: bool = True


@dataclass(frozen=True)
class BlockParts:
    """Heads with a common input.

    Attributes:
        first: the layer of the first block, per head; with ``residual``, the linear path and the layer of the only
            head.
        rest: the layers of the other blocks, per head.
        residual: whether the first block has a parallel linear path.
    """

    first: Sequence[nn.Linear]
    rest: Sequence[Sequence[nn.Linear]]
    residual: bool = False


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer of a block network.

    Attributes:
        attention: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and the head norms ``q_norm`` and ``k_norm``.
        mlp: ``gate_proj``, ``up_proj`` and ``down_proj``.
        before_attention, before_mlp: input norms.
        around_attention, around_mlp: convolutions over rows, with ``kernel_projection``, ``base_kernel`` [2, taps, D],
            ``taps`` and ``group``, or ``None``.
    """

    attention: Any
    mlp: Any
    before_attention: nn.Module
    before_mlp: nn.Module
    around_attention: Any = None
    around_mlp: Any = None


@dataclass(frozen=True)
class BlockNetParts:
    """A network over blocks of rows after a text that every layer holds as keys and values.

    Attributes:
        config: heads, ``kv_heads``, ``head_dim``, ``rope_theta``, ``rope``, ``hidden_size``, and per layer ``reaches``
            and ``causals``.
        last: norm before the vocabulary projection.
        fuse: projection from the target's hidden states of several depths to one state.
        not_covered: reason why the library cannot run it; empty if it can.
    """

    config: Any
    layers: Sequence[LayerParts]
    last: nn.Module
    fuse: nn.Linear
    not_covered: str = ""
