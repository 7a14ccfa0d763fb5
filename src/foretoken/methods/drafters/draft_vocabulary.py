"""Draft vocabularies: the option ``vocab=N|FILE``.

With a vocabulary of 150,000 tokens, the projection takes as long as a draft step's layers, and nearly all text consists
of few tokens: FR-Spec, Zhao et al. 2025 (arXiv 2502.14856).  The draft's distribution q is then one over the chosen
tokens and zero elsewhere, so that every rule of verification stays exact, and other tokens come from the target alone.

End-of-sequence tokens always belong to a draft vocabulary: without them every answer loses a round, and one more row
costs nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.io.files import write_json
from foretoken.core.io.hub_ids import expanded
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.datastore import fingerprint

LAYOUT = 'a JSON list of token ids, {"ids": [id, ...]} or {"counts": {"id": count, ...}}'
"""Layouts of a draft vocabulary's file."""


def chosen_ids(
    vocab: str, context: BuildContext, size: int, trained: Sequence[int] = (), others: bool = False
) -> Tensor | None:
    """The target's ids that a drafter may draft.

    Args:
        vocab: the option.  Empty or 0: the drafter's own.  N: the first N of ``trained``; without those, the N lowest
            ids, because tokenizers number their pieces in the order in which they were merged, the most frequent pairs
            first.  Otherwise a file (:func:`read_ids`).
        context: the target, with its end-of-sequence tokens and its tokenizer.
        size: V, number of ids that the drafter could draft.
        trained: the ids that it was trained to draft, the most frequent one first.
        others: whether it can draft others, too, because the target's projection has rows for all.

    Returns:
        int64 [V_d], with end-of-sequence tokens; ``None`` for all ids.

    Raises:
        ValueError: N is negative or too large; a file that :func:`read_ids` refuses, or that lists none of the known
            ids.
    """
    try:
        number: int | None = int(vocab or 0)
    except ValueError:
        number = None
    if number == 0:
        return torch.tensor(list(trained)) if trained else None
    able = set(trained if trained and not others else range(size))
    ends = sorted(able & set(context.target.eos_token_ids))
    if number is None:
        listed = read_ids(expanded(vocab), size, context.tokenizer)
        chosen = [token for token in listed if token in able]
        if not chosen:
            raise ValueError(f"{vocab} names none of the {len(able)} tokens that this drafter was trained to predict")
        return torch.tensor([*chosen, *(end for end in ends if end not in set(chosen))])
    if number < 0 or (len(trained) or size) < number != size:
        stored = f"up to the {len(trained)} that were stored, " if trained else f"up to {size}, "
        raise ValueError(
            f"vocab is the number of tokens that can be drafted: 0 (as trained), {stored}or {size} for all; not "
            f"{number}"
        )
    return None if number == size else torch.tensor(first_of(trained or range(size), number, ends))


def first_of(ids: Sequence[int], number: int, ends: Sequence[int]) -> list[int]:
    """The first ``number`` of the ids in their order, but with all of ``ends``."""
    first = list(ids[:number])
    missing = [end for end in ends if end not in set(first)]
    others = [token for token in first if token not in ends]
    dropped = set(others[len(others) - len(missing) :] if len(missing) < len(others) else others) if missing else set()
    return [token for token in first if token not in dropped] + missing


def read_ids(file: Path, size: int, tokenizer: Any | None) -> list[int]:
    """The ids in a file of a draft vocabulary, the most frequent one first if it holds counts.

    Args:
        file: :data:`LAYOUT`; with ``"tokenizer"``, as :func:`save_vocabulary` writes it, for that tokenizer only.
        size: V.
        tokenizer: the target's, if it has one.

    Raises:
        ValueError: no such file, one of another layout or of another tokenizer, no ids, an id twice, or an id that is
            not below ``size``.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"vocab={file} is neither a number of tokens nor a file: give {LAYOUT}") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read as a draft vocabulary ({type(error).__name__}): it must hold {LAYOUT}"
        ) from None
    made_for = content.get("tokenizer") if isinstance(content, dict) else None
    if made_for is not None and tokenizer is not None and made_for != fingerprint(tokenizer):
        raise ValueError(
            f"{file} was made with another tokenizer than the target's: count texts with the target's tokenizer"
        )
    ids = _listed(content)
    if ids is None:
        raise ValueError(f"{file} is not a draft vocabulary: it must hold {LAYOUT}")
    if not ids:
        raise ValueError(f"{file} names no token: a draft vocabulary holds at least one")
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise ValueError(f"{file} names token {wrong}, and the vocabulary has {size}: it was made for another model")
    token, times = Counter(ids).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{file} names token {token} more than once: list every token once")
    return ids


def save_vocabulary(
    file: str | Path, sequences: Iterable[Sequence[int]], tokenizer: Any | None = None, size: int = 0
) -> None:
    """Write the tokens of some texts as a draft vocabulary, the most frequent one first (the lower id wins a tie).

    Args:
        file: a JSON file, for ``vocab=FILE``.
        sequences: token ids, ideally of answers that the target has generated.
        tokenizer: the texts'; the file is then refused for others.
        size: number of tokens; 0: all that occur.  If fewer occur, the lowest other ids follow.

    Raises:
        ValueError: there are no tokens.
        OSError: the file cannot be written.
    """
    counts = Counter(int(token) for sequence in sequences for token in sequence)
    if not counts:
        raise ValueError("a draft vocabulary is counted from texts, and these have no tokens")
    ids = sorted(counts, key=lambda token: (-counts[token], token))
    if size > len(ids):
        others = (token for token in range(size + len(ids)) if token not in counts)
        ids += [token for token, _ in zip(others, range(size - len(ids)), strict=False)]
    described = {} if tokenizer is None else {"tokenizer": fingerprint(tokenizer)}
    write_json(expanded(file), {**described, "ids": ids[: size or None]})


def _listed(content: Any) -> list[int] | None:
    """Ids in any of the file layouts; ``None`` for other content."""
    if isinstance(content, dict) and isinstance(content.get("counts"), dict):
        try:
            counts = [(int(token), count) for token, count in content["counts"].items()]
        except ValueError:
            return None
        if not all(type(count) is int and count >= 0 for _, count in counts):
            return None
        return [token for token, count in sorted(counts, key=lambda pair: (-pair[1], pair[0])) if count]
    listed = content.get("ids") if isinstance(content, dict) else content
    if not isinstance(listed, list) or not all(type(token) is int for token in listed):
        return None
    return listed
