"""One call of a network: everything that its forward needs, made once for every way to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.models.layers import WHOLE, LayerPlan


@dataclass(frozen=True)
class Call:
    """Padded rows of nodes; shapes: ``b`` rows of ``width`` columns, ``D`` hidden size.

    Attributes:
        ids: [b, width] token ids.
        positions: [b, width].
        masks: additive masks by layer type, ``None`` where every row sees everything.
        first: the column from which on logits are wanted; ``width`` for none.
        taps: hidden states that are wanted, see :mod:`foretoken.models.base`.
        plan: the layers that are run.
        nodes: where the nodes are among the b * width places, when much of the rest is padding that a forward may leave
            out; ``None``: run all of it.
        states: [b, width, D] hidden states at layer ``plan.start``, instead of the embedded ids.
    """

    ids: Tensor
    positions: Tensor
    masks: Mapping[str, Tensor | None]
    first: int
    taps: Sequence[str]
    plan: LayerPlan = WHOLE
    states: Tensor | None = None
    nodes: Tensor | None = None
