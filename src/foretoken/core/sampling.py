"""The sampling pipeline: logits to a distribution, and to the token of a greedy or seeded request.

Greedy is a one-hot distribution made by the same function as every other distribution. Processors run in Transformers'
order: logit bias and penalties on the raw logits, user processors, then temperature, top-k, top-p, min-p.

A request with :class:`~foretoken.core.noise.Noise` takes the token of largest ``log p + noise``, as a greedy one takes
that of largest logit. In both, the prefix alone determines the next token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core import NON_FINITE, NonFiniteLogitsError, OptionError, argmaxes, is_large
from foretoken.core.fields import FILTERS as FILTERS
from foretoken.core.fields import NO_FILTERS as NO_FILTERS
from foretoken.core.fields import PENALTIES
from foretoken.core.filters import Filters
from foretoken.core.noise import Noise
from foretoken.core.processed import LogitsProcessor, check_processed, one_row
from foretoken.core.tally import TokenTally
from foretoken.core.values import check_ids, check_real, check_whole, python_number

LARGEST = 1e30
"""Bound of numbers that are added to, multiply or divide logits, so that float32 does not overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters by which tokens are drawn from the target.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass; in (0, 1].
        min_p: drop tokens less likely than ``min_p`` times the most likely one; in [0, 1].
        repetition_penalty: > 1 makes tokens of the prefix less likely (CTRL: divides positive, multiplies negative
            logits).
        presence_penalty: subtracted once from every token of the prefix's generated part.
        frequency_penalty: subtracted once per occurrence in the generated part.
        logit_bias: added to single tokens' logits.
        processors: Transformers ``LogitsProcessor`` objects; must be pure functions of (prefix, scores).

    Raises:
        OptionError: a value of a wrong type or outside its range; it names the option.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        additive = ("presence_penalty", "frequency_penalty")
        real = ("temperature", "top_p", "min_p", "repetition_penalty", *additive)
        for name in real:
            check_real(name, getattr(self, name))
        check_whole("top_k", self.top_k)
        _check(0 <= self.temperature <= LARGEST, "temperature", self.temperature, f">= 0 (and at most {LARGEST:g})")
        _check(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps all tokens)")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _check(1 / LARGEST <= penalty <= LARGEST, "repetition_penalty", penalty, f"> 0 (and at most {LARGEST:g})")
        for name in additive:
            _check_finite(name, getattr(self, name))
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError("logit_bias", "logit_bias must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            check_ids("logit_bias", [token], None)
            check_real("logit_bias", bias)
            _check_finite("logit_bias", bias)
        for name, value in vars(self).items():  # PyTorch multiplies by no integer of more than 64 bits
            object.__setattr__(self, name, float(value) if name in real else python_number(value))


def _check_finite(name: str, value: float) -> None:
    _check(abs(value) <= LARGEST, name, value, f"finite (at most {LARGEST:g})")


def _check(good: bool, name: str, value: Any, rule: str) -> None:
    if not good:
        raise OptionError(name, f"{name} must be {rule}, not {value}")


class Sampler:
    """The sampling pipeline of one request.

    Args:
        prompt_length: start of a prefix's generated part (for presence and frequency penalties, and noise).
        noise: of a request whose seed fixes its draws. A greedy request ignores it.
        skipped: leading tokens that the repetition penalty ignores (an encoder's input).

    Attributes:
        context_free: whether the distribution depends on unprocessed logits alone.
        cuts: whether a filter removes tokens.
        fixed: whether every prefix has exactly one next token, the largest of :meth:`ranking`.
    """

    def __init__(
        self, params: SamplingParams, prompt_length: int = 0, noise: Noise | None = None, skipped: int = 0
    ) -> None:
        self.params = params
        self.prompt_length, self.skipped = prompt_length, skipped
        self.greedy = params.temperature == 0
        self.noise = None if self.greedy else noise
        self.fixed = self.greedy or self.noise is not None
        has_penalties = any(getattr(params, name) != off for name, off in PENALTIES.items())
        self.context_free = not (has_penalties or params.processors or params.logit_bias)
        self._text, self._generated = TokenTally(self.skipped), TokenTally(prompt_length)
        self._filters = Filters(**{name: getattr(params, name) for name in FILTERS})
        self.cuts = not self.greedy and any(getattr(params, name) != off for name, off in NO_FILTERS.items())

    @property
    def restricts(self) -> bool:
        """Whether the request may forbid tokens (by processors such as a grammar, or by a bias)."""
        return bool(self.params.processors or self.params.logit_bias)

    @cached_property
    def unprocessed(self) -> Sampler:
        """The same without processors, for positions whose prefix is unknown; itself if it has none."""
        if not self.params.processors:
            return self
        return Sampler(replace(self.params, processors=()), self.prompt_length, self.noise, self.skipped)

    @cached_property
    def noiseless(self) -> Sampler:
        """The same without noise; itself if it has none."""
        return self if self.noise is None else Sampler(self.params, self.prompt_length, skipped=self.skipped)

    @property
    def recipe(self) -> Hashable:
        """Samplers with equal recipes make equal distributions from equal logits; ``None`` if the prefix or single
        tokens count."""
        params = self.params
        return (params.temperature, *(getattr(params, name) for name in FILTERS)) if self.context_free else None

    def distribution(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """[V] distribution after ``prefix`` from logits [V]; one-hot when greedy.

        float32, or float64 when the logits are float64. Raises ``NonFiniteLogitsError`` without a finite logit, and
        ``NothingAllowedError`` where processors leave no token.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not self.context_free:
            scores = self._processed(scores, prefix)
        return self._finish(scores[None])[0]

    def distributions(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """[N, V] distributions from logits [N, V]; ``prefixes`` may be ``None`` when the pipeline is context-free."""
        return self._finish(self._all_processed(logits, prefixes))

    def ranking(self, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """[N, V] scores whose argmax (the lowest id on ties) is the next token, from logits [N, V].

        Greedy: the processed logits. With noise: log p(v) - log E_t(v), up to a constant per row, in float64; so the
        token has the distribution p. Without either: log p(v), up to a constant. The second largest and so on would
        follow if those before them were impossible: from a draft model's logits, they are candidates. Raises
        ``NonFiniteLogitsError`` for a row without a finite logit.

        Args:
            logits: one row per prefix.
            lengths: tokens before the one that is ranked, prompt included, one per row.
            prefixes: these tokens; may be ``None`` when the pipeline is context-free.
        """
        scores = self._all_processed(logits, prefixes)
        if self.greedy:
            best_of(scores)
            return scores
        return self.with_noise(self._log_probs(scores), lengths)

    def winners(self, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None) -> list[int]:
        """Argmax of each row's :meth:`ranking`; arguments and errors are the same.

        Filtered rows on a CPU keep few tokens and need no whole ranking.
        """
        if self.noise is None or not self.cuts or logits.device.type != "cpu":
            is_plain = self.greedy and self.context_free
            tokens, is_finite = argmaxes(logits if is_plain else self.ranking(logits, lengths, prefixes))
            if not is_finite:
                raise NonFiniteLogitsError(NON_FINITE)
            return tokens
        rows = zip(self._all_processed(logits, prefixes), lengths, strict=True)
        return [self._winner_of_kept(self.noise, row, length - self.prompt_length) for row, length in rows]

    def _winner_of_kept(self, noise: Noise, scores: Tensor, position: int) -> int:
        """The same for one row, from processed scores [V]."""
        ids, weights = self._filters.remaining(scores.numpy(), self.params.temperature)
        with np.errstate(divide="ignore"):  # the smallest weights may be 0 after normalisation
            sums = np.log(weights) + noise.gumbels_of(position, torch.from_numpy(ids)).numpy()
        return int(ids[sums.argmax()])

    def with_noise(self, log_probs: Tensor, lengths: Sequence[int]) -> Tensor:
        """``log_probs`` [N, V] plus the noise of the positions after ``lengths``; unchanged without noise."""
        if self.noise is None:
            return log_probs
        if self.cuts and log_probs.device.type == "cpu":
            return self._with_noise_of_kept(self.noise, log_probs, lengths)
        level = len(set(lengths)) == 1  # one position: one vector serves all rows
        rows = self.noise_rows(lengths[:1] if level else lengths, log_probs)
        return (rows[0][None] if level else torch.stack(rows)) + log_probs

    def _with_noise_of_kept(self, noise: Noise, log_probs: Tensor, lengths: Sequence[int]) -> Tensor:
        """The same for filtered rows: the noise of a whole vocabulary takes longer than a small model's draft."""
        rows = log_probs.double()
        for row, length in zip(rows, lengths, strict=True):
            possible = torch.from_numpy(np.flatnonzero(row.numpy() > -np.inf))
            row[possible] += noise.gumbels_of(length - self.prompt_length, possible)
        return rows

    def noise_rows(self, lengths: Sequence[int], like: Tensor) -> list[Tensor]:
        """The noise [V] of the positions after ``lengths``, for the vocabulary and device of ``like`` [.., V]."""
        if self.noise is None:
            return []
        return [self.noise.gumbels(n - self.prompt_length, like.shape[-1], like.device) for n in lengths]

    def _all_processed(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not self.context_free:
            rows = prefixes if prefixes is not None else [()] * len(scores)
            scores = torch.stack([self._processed(s, prefix) for s, prefix in zip(scores, rows, strict=True)])
        return scores

    def _processed(self, scores: Tensor, prefix: Sequence[int]) -> Tensor:
        params = self.params
        unprocessed, scores = scores, scores.clone()
        if params.logit_bias:
            count = len(params.logit_bias)  # (For 300 Python integers, torch takes 260 us to make a tensor, NumPy 15.)
            tokens = torch.from_numpy(np.fromiter(params.logit_bias, np.int64, count)).to(scores.device)
            added = torch.from_numpy(np.fromiter(params.logit_bias.values(), float, count)).to(scores.dtype)
            scores[tokens] += added.to(scores.device)
        if params.repetition_penalty != 1.0 and len(prefix) > self.skipped:
            penalised = torch.from_numpy(self._text.counts(prefix)[0]).to(scores.device)
            value = scores.index_select(0, penalised)
            value = torch.where(value < 0, value * params.repetition_penalty, value / params.repetition_penalty)
            scores.index_copy_(0, penalised, value)
        if len(prefix) > self.prompt_length and (params.presence_penalty or params.frequency_penalty):
            tokens, counts = (torch.from_numpy(each).to(scores.device) for each in self._generated.counts(prefix))
            scores[tokens] -= params.frequency_penalty * counts.to(scores.dtype) + params.presence_penalty
        if params.processors:
            ids = torch.from_numpy(self._text.ids(prefix)).to(scores.device)[None]
            batch = scores[None]
            for processor in params.processors:
                batch = one_row(processor, processor(ids, batch), batch.shape)
            scores = batch[0]
            check_processed(unprocessed, scores)
        return scores

    def _finish(self, scores: Tensor) -> Tensor:
        """Processed scores [N, V] -> distributions [N, V]."""
        if self.greedy:
            best_of(scores)
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        if self.cuts and scores.device.type == "cpu":
            return self._filters.filtered(scores, self.params.temperature)
        distributions = torch.softmax(self._tempered(scores), -1)
        return self._filters.cut(distributions, scores) if self.cuts else distributions

    def _log_probs(self, scores: Tensor) -> Tensor:
        """Processed scores [N, V] -> log-probabilities [N, V], up to a constant per row; -inf for impossible tokens."""
        if self.cuts and scores.device.type == "cpu":
            return self._filters.logs(scores, self.params.temperature)
        return self._finish(scores).log_() if self.cuts else self._tempered(scores)

    def log_probs(self, logits: Tensor) -> Tensor:
        """The same from logits [N, V], for a context-free pipeline."""
        return self._log_probs(self._all_processed(logits, None))

    def _tempered(self, scores: Tensor) -> Tensor:
        best = best_of(scores)
        if self.params.temperature == 1.0:
            return scores
        # Shifted first, and never divided by a number that rounds to 0: a tiny temperature must not give inf - inf or 0
        # / 0.
        return (scores - best).div_(max(self.params.temperature, torch.finfo(scores.dtype).tiny))


def running_sums(weights: Tensor) -> Tensor:
    """[..., V] running sums of weights [..., V], for draws by inverse CDF.

    In float32 the steps are multiples of 6e-8, too coarse for the tail of a vocabulary: its tokens would be drawn never
    or twice as often. (mps has no float64.)
    """
    return weights.cumsum(-1) if weights.device.type == "mps" else weights.cumsum(-1, dtype=torch.float64)


def draw(weights: Tensor, u: float) -> int:
    """Inverse-CDF draw from a distribution or unnormalised weights [V] with one uniform ``u`` in [0, 1).

    Never returns a token of zero weight.
    """
    if is_large(weights):  # a running sum is serial: 0.4 ms for 150,000 tokens
        return draw_by_blocks(weights, u)
    cdf = running_sums(weights)
    index = int(torch.searchsorted(cdf, cdf[-1:] * u, right=True))
    return index if index < len(weights) and float(weights[index]) > 0.0 else last_possible(weights)


def draws(rows: Tensor, uniforms: Sequence[Sequence[float]]) -> list[list[int]]:
    """:func:`draw` from weights [n, V], from each row with its own m uniforms, in one call."""
    if is_large(rows) or len(rows) == 1 == len(uniforms[0]):
        return [[draw(row, u) for u in each] for row, each in zip(rows, uniforms, strict=True)]
    cdf = running_sums(rows)
    goals = torch.tensor(uniforms, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
    indices = torch.searchsorted(cdf, goals, right=True).clamp_(max=rows.shape[-1] - 1)  # [n, m]
    drawn = torch.cat((indices, rows.gather(-1, indices).to(cdf.dtype)), -1).tolist()  # one transfer
    count = indices.shape[-1]
    return [
        [int(token) if weight > 0 else last_possible(row) for token, weight in zip(each, each[count:], strict=False)]
        for row, each in zip(rows, drawn, strict=True)
    ]


def last_possible(weights: Tensor) -> int:
    """The last token of positive weight [V], for a draw that rounding put on the last step of the CDF."""
    return int(weights.nonzero()[-1, 0])


def draw_by_blocks(distribution: Tensor, u: float, size: int = 256) -> int:
    """Inverse-CDF draw from weights [V] on a CPU with a uniform ``u`` in [0, 1), never a token of zero weight.

    A block of ``size`` tokens is drawn first, then a token of it: one running sum is serial, 0.4 ms for 150,000 tokens.
    """
    weights = distribution.numpy()
    whole = len(weights) // size * size
    blocks = weights[:whole].reshape(-1, size).sum(1, dtype=np.float64)
    sums = np.append(blocks, weights[whole:].sum(dtype=np.float64))
    cdf = sums.cumsum(dtype=np.float64)
    goal = cdf[-1] * u
    block = _first_above(cdf, goal, sums)
    start = block * size
    part = weights[start : start + size]
    return start + _first_above(part.cumsum(dtype=np.float64), goal - cdf[block - 1] if block else goal, part)


def _first_above(cdf: np.ndarray[Any, Any], goal: float, weights: np.ndarray[Any, Any]) -> int:
    """The first index whose running sum exceeds ``goal``; the last of positive weight if rounding leaves none."""
    index = int(cdf.searchsorted(goal, side="right"))
    return index if index < len(weights) and weights[index] > 0 else int(weights.nonzero()[0][-1])


_LATER: ContextVar[list[Tensor] | None] = ContextVar("largest entries that are checked later", default=None)


@contextmanager
def checks_later() -> Iterator[list[Tensor]]:
    """Defer finiteness checks inside the block, without a device sync: the rows' largest entries are collected in the
    list. The caller reads them with other results and passes them to :func:`check_best`."""
    largest: list[Tensor] = []
    token = _LATER.set(largest)
    try:
        yield largest
    finally:
        _LATER.reset(token)


def check_best(largest: Sequence[Tensor]) -> None:
    """Check values collected by :func:`checks_later`. Raises ``NonFiniteLogitsError`` if some are not finite."""
    if not all(bool(torch.isfinite(values).all()) for values in largest):
        raise NonFiniteLogitsError(NON_FINITE)


def best_of(scores: Tensor) -> Tensor:
    """[N, 1] the largest of each row [N, V]. Raises ``NonFiniteLogitsError`` if one is not finite, unless inside
    :func:`checks_later`."""
    best, later = scores.amax(-1, keepdim=True), _LATER.get()
    if later is not None:
        later.append(best)
    elif not bool(torch.isfinite(best).all()):
        raise NonFiniteLogitsError(NON_FINITE)
    return best
