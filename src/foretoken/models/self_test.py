"""Whether a model's recurrent state survives a rollback, tried out on a few tokens.

No list of names says it: the same family was wrong in one release of Transformers and right in the next (a forward of
several tokens from an existing state).  The test costs five forwards of at most eight rows, once per model object.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from foretoken.models.base import Feed
from foretoken.models.state_cache import StateCache, tensors_of

if TYPE_CHECKING:
    from foretoken.models.stateful import StatefulModel


class Limits(NamedTuple):
    """Relative differences to a fresh reading that are rounding.

    Attributes:
        first: in the first layer that has such a tensor; below it almost nothing has been rounded yet.
        mean: over all layers.
    """

    first: float
    mean: float


HALF, EXACT = Limits(0.05, 0.2), Limits(1e-4, 3e-4)
"""Random models of 2 to 4 layers: bfloat16 up to 0.003 and 0.03, float32 up to 3e-7 and 5e-6.  A state that a forward
of several tokens ignores makes 0.07 to 1, a rule for single tokens that leaves a clamp out (nemotron_h, zamba2) 1e-3.
"""


@torch.inference_mode()
def state_fault(model: StatefulModel) -> str | None:
    """What goes wrong when drafts are rejected, in words; ``None`` when nothing does.

    Transformers says once per function that faster kernels could be installed; it says so to itself here.
    """
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return _difference(model)
    except Exception as error:  # a forward that knows no cache fails in its own way
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
    finally:
        logging.set_verbosity(before)


def _difference(model: StatefulModel) -> str | None:
    text = [(7 * i + 3) % model.vocab_size for i in range(8)]
    wrong = [(token + 1) % model.vocab_size for token in text]
    sequence = model.open()
    try:
        model.prefill(sequence, text[:4])
        single = model.forward([Feed(sequence, text[4:5])])[0].logits
        model.commit(sequence, [0])
        model.forward([Feed(sequence, [text[5], *wrong[5:8]])])
        model.commit(sequence, [0])
        chain = model.forward([Feed(sequence, text[6:])])[0].logits
        model.commit(sequence, [0, 1])
        state, fresh = model.state(sequence), StateCache()
        wanted = model.read(fresh, text, 4)
        return _worst(model, torch.cat([single, chain]), wanted[[0, 2, 3]], state, fresh)
    finally:
        model.release(sequence)


def _worst(model: StatefulModel, logits: Tensor, wanted: Tensor, state: StateCache, fresh: StateCache) -> str | None:
    """The kind of tensor that differs from a fresh reading, and by how much."""
    found: dict[str, list[float]] = defaultdict(list)
    for (kind, mine), (_, theirs) in zip(tensors_of(state.cache), tensors_of(fresh.cache), strict=True):
        found[kind].append(relative(mine, theirs))
    limits = HALF if model.dtype in (torch.bfloat16, torch.float16) else EXACT
    for kind, values in found.items():
        for value, limit in ((values[0], limits.first), (sum(values) / len(values), limits.mean)):
            if not value <= limit:
                return _said(kind, value)
    value = relative(logits, wanted)
    return None if value <= limits.mean else _said("logits", value)


def _said(kind: str, value: float) -> str:
    name = kind.replace("_", " ")
    return f"after a rejected draft its {name} differ from a fresh reading by {value:.2g} of their size"


def relative(mine: Tensor, theirs: Tensor) -> float:
    """Size of the difference in units of ``theirs``."""
    if mine.shape != theirs.shape:
        return float("inf")
    size = theirs.double().norm()
    return float((mine.double() - theirs.double()).norm() / size.clamp_min(1e-30))
