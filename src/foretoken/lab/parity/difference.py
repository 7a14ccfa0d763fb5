"""The first difference of two outputs of one request, classified as rounding or real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core.sampling import NO_FILTERS, Sampler, SamplingParams
from foretoken.models.base import Feed, LanguageModel

RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Gap between two logits that rounding may reverse, as a fraction of the largest logit's magnitude (at least 1).

Forward passes over 1 row and over n rows sum in different orders.  Through a stack of layers their logits differ by a
few units in the last place: 2**-8 in bfloat16, 2**-11 in float16, 2**-24 in float32.
"""


@dataclass(frozen=True)
class Difference:
    """The first position where two outputs of one prompt differ.

    Attributes:
        position: index among the new tokens.
        logit_gap: distance of the less likely of the two tokens from being the next token, in the target's logits;
            ``None`` if one output ends there or has a token that the filters exclude.
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
    first: Sequence[int],
    second: Sequence[int],
    sampler: Sampler | None = None,
) -> Difference | None:
    """Compare two outputs of one request token by token; ``None`` if they are equal.

    The expected token after a prefix has the largest :meth:`~foretoken.core.sampling.Sampler.ranking`: the processed
    logits of a greedy request, or log p + noise of a seeded one.  The target scores the common prefix again, one row at
    the end, as plain decoding does.  The sampler is the request's; it defaults to a greedy one without penalties.
    Raises ``ValueError`` for a sampler with random choices.
    """
    sampler = sampler or Sampler(SamplingParams(), len(prompt))
    if target.answer_start:  # answers begin with these tokens, and the prompt is an encoder's input
        sampler = Sampler(sampler.params, len(prompt) + len(target.answer_start), sampler.noise, len(prompt))
        prompt = [*prompt, *target.answer_start]
    if not sampler.fixed:
        raise ValueError("sampled outputs can be compared token by token only with the noise of their seed")
    if list(first) == list(second):
        return None
    shorter = min(len(first), len(second))
    position = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    prefix = [*prompt, *first[:position]]
    logits = next_logits(target, prompt, first[:position])
    tolerance = tie_tolerance(logits, getattr(target, "rounds_like", logits.dtype))
    if position == shorter:
        return Difference(position, None, tolerance)
    gap = _logit_gap(sampler, logits.cpu().double(), prefix, (first[position], second[position]), tolerance)
    return Difference(position, gap if math.isfinite(gap) else None, tolerance)


def _logit_gap(
    sampler: Sampler, logits: Tensor, prefix: Sequence[int], tokens: tuple[int, int], tolerance: float
) -> float:
    """Distance in logits [V] of the lower of two tokens to the largest of the ranking.

    Rounding may also move a token across the border of a filter, so any token that may have been kept is a candidate,
    and only needs to beat those that were certainly kept.
    """
    params = sampler.params
    ranking = _ranking(sampler, replace(params, **NO_FILTERS), logits, prefix)
    may, must = _filtered(sampler, logits, prefix, tolerance)
    best = ranking.where(must, -math.inf).max()
    gap = float(best - ranking.where(may, -math.inf)[list(tokens)].min())
    # log p = logits / temperature
    return max(0.0, gap) * (1.0 if sampler.greedy else params.temperature)


def _ranking(sampler: Sampler, params: SamplingParams, logits: Tensor, prefix: Sequence[int]) -> Tensor:
    """Ranking [V] after ``prefix`` with other parameters and the same noise."""
    again = Sampler(params, sampler.prompt_length, sampler.noise, sampler.skipped)
    return again.ranking(logits[None], [len(prefix)], [prefix])[0]


def _filtered(sampler: Sampler, logits: Tensor, prefix: Sequence[int], tolerance: float) -> tuple[Tensor, Tensor]:
    """Masks [V] of the tokens that the filters may keep and must keep, if logit gaps are off by up to ``tolerance``.

    Every filter keeps the tokens of the largest logits.  For top-p and min-p their number depends on ratios of
    probabilities, which are off by a factor.  Two tokens beside the border may also swap.
    """
    params = sampler.params
    scores = _ranking(sampler, replace(params, temperature=0.0), logits, prefix)
    if sampler.greedy:
        return torch.isfinite(scores), torch.isfinite(scores)
    factor = math.exp(min(tolerance / params.temperature, 700.0))  # exp overflows above
    most, least = (
        torch.isfinite(_ranking(sampler, _moved(params, by), logits, prefix)) for by in (factor, 1.0 / factor)
    )
    may = scores >= scores[most].min() - tolerance
    must = least & (scores > scores.where(~least, -math.inf).max() + tolerance)
    return may, must


def _moved(params: SamplingParams, factor: float) -> SamplingParams:
    """The filters for probability ratios changed by a factor: above 1 they keep more tokens, below 1 fewer."""
    odds = params.top_p * factor
    top_p = odds / (1.0 - params.top_p + odds)
    return replace(params, top_p=max(top_p, math.ulp(0.0)), min_p=min(1.0, params.min_p / factor))


@torch.inference_mode()
def next_logits(target: LanguageModel, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Logits [V] after a prompt, the start of its answer and ``output``, scored as in plain decoding."""
    sequence, tokens = target.open(), [*prompt, *output]
    try:
        target.expect(sequence, len(prompt))
        target.prefill(sequence, tokens[:-1])
        return target.forward([Feed(sequence, tokens[-1:])])[0].logits[0]
    finally:
        target.release(sequence)


def tie_tolerance(logits: Tensor, dtype: torch.dtype | None = None) -> float:
    """The largest gap in ``logits`` [V] that rounding in ``dtype`` (default: theirs) may reverse."""
    finite = logits[torch.isfinite(logits)]
    scale = max(1.0, float(finite.abs().max())) if len(finite) else 1.0
    return RELATIVE_TOLERANCE.get(dtype or logits.dtype, 1e-4) * scale
