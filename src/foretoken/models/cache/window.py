"""A drafter that reads the end of a long text, and perhaps its first tokens: it was trained on shorter ones.

A network without a window of its own guesses worse the more places it looks at beyond those that it knew in training.
Positions stay those of the text.  What is not read is neither scored nor loaded: a round's cost stops growing.  A layer
with a window of its own reads what both allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.models.cache.masks import LayerMask, RowPlan, unseen

USUAL = 4096
"""Places that drafters read which were trained without a window: what most of them were trained on."""


@dataclass(frozen=True)
class Window:
    """What a new row reads of the places before it.

    Attributes:
        size: places right before it; 0: all.
        sink: first slots of the text that are read as well.
    """

    size: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        if self.size < 0 or self.sink < 0:
            raise ValueError(f"window and sink must be at least 0, not {self.size} and {self.sink}")
        if self.sink and not self.size:
            raise ValueError(f"sink={self.sink} is for a window, and window=0 reads the whole text: leave sink out")

    def cut(self, rows: Sequence[RowPlan]) -> Cut | None:
        """What is read by a call of these texts; ``None``: everything."""
        if not self.size or max(row.last_new for row in rows) - self.size <= self.sink:
            return None
        firsts = [max(row.first_new - self.size, 0) for row in rows]
        return Cut(firsts, max(min(firsts), self.sink), self.sink)

    def within(self, layer: LayerMask) -> LayerMask:
        """What a layer may look at through the window, row by row: what a row says must not depend on the rows that
        are read together with it."""
        return replace(layer, back=self.size, sink=self.sink)

    def applied(
        self, rows: Sequence[RowPlan], layers: Mapping[str, LayerMask]
    ) -> tuple[Cut | None, Mapping[str, LayerMask]]:
        """What is read by a call of these texts, and what its layers may look at, by their type."""
        cut = self.cut(rows)
        return cut, layers if cut is None else {name: self.within(layer) for name, layer in layers.items()}


WHOLE_TEXT = Window()


@dataclass(frozen=True)
class Cut:
    """The slots that one call reads.

    Attributes:
        firsts: per text the first slot that any of its new rows reads.
        low: the first slot that any text's window has.
        sink: slots at the beginning that all read.
    """

    firsts: Sequence[int]
    low: int
    sink: int

    def slots(self, stored: Tensor) -> Tensor:
        """Keys or values [b, H, n, d] of the slots that are read."""
        return self._window_of(stored, 2)

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """An additive mask [b, 1, rows, n] of these slots; ``None`` stays: one row that sees all that is read."""
        return None if mask is None else self._window_of(mask, 3)

    def _window_of(self, whole: Tensor, dim: int) -> Tensor:
        recent = whole.narrow(dim, self.low, whole.shape[dim] - self.low)
        return torch.cat([whole.narrow(dim, 0, self.sink), recent], dim) if self.sink else recent

    def hidden(self, mask: Tensor) -> Tensor:
        """:meth:`mask` of a network that makes its own masks of all slots, with what lies before each text's window
        unseen."""
        slots = torch.arange(mask.shape[-1], device=mask.device)
        firsts = torch.tensor(self.firsts, device=mask.device)[:, None, None, None]
        return self._window_of(mask.masked_fill((slots >= self.sink) & (slots < firsts), unseen(mask.dtype)), 3)
