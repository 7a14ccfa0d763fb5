"""Optimizers and precision of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def autocast(device: str, precision: str) -> torch.autocast:
    """The autocast context of a loss on this type of device."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def vocabulary_of(network: Any) -> list[Tensor]:
    """The weights of a causal LM with a row per token: embeddings and the projection to logits."""
    ends = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    ends.append(network.get_output_embeddings())
    return [weight for module in ends if module is not None for weight in module.parameters()]


def build_optimizers(
    parts: Sequence[tuple[nn.Module, float]],
    vocabulary: Iterable[Tensor],
    lr: float,
    kind: str = "muon",
    weight_decay: float = 0.0,
) -> list[torch.optim.Optimizer]:
    """Optimizers of all trainable parameters of some modules, with updates of equal size.

    Args:
        parts: the modules, and their learning rates relative to the run's.
        vocabulary: matrices trained like non-matrices, because a step reads few of their rows.
        kind: ``"muon"`` (for matrices, AdamW for the rest) or ``"adamw"``.
    """
    outer = {id(weight) for weight in vocabulary}
    matrices, others = list[dict[str, Any]](), list[dict[str, Any]]()
    for module, scale in parts:
        trained = [p for p in module.parameters() if p.requires_grad]
        for groups, is_matrix in ((matrices, True), (others, False)):
            fitting = [p for p in trained if (p.ndim == 2 and id(p) not in outer) == is_matrix]
            if fitting:
                groups.append({"params": fitting, "scale": scale})
    optimizers: list[torch.optim.Optimizer] = []
    if matrices and kind == "muon":
        optimizers.append(
            torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    elif matrices:
        optimizers.append(torch.optim.AdamW(matrices, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers
