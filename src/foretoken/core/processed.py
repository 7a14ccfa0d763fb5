"""What a request's processors give: whether it is scores of one text, and scores that a token can be drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.core import NothingAllowedError, OptionError

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``(input_ids [1, n], scores [1, V]) -> scores [1, V]``: the shape of Transformers' processors."""


def name_of(hook: Any) -> str:
    """What a processor or criterion of a caller is called: the function, or its class."""
    return str(getattr(hook, "__name__", type(hook).__name__))


def one_row(processor: LogitsProcessor, made: Any, shape: torch.Size) -> Tensor:
    """What a processor made of the scores [1, V] of one text.  It is refused by an ``OptionError`` if it is not scores
    of one text: of several rows the first would be taken for every text's."""
    if isinstance(made, Tensor) and made.shape == shape:
        return made
    if isinstance(made, Tensor):
        rows = made.ndim == 2 and made.shape[1] == shape[1]
        returned = f"{len(made)} rows for one" if rows else f"scores of shape {list(made.shape)} for {list(shape)}"
    else:
        returned = f"{type(made).__name__} for scores of shape {list(shape)}"
    raise OptionError(
        "logits_processor", f"{name_of(processor)} returned {returned}: it is asked row by row; use a batch of one"
    )


def check_processed(logits: Tensor, scores: Tensor) -> None:
    """Tell processed scores [V] that leave no token (``NothingAllowedError``) and those that a processor spoiled
    (``OptionError``) from logits [V] that were bad to begin with."""
    best = scores.amax()
    if bool(torch.isfinite(best)) or not bool(torch.isfinite(logits.amax())):
        return
    if float(best) == -torch.inf:
        raise NothingAllowedError("the request's rules leave no token that may follow")
    raise OptionError("logits_processor", "logits_processor gave NaN or inf: only finite scores and -inf can be used")
