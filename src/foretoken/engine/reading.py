"""Chunked prefill: some prompt tokens are processed beside every round, so that a long prompt does not stall the
batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from foretoken.core import HiddenText
from foretoken.core.portions import portions
from foretoken.core.values import OptionError, check_real
from foretoken.engine.logprobs import logprobs_of
from foretoken.engine.request import Running, Turn
from foretoken.engine.requests import Requests
from foretoken.methods.drafters.texts import DraftTexts, Pace
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.clock import now

ALL = 1 << 60
FIRST, FEWEST = 64, 16
"""Tokens of the first chunk, whose time is unknown, and least tokens of every later one."""
PIECE = 512
"""Prompt tokens per forward when prompt log-probabilities are requested."""


class ReadingTime:
    """Size of a prefill chunk that delays other requests, by the measured time per token.

    The same number of tokens takes a second on one model and a tenth on another, and running requests wait for all of
    it.

    Args:
        limit_s: seconds per chunk, exceeded only up to the time of a round; ``None`` for no limit.

    Attributes:
        token_s: moving average of the seconds per token; 0 before the first measurement.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        if limit_s is not None:
            check_real("prefill_s", limit_s)
            if not limit_s >= 0:
                raise OptionError("prefill_s", f"prefill_s must be at least 0, not {limit_s}")
        self.limit_s, self.token_s, self._round_s = limit_s, 0.0, 0.0

    def note(self, tokens: int, spent_s: float) -> None:
        """Record a prefill of these tokens in this time."""
        if tokens > 0:
            new = spent_s / tokens
            self.token_s += (new - self.token_s) * (0.3 if self.token_s else 1.0)  # moving average

    def note_round(self, spent_s: float) -> None:
        """Record the time of a round."""
        self._round_s = spent_s

    def piece_size(self, chunk: int, requests: int) -> int:
        """Tokens to prefill now: a power of two, so that few sizes are compiled, or the whole chunk. A single request
        delays no other."""
        if self.limit_s is None or requests < 2:
            return chunk
        if not self.token_s:
            return min(chunk, FIRST)
        fit = int(max(self.limit_s, self._round_s) / self.token_s)
        return min(chunk, max(FEWEST, 1 << fit.bit_length() - 1 if fit else 0))


class Reader:
    """Opens the sequences of one engine's admitted requests, and prefills their prompts.

    Attributes:
        read_s: seconds of prefill so far; prompts that share a prefill are counted once.
        pace: limit of the draft models' prefill.
    """

    def __init__(self, requests: Requests, chunk: int | None) -> None:
        self.requests, self.target, self.drafter = requests, requests.target, requests.drafter
        self.chunk, self.time, self.pace, self.read_s = chunk, ReadingTime(), Pace(), 0.0
        self._device = self.target.device

    def piece_size(self) -> int:
        """Tokens that may be processed now."""
        others = len(self.requests.running) + len(self.requests.waiting)
        return self.time.piece_size(self.chunk or ALL, others)

    def open(self, turns: Sequence[Turn]) -> None:
        """Open sequences for requests, with cached prefixes."""
        for run in (turn.run for turn in turns):
            open_text(self.target, run)
            run.weights_version = self.target.weights_version
            self.requests.drop_stale()
            cache = self.requests.prefix_cache
            self._take_over(run)
            find_draft = partial(cache.find_draft, run, self.requests.running)
            run.context.update(texts=DraftTexts(self.pace, find_draft if cache.keeps else None))

    def read(self) -> None:
        """Prefill prompts, whole or one chunk; requests with a complete prompt take part in rounds."""
        while unread := [run for run in self.requests.running if not run.started]:
            start_s = now(self._device)
            chosen = shares(self._ready(unread), self.piece_size())
            sizes = {run.id: size for run, size in chosen}
            turns = [Turn(run) for run, _ in chosen]
            successful = self.requests.together(partial(self._read_some, sizes), turns)
            for turn in successful:
                if turn.run.unread == 0:
                    self.requests.together(self._start, [turn])
            spent = now(self._device) - start_s
            self.time.note(sum(sizes.values()), spent)
            self.read_s += spent
            for turn in turns:
                turn.run.stats.prefill_s += spent
                turn.run.stats.total_s += spent
            if self.chunk is not None:
                return

    def _ready(self, unread: Sequence[Running]) -> list[Running]:
        """The requests to prefill now: those that wait for no other request, or have copied its prefix."""
        ids = {run.id for run in unread}
        for run in unread:
            if run.reads_after is not None:
                other, length = run.reads_after
                if other.id not in ids or other.num_read >= length:
                    self.requests.each(lambda turns: self._take_over(turns[0].run), [Turn(run)])
        return [run for run in unread if run.reads_after is None and run.finish_reason is None]

    def _take_over(self, run: Running) -> None:
        """Copy the prompt's prefix from others, or wait for an earlier request that is prefilling it."""
        running, cache = self.requests.running, self.requests.prefix_cache
        run.reads_after = cache.read_before(run, running[: running.index(run)])
        if run.reads_after is None:
            cache.take_over(run, running)

    def _read_some(self, sizes: Mapping[int, int], turns: Sequence[Turn]) -> None:
        read(self.target, [(turn.run, sizes[turn.run.id]) for turn in turns], self.requests.taps)

    def _start(self, turns: Sequence[Turn]) -> None:
        """Start decoding. The last prompt token is the first root, so there is no special first step, and prefill
        needed no logits."""
        keeps = self.requests.prefix_cache.keeps
        for run in (turn.run for turn in turns):
            run.context.hidden, run.states = run.states.copied(), HiddenText()
            if keeps:
                run.add_states(run.context.hidden)
            if self.drafter is not None:
                try:
                    self.drafter.start(run.context)
                except BaseException:
                    self.requests.finish_drafter(run)
                    raise
            run.started = True


def shares(runs: Sequence[Running], piece_size: int) -> list[tuple[Running, int]]:
    """Prefill sizes of the next chunk, ``piece_size`` tokens in all; see :func:`foretoken.core.portions.portions`."""
    sizes = portions([run.unread for run in runs], piece_size)
    return [(run, sizes[i]) for i, run in enumerate(runs) if i in sizes]


def open_text(target: LanguageModel, run: Running) -> None:
    """Open an empty sequence in the target for a request, and announce the prompt's length."""
    run.sequence = target.open()
    run.context.update(sequence=run.sequence)
    target.expect(run.sequence, run.context.prompt_length)


@torch.inference_mode()
def read(target: LanguageModel, parts: Sequence[tuple[Running, int]], taps: Sequence[str]) -> None:
    """Prefill the given number of tokens of each prompt."""
    try:
        texts = []
        for run, size in parts:
            if run.sequence is None:
                open_text(target, run)
            begin = len(run.open_sequence.tokens)
            tokens = run.context.tokens[begin : begin + min(size, run.unread)]
            if run.request.prompt_logprobs is not None:
                _read_with_logprobs(target, run, tokens, taps)
            elif tokens:
                texts.append((run, tokens))
        states = target.prefill_batch([(run.open_sequence, tokens) for run, tokens in texts], taps) if texts else []
        for (run, _), hidden in zip(texts, states, strict=True):
            run.add_states(hidden)
    except Exception:
        for run, _ in parts:
            _begin_anew(target, run)
        raise


def _begin_anew(target: LanguageModel, run: Running) -> None:
    """Restart a prompt whose prefill failed at an unknown position, in a sequence that the next attempt opens."""
    if run.sequence is not None:
        target.release(run.sequence)
    run.sequence = None
    run.context.update(sequence=None)
    run.states, run.prompt_logprobs = HiddenText(), []
    run.stats.num_prompt_tokens_computed = run.stats.num_prompt_tokens


def _read_with_logprobs(target: LanguageModel, run: Running, tokens: Sequence[int], taps: Sequence[str]) -> None:
    count = run.request.prompt_logprobs or 0
    if not run.prompt_logprobs:
        run.prompt_logprobs.append(None)
    size = PIECE if target.capabilities.rollback else 1  # a target without rollback scores one token at a time
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        rows = target.forward([Feed(run.open_sequence, piece)], taps)[0]
        target.commit(run.open_sequence, range(len(piece)))
        end = len(run.open_sequence.tokens)
        following = run.context.tokens[end - len(piece) + 1 : end + 1]
        run.prompt_logprobs.extend(logprobs_of(rows.logits, following, count))
        run.add_states(rows.taps)
