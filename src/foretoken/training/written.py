"""Text that a model writes: continuations of given prompts, many at a time, in memory or stored on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.io.files import checksum, replacing
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.models.base import Feed, LanguageModel, SequenceState

ROWS = 32
"""Continuations that are written at once: what one more costs falls until about here."""


def write_continuations(
    model: LanguageModel,
    prompts: Tensor,
    new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    *,
    numbers: Sequence[int] | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Prompts and what ``model`` writes behind them, int64 [n, m + new_tokens]; end-of-text does not end them.

    A continuation's draws depend on ``seed`` and its own number alone.  Raises ``ValueError`` with nothing to write
    behind, for a text longer than the model's context, a negative temperature, and logits that are NaN.

    Args:
        prompts: int64 [n, m], m >= 1, all of one length.
        numbers: n numbers that name the continuations (0, 1, ... by default).
        vocab_size: write only the first so many tokens of the vocabulary (a padded one may have more).
    """
    count, length = prompts.shape
    if length < 1 or new_tokens < 1:
        raise ValueError("a continuation needs a prompt of at least one token, and at least one new token")
    if length + new_tokens > model.context_length + 1:
        raise ValueError(
            f"{length} + {new_tokens} tokens do not fit into the model's context of {model.context_length}"
        )
    sampler = Sampler(SamplingParams(temperature=temperature))
    names = range(count) if numbers is None else numbers
    width = model.vocab_size if vocab_size is None else min(vocab_size, model.vocab_size)
    parts = []
    for start in range(0, count, ROWS):
        coins = np.stack([np.random.default_rng((seed, n)).random(new_tokens) for n in names[start : start + ROWS]])
        parts.append(_write(model, prompts[start : start + ROWS], torch.from_numpy(coins), sampler, width))
    return torch.cat(parts) if parts else prompts.new_empty(0, length + new_tokens)


def _write(model: LanguageModel, prompts: Tensor, coins: Tensor, sampler: Sampler, width: int) -> Tensor:
    """Continuations [n, m + new] of ``prompts`` [n, m], drawn with the uniforms ``coins`` [n, new]."""
    sequences: list[SequenceState] = []
    columns = [prompts.cpu()]
    try:
        sequences.extend(model.open() for _ in prompts)
        if prompts.shape[1] > 1:
            model.forward([Feed(s, row, wanted=0) for s, row in zip(sequences, prompts[:, :-1].tolist(), strict=True)])
            for sequence in sequences:
                model.commit(sequence, range(prompts.shape[1] - 1))
        last = prompts[:, -1].tolist()
        for column in coins.unbind(1):
            rows = model.forward([Feed(s, [t], wanted=1) for s, t in zip(sequences, last, strict=True)])
            for sequence in sequences:
                model.commit(sequence, [0])
            logits = torch.cat([row.logits for row in rows])[:, :width]
            tokens = logits.argmax(-1) if sampler.greedy else drawn(sampler.distributions(logits, None), column)
            tokens = tokens.cpu()
            columns.append(tokens[:, None])
            last = tokens.tolist()
    finally:
        for sequence in reversed(sequences):
            model.release(sequence)
    return torch.cat(columns, 1)


def drawn(distributions: Tensor, coins: Tensor) -> Tensor:
    """One token of each of the ``distributions`` [n, V] by inversion of its distribution function, int64 [n]."""
    cdf = distributions.cumsum(-1)
    points = coins.to(cdf)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, points, right=True).clamp_(max=distributions.shape[-1] - 1)[:, 0]


def stored_continuations(
    folder: Path,
    model: LanguageModel,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    seed: int,
    *,
    writer: Any,
    vocab_size: int | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> Tensor:
    """What :func:`write_continuations` gives, kept below ``folder`` and read from there the next time.

    Text of other settings gets a folder of its own.  Parts of it appear whole or not at all, so that a killed run
    goes on where it was.

    Args:
        writer: what tells ``model`` from another one, as JSON can hold it.
        on_rows: told (rows done, rows in all) after every part.
    """
    settings = {
        "writer": writer,
        "prompts": checksum(prompts.numpy().tobytes()),
        "rows": len(prompts),
        "tokens": prompts.shape[1] + new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    text = json.dumps(settings, sort_keys=True)
    folder = folder / f"written-{checksum(text, 4)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "written.json").write_text(text, encoding="utf-8")
    parts = []
    for start in range(0, len(prompts), ROWS):
        file, some = folder / f"part-{start // ROWS:05d}.bin", prompts[start : start + ROWS]
        if not file.exists() or file.stat().st_size != 4 * len(some) * settings["tokens"]:
            numbers = range(start, start + len(some))
            rows = write_continuations(
                model, some, new_tokens, temperature, seed, numbers=numbers, vocab_size=vocab_size
            )
            with replacing(file) as draft:
                rows.numpy().astype(np.int32).tofile(draft)
        parts.append(np.fromfile(file, np.int32).astype(np.int64).reshape(len(some), -1))
        if on_rows is not None:
            on_rows(start + len(some), len(prompts))
    return torch.from_numpy(np.concatenate(parts))
