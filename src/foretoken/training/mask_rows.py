"""Rows from which a network learns to predict several positions in one pass: the text, and masks after positions all
over it.

A mask row has an anchor, the column of the last visible token, and a depth d >= 1.  Its position is anchor + d, it sees
the text up to its anchor and the earlier masks of the same anchor, and it predicts the token after its position,
exactly as in a draft after the anchor.  Masks of depth d + 1 exist only for anchors with a mask of depth d (PARD's
conditional drop, arXiv 2504.18583, section 3.2; P-EAGLE's nested sample, 2602.01469).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEEP, LEAST = 0.7, 0.2
"""Share of the previous depth's anchors that a depth keeps, and the least share of all anchors."""


def kept_counts(seeds: int, depths: int, keep: float = KEEP, least: float = LEAST) -> list[int]:
    """Number of masks at the depths 1 to ``depths``, for this number of seeds."""
    return [int(max(0, seeds - d) * max(keep**d, least)) for d in range(1, depths + 1)]


def mask_rows(
    seeds: Tensor, depths: int, generator: torch.Generator, keep: float = KEEP, least: float = LEAST
) -> tuple[Tensor, Tensor]:
    """Anchors and depths [m] of mask rows, by depth and then by position, at most ``depths`` deep.  ``seeds``, bool
    [n], are the columns whose next token is predicted."""
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
    """Bool [m, m]: which rows (depth 0 for the text) a row sees, from anchors and depths [m]."""
    query, key = anchors[:, None], anchors[None]
    allowed = (depths[None] == 0) & (key <= query)
    same_anchor = (query == key) & (depths[None] <= depths[:, None])
    return allowed | same_anchor


def additive(visible: Tensor) -> Tensor:
    """An attention mask: 0 where ``visible``, minus infinity elsewhere."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)


def with_text(length: int, anchors: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Anchors and depths [length + m] of the rows of a text, followed by mask rows."""
    return torch.cat([torch.arange(length), anchors]), torch.cat([torch.zeros(length, dtype=torch.long), depths])


def mask_ids(tokens: Tensor, count: int, mask: int) -> Tensor:
    """Ids [b, n + count] of texts [b, n], followed by masks."""
    return torch.cat([tokens, tokens.new_full((len(tokens), count), mask)], 1)


def seeds_of(weights: Tensor) -> Tensor:
    """Bool [n]: columns that count in any text of ``weights`` [b, n]; all if none counts."""
    columns: Tensor = (weights > 0).any(0).cpu()
    return columns if bool(columns.any()) else torch.ones_like(columns)
