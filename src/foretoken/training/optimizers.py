"""With which optimizer a training changes parameters, and in which precision it multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

OPTIMIZERS = ("muon", "adamw")
"""Muon for matrices with AdamW for the rest, or AdamW for everything.

Muon orthogonalises in bfloat16, which costs more than the rest of a step on a CPU without bfloat16 products.
"""
PRECISIONS = ("bfloat16", "float32")
"""Of products: bfloat16 by autocast, or those of the float32 weights."""


def check_choices(optimizer: str, precision: str) -> None:
    """Raise ``ValueError`` for an optimizer or a precision that there is not."""
    for name, value, choices in (("optimizer", optimizer, OPTIMIZERS), ("precision", precision, PRECISIONS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def autocast(device: str, precision: str) -> torch.autocast:
    """The context in which a loss is computed on a device of this type."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def build_optimizers(
    matrices: Sequence[dict[str, Any]], rest: Sequence[dict[str, Any]], kind: str, lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Optimizers of two lists of parameter groups, whose updates have one size; only ``matrices`` decay."""
    found: list[torch.optim.Optimizer] = []
    if matrices and kind == "muon":
        found.append(
            torch.optim.Muon(list(matrices), lr=lr, momentum=0.95, weight_decay=weight_decay,
                             adjust_lr_fn="match_rms_adamw")
        )  # fmt: skip
    elif matrices:
        found.append(torch.optim.AdamW(list(matrices), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay))
    if rest:
        found.append(torch.optim.AdamW(list(rest), lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    return found
