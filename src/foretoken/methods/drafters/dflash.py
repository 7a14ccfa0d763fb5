"""One pass of a small network over the target's hidden states predicts a whole block of tokens.

DFlash, Chen, Liang, Liu 2026 (arXiv 2602.06036); with a causal block JetSpec (arXiv 2606.18394).
"""

from __future__ import annotations

from foretoken.methods.drafters.blocks import BlockDrafter


class DflashDrafter(BlockDrafter):
    """Predicts the positions of a block independently of each other."""

    name = "dflash"
