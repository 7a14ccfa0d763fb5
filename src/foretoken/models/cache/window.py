"""A drafter that reads the end of a long text, and perhaps its first tokens: it was trained on shorter ones.

A network without a window of its own guesses worse the more places it looks at beyond those that it knew in training.
Positions stay those of the text.  What is not read is neither scored nor loaded: a round's cost stops growing.  A layer
with a window of its own reads what both allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.models.cache.masks import unseen

if TYPE_CHECKING:
    from foretoken.models.cache.rectangle import TreeCache
    from foretoken.models.network.call import Forward

USUAL = 4096
"""Places that drafters read which were trained without a window: what most of them were trained on."""


@dataclass(frozen=True)
class Window:
    """What new rows read of the slots before them.

    Attributes:
        size: slots right before them; 0: all.
        sink: first slots of the text that are read as well.

    Raises:
        ValueError: a number below 0, or a sink without a window.
    """

    size: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        if self.size < 0 or self.sink < 0:
            raise ValueError(f"window and sink must be at least 0, not {self.size} and {self.sink}")
        if self.sink and not self.size:
            raise ValueError(f"sink={self.sink} is for a window, and window=0 reads the whole text: leave sink out")

    def cut(self, starts: Sequence[int]) -> Cut | None:
        """What is read for texts whose new rows begin at these slots; ``None``: everything."""
        if not self.size or max(starts) - self.size <= self.sink:
            return None
        firsts = [max(start - self.size, 0) for start in starts]
        return Cut(firsts, max(min(firsts), self.sink), self.sink)

    def applied(self, cache: TreeCache, masks: dict[str, Tensor | None], forwards: Forward) -> dict[str, Tensor | None]:
        """Let the call that a cache is planned for read the window.

        Args:
            cache: hands out what is read, unless attention skips what is masked.
            masks: additive, by layer type.
            forwards: what runs the call.

        Returns:
            The masks of what the cache hands out.
        """
        cut = self.cut(cache.planned.starts)
        if cut is None:
            return masks
        if forwards.skips_masked:
            used, dtype = cache.planned.used, forwards.run_dtype
            return {name: cut.hidden(mask, used, dtype) for name, mask in masks.items()}
        cache.reads = cut
        return {name: cut.mask(mask) for name, mask in masks.items()}


WHOLE_TEXT = Window()


@dataclass(frozen=True)
class Cut:
    """The slots that one call reads.

    Attributes:
        firsts: per row the first slot of its window.
        low: the first slot that any row's window has.
        sink: slots at the beginning that all read.
    """

    firsts: Sequence[int]
    low: int
    sink: int

    def slots(self, stored: Tensor) -> Tensor:
        """Keys or values [b, H, n, d] of the slots that are read."""
        recent = stored[:, :, self.low :]
        return torch.cat([stored[:, :, : self.sink], recent], 2) if self.sink else recent

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """An additive mask [b, 1, rows, n] of these slots, with what lies before each row's window unseen; ``None``
        stays: one row that sees all that is read."""
        if mask is None:
            return None
        recent = mask[..., self.low :]
        if max(self.firsts) > self.low:
            slots = torch.arange(self.low, mask.shape[-1], device=mask.device)
            before = slots < torch.tensor(self.firsts, device=mask.device)[:, None, None, None]
            recent = recent.masked_fill(before, unseen(mask.dtype))
        return torch.cat([mask[..., : self.sink], recent], -1) if self.sink else recent

    def hidden(self, mask: Tensor | None, used: int, dtype: torch.dtype) -> Tensor:
        """An additive mask [b, 1, rows, used] of all slots in which those that are not read are unseen: for attention
        that passes over unseen slots by itself.

        Args:
            mask: of all slots; ``None``: one row that sees them all.
            used: slots.
            dtype: of the mask.
        """
        slots = torch.arange(used, device=None if mask is None else mask.device)
        firsts = torch.tensor(self.firsts, device=slots.device)[:, None, None, None]
        mask = torch.zeros(1, 1, 1, used, dtype=dtype) if mask is None else mask
        return mask.masked_fill((slots >= self.sink) & (slots < firsts), unseen(dtype))
