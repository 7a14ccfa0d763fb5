"""What the networks of trained heads tell of themselves to whoever runs them otherwise than by their own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class HeadParts:
    """What a head's network is made of, for who runs it otherwise than by its own forward.

    Attributes:
        layer: a decoder layer, or the attention of one, with a ``LayerConfig``.
        before: the norm of what its attention reads, if it has one; not of a wide layer.
        entry: what makes the layer's input of an embedding and a state side by side; ``None`` where the state alone is
            the input.
        of_beside, of_state: norms of these two.
        wide: whether the layer's attention reads both side by side, beside the state as residual stream.
        last: the norm in front of the vocabulary projection.
        hands_on_normed: whether what the next step is fed is behind that norm.
        fuse: what makes a state of the target's hidden states at several depths.
        guesses: whether anything is projected.
    """

    layer: Any
    before: nn.Module | None = None
    entry: nn.Linear | None = None
    of_beside: nn.Module | None = None
    of_state: nn.Module | None = None
    wide: bool = False
    last: nn.Module | None = None
    hands_on_normed: bool = False
    fuse: nn.Linear | None = None
    guesses: bool = True


@dataclass(frozen=True)
class BlockParts:
    """Heads that read one input.

    Attributes:
        first: of each head the layer of its first block; with ``residual`` that path and the layer of one head.
        rest: of each head the layers of its other blocks.
        residual: whether the first block has a linear path beside it.
    """

    first: Sequence[nn.Linear]
    rest: Sequence[Sequence[nn.Linear]]
    residual: bool = False


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer of a block network.

    Attributes:
        attention: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and norms of heads ``q_norm`` and ``k_norm``.
        mlp: ``gate_proj``, ``up_proj`` and ``down_proj``.
        before_attention, before_mlp: norms.
        around_attention, around_mlp: convolutions over rows, with ``kernel_projection``, ``base_kernel`` [2, taps, D],
            ``taps`` and ``group``, or none.
    """

    attention: Any
    mlp: Any
    before_attention: nn.Module
    before_mlp: nn.Module
    around_attention: Any = None
    around_mlp: Any = None


@dataclass(frozen=True)
class BlockNetParts:
    """A network over blocks of rows behind a text whose places are keys and values of every layer.

    Attributes:
        config: heads, ``kv_heads``, ``head_dim``, ``rope_theta``, ``hidden_size``, and by layer ``reaches`` and
            ``causals``.
        last: the norm in front of the vocabulary projection.
        fuse: what makes a state of the target's hidden states at several depths.
        not_covered: what keeps others from running it, if anything does.
    """

    config: Any
    layers: Sequence[LayerParts]
    last: nn.Module
    fuse: nn.Linear
    not_covered: str = ""
