"""DFlash's training: blocks behind places all over a text, all of them at once (arXiv 2602.06036)."""

from __future__ import annotations

from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.training.recipes.blocks import BlockRecipe


class DflashRecipe(BlockRecipe):
    """The loss of the block, and no more."""

    method = "dflash"
    drafter_class = DflashDrafter
