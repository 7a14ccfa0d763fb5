"""Where two greedy outputs part, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.models.base import Feed, LanguageModel
from foretoken.sampling import Sampler, SamplingParams

RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Gap between two logits that rounding may turn over, as a fraction of the largest logit's magnitude (at least 1).

A forward over 1 row and one over n rows sum in another order.  Through a stack of layers their logits differ by a few
units in the last place: 2**-8 in bfloat16, 2**-11 in float16, 2**-24 in float32.
"""


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs of one prompt differ.

    Attributes:
        position: index among the new tokens.
        logit_gap: how far the less likely of the two tokens is below the best logit there, in the target's own logits;
            ``None`` when one output simply ends there.
        tolerance: the largest gap that counts as a numerical tie.
    """

    position: int
    logit_gap: float | None
    tolerance: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.logit_gap is not None and self.logit_gap <= self.tolerance


def first_difference(
    target: LanguageModel,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    params: SamplingParams | None = None,
) -> Difference | None:
    """Compare two greedy outputs token by token; ``None`` when they are the same.

    The target scores the common prefix once more, one row at the end, as plain decoding does.  ``params`` are the
    penalties and biases that both outputs were made with: the gap is one between logits that have gone through them.
    """
    if list(one) == list(other):
        return None
    shorter = min(len(one), len(other))
    position = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    logits = next_logits(target, [*prompt, *one[:position]])
    tolerance = tie_tolerance(logits)
    if position == shorter:
        return Difference(position, None, tolerance)
    wide = _processed(logits.double(), [*prompt, *one[:position]], len(prompt), params)
    gap = float(wide.max() - torch.minimum(wide[one[position]], wide[other[position]]))
    return Difference(position, gap, tolerance)


def _processed(logits: Tensor, prefix: Sequence[int], prompt_length: int, params: SamplingParams | None) -> Tensor:
    """Logits [V] after penalties and biases, up to a constant: the logarithm of their law at temperature 1."""
    if params is None:
        return logits
    unfiltered = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return Sampler(unfiltered, prompt_length).law(logits, prefix).log()


@torch.inference_mode()
def next_logits(target: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """[V] logits after ``tokens``, scored as plain decoding would."""
    sequence = target.open()
    try:
        target.prefill(sequence, tokens[:-1])
        return target.forward([Feed(sequence, tokens[-1:])])[0].logits[0]
    finally:
        target.release(sequence)


def tie_tolerance(logits: Tensor) -> float:
    """The largest gap in ``logits`` [V] that rounding may turn over, by their dtype."""
    finite = logits[torch.isfinite(logits)]
    scale = max(1.0, float(finite.abs().max())) if len(finite) else 1.0
    return RELATIVE_TOLERANCE.get(logits.dtype, 1e-4) * scale
