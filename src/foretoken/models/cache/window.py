"""A window for drafters: read the end of a long text, and optionally its first tokens.

A network without a window of its own drafts worse the further it reads beyond its training length.  Positions stay
those of the text.  Tokens outside the window are neither scored nor loaded, so the cost per round stops growing.  A
layer with its own window reads the intersection of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.models.cache.masks import LayerMask, RowPlan, unseen

USUAL = 4096
"""Default window of drafters trained without one: the training length of most of them."""


@dataclass(frozen=True)
class Window:
    """Earlier positions that a new row reads.

    Attributes:
        size: number of positions directly before it; 0: all.
        sink: number of first slots that are read as well.
    """

    size: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        if self.size < 0 or self.sink < 0:
            raise ValueError(f"window and sink must be at least 0, not {self.size} and {self.sink}")
        if self.sink and not self.size:
            raise ValueError(f"sink={self.sink} is for a window, and window=0 reads the whole text: leave sink out")

    def cut(self, rows: Sequence[RowPlan]) -> Cut | None:
        """The slots that a call with these rows reads; ``None``: all."""
        if not self.size or max(row.last_new for row in rows) - self.size <= self.sink:
            return None
        firsts = [max(row.first_new - self.size, 0) for row in rows]
        return Cut(firsts, max(min(firsts), self.sink), self.sink)

    def within(self, layer: LayerMask) -> LayerMask:
        """Mask of a layer under the window, row by row: a row's result must not depend on the other rows of the
        call."""
        return replace(layer, back=self.size, sink=self.sink)

    def applied(
        self, rows: Sequence[RowPlan], layers: Mapping[str, LayerMask]
    ) -> tuple[Cut | None, Mapping[str, LayerMask]]:
        """The slots that a call with these rows reads, and the masks of its layers by type."""
        cut = self.cut(rows)
        return cut, layers if cut is None else {name: self.within(layer) for name, layer in layers.items()}


WHOLE_TEXT = Window()


@dataclass(frozen=True)
class Cut:
    """The slots that one call reads.

    Attributes:
        firsts: first slot that any new row of a sequence reads, per sequence.
        low: the first slot inside any sequence's window.
        sink: number of first slots that all sequences read.
    """

    firsts: Sequence[int]
    low: int
    sink: int

    def slots(self, stored: Tensor) -> Tensor:
        """Keys or values [b, H, n, d] of the slots that are read."""
        return self._window_of(stored, 2)

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """An additive mask [b, 1, rows, n] of these slots; ``None`` stays ``None`` (a single row that sees all of
        them)."""
        return None if mask is None else self._window_of(mask, 3)

    def _window_of(self, whole: Tensor, dim: int) -> Tensor:
        recent = whole.narrow(dim, self.low, whole.shape[dim] - self.low)
        return torch.cat([whole.narrow(dim, 0, self.sink), recent], dim) if self.sink else recent

    def hidden(self, mask: Tensor) -> Tensor:
        """:meth:`mask` for a network that builds its own masks over all slots, with slots before each sequence's window
        hidden."""
        slots = torch.arange(mask.shape[-1], device=mask.device)
        firsts = torch.tensor(self.firsts, device=mask.device)[:, None, None, None]
        return self._window_of(mask.masked_fill((slots >= self.sink) & (slots < firsts), unseen(mask.dtype)), 3)
