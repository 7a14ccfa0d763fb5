"""What every training does in a step: the learning rate of the moment, an update that must be finite, news of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Progress:
    """What a caller is told after every step; ``acceptance`` when it was just measured."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    acceptance: Mapping[str, Any] | None = None


def learning_rate_factor(step: int, steps: int, warmup: float, decay: float) -> float:
    """Warm-up, plateau, linear decay to zero; in (0, 1] for ``0 <= step < steps``.

    Args:
        step: counted from 0.
        steps: of the whole run.
        warmup: share of the steps in which the rate rises.
        decay: share of the steps in which it falls.
    """
    warm, fall = max(1, round(warmup * steps)), max(1, round(decay * steps))
    return min((step + 1) / warm, (steps - step) / fall, 1.0)


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float, factor: float) -> None:
    """Give every group ``lr`` x ``factor``, times the group's own ``scale`` where it has one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0) * factor


def descend(
    loss: Tensor, parameters: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer], step: int
) -> float:
    """One update against the gradient of ``loss``, which is clipped to norm 1; returns the loss.

    Raises:
        FloatingPointError: the loss or its gradient is NaN or infinite; no weight was changed.
    """
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    # A NaN gradient would spoil the weights, and the checkpoint after them, before the loss shows it.
    if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
        raise FloatingPointError(
            f"the loss is {loss.item()} and its gradient {float(norm)} at step {step}; the last checkpoint is "
            "intact: lower --lr and use another --out, or look at the data"
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())
