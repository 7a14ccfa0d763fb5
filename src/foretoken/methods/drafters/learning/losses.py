"""Names of the training divergences; commands check them before PyTorch is loaded."""

from __future__ import annotations

LOSSES = ("fkl", "rkl", "jsd", "tvd")
"""Forward and reverse KL, Jensen-Shannon, total variation."""


def check_loss(name: str, beta: float) -> None:
    """Check the options of :func:`foretoken.methods.drafters.learning.divergences.divergence`.

    Raises:
        ValueError: an unknown name, or ``beta`` outside (0, 1).
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: choose one of {', '.join(LOSSES)}")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be between 0 and 1 (both excluded: use fkl or rkl there), not {beta}")
