"""Checks of the scores that a request's processors return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.core import NothingAllowedError, OptionError

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``(input_ids [1, n], scores [1, V]) -> scores [1, V]``: the shape of Transformers' processors."""


def name_of(hook: Any) -> str:
    """Name of a caller's processor or criterion: the function's, or its class's."""
    return str(getattr(hook, "__name__", type(hook).__name__))


def one_row(processor: LogitsProcessor, result: Any, shape: torch.Size) -> Tensor:
    """Processed scores [1, V] of one sequence. Raises ``OptionError`` for any other shape: of several rows the first
    would be used for every sequence."""
    if isinstance(result, Tensor) and result.shape == shape:
        return result
    if isinstance(result, Tensor):
        rows = result.ndim == 2 and result.shape[1] == shape[1]
        returned = f"{len(result)} rows for one" if rows else f"scores of shape {list(result.shape)} for {list(shape)}"
    else:
        returned = f"{type(result).__name__} for scores of shape {list(shape)}"
    raise OptionError(
        "logits_processor",
        f"{name_of(processor)} returned {returned}: it is called one row at a time; use a batch of one",
    )


def check_processed(logits: Tensor, scores: Tensor) -> None:
    """Raise ``NothingAllowedError`` if processing left no token in scores [V], or ``OptionError`` if it made them
    non-finite. Logits [V] that were already non-finite raise nothing here."""
    best = scores.amax()
    if bool(torch.isfinite(best)) or not bool(torch.isfinite(logits.amax())):
        return
    if float(best) == -torch.inf:
        raise NothingAllowedError("the request's constraints exclude every next token")
    raise OptionError("logits_processor", "logits_processor gave NaN or inf: only finite scores and -inf can be used")
