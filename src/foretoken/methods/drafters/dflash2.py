"""DFlash with convolutions along the block, and a lattice of candidates scored in pairs.

DFlash2, z-lab 2026; its trees are those of the lattice, as in JetSpec (arXiv 2606.18394).
"""

from __future__ import annotations

from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.pairs import PairDrafter


class Dflash2Drafter(PairDrafter):
    """Scores candidates by position and previous token."""

    name = "dflash2"
    net_config = Dflash2Config
    net_class = Dflash2Net
