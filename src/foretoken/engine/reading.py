"""Prompts are read in pieces, so that a long one does not stop everybody: some tokens of them beside every round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretoken.core import portions
from foretoken.engine.logprobs import logprobs_of
from foretoken.engine.request import Running
from foretoken.models.base import Feed, LanguageModel

ALL = 1 << 60
PIECE = 512
"""Tokens of a prompt whose logits are made at once, where its log-probabilities were asked for."""


def shares(runs: Sequence[Running], most: int) -> list[tuple[Running, int]]:
    """How many tokens of which prompts are read next, see :func:`foretoken.core.portions.portions`.

    Args:
        runs: the requests that are not read yet, in order of arrival.
        most: tokens to read in all.
    """
    given = portions([run.unread for run in runs], most)
    return [(run, given[i]) for i, run in enumerate(runs) if i in given]


def open_text(target: LanguageModel, run: Running) -> None:
    """Give a request an empty text in the target, which is told how long its prompt is."""
    run.sequence = run.context.sequence = target.open()
    target.expect(run.sequence, run.context.prompt_length)


@torch.inference_mode()
def read(target: LanguageModel, parts: Sequence[tuple[Running, int]], taps: Sequence[str]) -> None:
    """Let the target read that many more tokens of these prompts."""
    try:
        texts = []
        for run, size in parts:
            if run.sequence is None:
                open_text(target, run)
            begin = len(run.text.tokens)
            tokens = run.context.tokens[begin : begin + min(size, run.unread)]
            if run.request.prompt_logprobs is not None:
                _read_with_logprobs(target, run, tokens, taps)
            elif tokens:
                texts.append((run, tokens))
        found = target.prefill_batch([(run.text, tokens) for run, tokens in texts], taps) if texts else []
        for (run, _), hidden in zip(texts, found, strict=True):
            run.add_states(hidden)
    except Exception:
        for run, _ in parts:
            _begin_anew(target, run)
        raise


def _begin_anew(target: LanguageModel, run: Running) -> None:
    """A prompt that was read in part, nobody knows how far: from the start, in a text that the next try opens."""
    if run.sequence is not None:
        target.release(run.sequence)
    run.sequence = run.context.sequence = None
    run.states, run.prompt_logprobs = {}, []
    run.stats.num_prompt_tokens_computed = run.stats.num_prompt_tokens


def _read_with_logprobs(target: LanguageModel, run: Running, tokens: Sequence[int], taps: Sequence[str]) -> None:
    """Read a piece of a prompt and note how likely its tokens are."""
    count = run.request.prompt_logprobs or 0
    if not run.prompt_logprobs:
        run.prompt_logprobs.append(None)
    size = PIECE if target.capabilities.rollback else 1  # what cannot roll back scores one token at a time
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        rows = target.forward([Feed(run.text, piece)], taps)[0]
        target.commit(run.text, range(len(piece)))
        end = len(run.text.tokens)
        following = run.context.tokens[end - len(piece) + 1 : end + 1]
        run.prompt_logprobs.extend(logprobs_of(rows.logits, following, count))
        run.add_states(rows.taps)
