"""Rows in which a network learns to guess several places in one pass: the text, and masks behind places all over it.

A mask row has an anchor, the column of the last token that it may see, and a depth d from 1 on: it stands at position
anchor + d, sees the text up to its anchor and the masks of the same anchor that come before it, and guesses the token
behind its position.  That is what a draft looks like behind the anchor.  Masks of depth d + 1 stand only behind anchors
that have one of depth d (PARD's conditional drop, arXiv 2504.18583, section 3.2; P-EAGLE's nested sample, 2602.01469).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEEP, LEAST = 0.7, 0.2
"""Share of the anchors that a depth keeps of those of the depth before, and the least share of all."""


def kept_counts(seeds: int, depths: int, keep: float = KEEP, least: float = LEAST) -> list[int]:
    """How many masks the depths 1 to ``depths`` have, for so many places to learn from."""
    return [int(max(0, seeds - d) * max(keep**d, least)) for d in range(1, depths + 1)]


def mask_rows(
    seeds: Tensor, depths: int, generator: torch.Generator, keep: float = KEEP, least: float = LEAST
) -> tuple[Tensor, Tensor]:
    """Anchors and depths [m] of mask rows, depth by depth, in the order of their positions, at most ``depths`` deep;
    ``seeds``, bool [n], are the columns whose next token is to be guessed."""
    anchors, levels = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
    positions = seeds.nonzero()[:, 0]
    for depth, count in enumerate(kept_counts(len(positions), depths, keep, least), 1):
        positions = positions + 1
        positions = positions[positions < len(seeds)]
        positions = positions[
            seeds[positions]
        ]  # positions of this depth that have a mask of the depth before at their anchor
        chosen = torch.randperm(len(positions), generator=generator)[:count].sort().values
        positions = positions[chosen]
        anchors.append(positions - depth)
        levels.append(torch.full_like(positions, depth))
    return torch.cat(anchors), torch.cat(levels)


def rows_mask(anchors: Tensor, depths: Tensor) -> Tensor:
    """Bool [m, m]: which rows (of depth 0 for the text) a row sees, by anchors and depths [m]."""
    query, key = anchors[:, None], anchors[None]
    text = (depths[None] == 0) & (key <= query)
    same_anchor = (query == key) & (depths[None] <= depths[:, None])
    return text | same_anchor


def additive(visible: Tensor) -> Tensor:
    """An attention mask that adds nothing where ``visible`` and minus infinity elsewhere."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)


def with_text(length: int, anchors: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Anchors and depths [length + m] of the rows of a text, then of mask rows."""
    return torch.cat([torch.arange(length), anchors]), torch.cat([torch.zeros(length, dtype=torch.long), depths])


def mask_ids(tokens: Tensor, count: int, mask: int) -> Tensor:
    """Ids [b, n + count] of texts [b, n] and masks behind them."""
    return torch.cat([tokens, tokens.new_full((len(tokens), count), mask)], 1)


def seeds_of(weights: Tensor) -> Tensor:
    """Bool [n] columns that count in any text of ``weights`` [b, n]; all where none does."""
    columns: Tensor = (weights > 0).any(0).cpu()
    return columns if bool(columns.any()) else torch.ones_like(columns)
