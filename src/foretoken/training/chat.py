"""Conversations as training text: the tokens of a chat template, with a mask of the assistant's.

Chat templates rarely mark the assistant's tokens, so they are found by rendering prefixes of the conversation: answer i
is the part of ``messages[:i + 1]`` after ``messages[:i]`` with the generation prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.core.conversation import checked, from_sharegpt, render, turn_ends

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles allowed in training data."""
CALLS = ("tool_calls", "function_call")
"""Keys of a message's tool calls."""

Piece = tuple[list[int], list[bool]]
"""Token ids, with a mask of the learned ones."""


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row with ``messages`` or ShareGPT's ``conversations``.  Raises ``ValueError`` for both keys or
    another shape, an unknown role, and a weight other than 0 or 1."""
    if "messages" in row and "conversations" in row:
        raise ValueError("a row has messages or conversations, not both")
    messages = checked(row["messages"] if "messages" in row else from_sharegpt(row["conversations"]))
    for number, message in enumerate(messages, 1):
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {number} has the role {message['role'][:32]!r}, which is unknown: use one of "
                f"{', '.join(ROLES)}"
            )
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"message {number} has the weight {message['weight']!r}: it is learned (1) or not (0)")
    return messages


def chat_pieces(row: Mapping[str, Any], tokenizer: Any) -> list[Piece]:
    """The tokens of a conversation, with a mask of those that the assistant writes, its end of turn included.

    A template that renders earlier turns differently from the last (without their reasoning, say) gives one piece per
    answer, in which only that answer is learned.  An answer of ``weight`` 0 is not learned.  Raises ``ValueError`` as
    :func:`messages_of` and :func:`check_calls` do, and if there is no answer to learn.

    Args:
        row: ``messages`` or ``conversations``, optionally ``tools`` for the template and ``unfinished``, the indices of
            answers that were cut off.
    """
    messages = messages_of(row)
    more = {"tools": row["tools"]} if row.get("tools") else {}
    ends = turn_ends(tokenizer)
    whole = render(messages, tokenizer, add_generation_prompt=False, **more)
    learned, apart = [False] * len(whole), list[Piece]()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    if not answers:
        raise ValueError(
            "no answer of the assistant to learn from: add one, or let the target answer (--answers target)"
        )
    answers = [i for i in answers if messages[i].get("weight") != 0]
    if not answers:
        raise ValueError("all answers of the assistant have the weight 0: leave the row out")
    check_calls(messages, tokenizer, row.get("tools"))
    for i in answers:
        before = _text_before(messages[:i], tokenizer, more)
        text = render(messages[: i + 1], tokenizer, add_generation_prompt=False, **more)
        span = _answer_span(before, text, ends)
        if i in row.get("unfinished", ()) and text[span.stop - 1] in ends:
            span = span[:-1]  # the template adds an end of turn to an answer that was cut off
        if whole[: span.stop] == text[: span.stop]:
            learned[span.start : span.stop] = [True] * len(span)
        else:
            apart.append((text, [index in span for index in range(len(text))]))
    return [*([(whole, learned)] if any(learned) else []), *apart]


def check_calls(messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Any = None) -> None:
    """Raise ``ValueError``, naming the message, for a learned tool call that the chat template does not render: the
    answer would be empty."""
    more = {"tools": tools} if tools else {}
    for i, message in enumerate(messages):
        if not i or message["role"] != "assistant" or message.get("weight") == 0:
            continue
        if not any(message.get(key) for key in CALLS):
            continue
        whole = render(messages[: i + 1], tokenizer, add_generation_prompt=False, **more)
        silent = {key: value for key, value in message.items() if key not in CALLS}
        try:
            without = render([*messages[:i], silent], tokenizer, add_generation_prompt=False, **more)
        except ValueError:  # the template requires the call
            continue
        if whole == without:
            raise ValueError(
                f"message {i + 1} calls a tool, which the chat template does not render: leave the row out, or give "
                'the message "weight": 0'
            )


def _text_before(messages: Sequence[Mapping[str, Any]], tokenizer: Any, more: Mapping[str, Any]) -> list[int]:
    """Tokens of the prompt of the next answer."""
    if messages[-1]["role"] == "assistant":  # a template would continue that message
        return render(messages, tokenizer, add_generation_prompt=False, **more)
    return render(messages, tokenizer, **more)


def _answer_span(before: Sequence[int], tokens: Sequence[int], ends: frozenset[int]) -> range:
    """The positions of ``tokens`` after ``before``, up to the first token that ends a turn."""
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, tokens, strict=False)))
    stop = next((index + 1 for index in range(start, len(tokens)) if tokens[index] in ends), len(tokens))
    return range(start, stop)


class RowBlocks:
    """Blocks [batch, n + 1] from rows int64 [rows, n + 1], in an order that is a function of (seed, step).

    ``learned``, bool of the rows' shape, masks the tokens to predict (``None``: all); ``block`` is n.
    """

    def __init__(
        self, rows: NDArray[np.int64], batch: int, seed: int, learned: NDArray[np.bool_] | None = None
    ) -> None:
        self.rows, self.learned, self.batch, self.seed = rows, learned, batch, seed
        self.num_blocks, self.block = rows.shape[0], rows.shape[1] - 1

    @property
    def learned_ids(self) -> NDArray[np.int64]:
        """All tokens to predict."""
        return self.rows.flatten() if self.learned is None else self.rows[self.learned]

    def chosen(self, step: int) -> list[int]:
        return rows_of_step(step, self.batch, self.num_blocks, self.seed)

    def learned_of(self, step: int) -> NDArray[np.bool_] | None:
        """Mask of the tokens to predict in one step's blocks; ``None``: all."""
        return None if self.learned is None else self.learned[self.chosen(step)]

    def __call__(self, step: int) -> NDArray[np.int64]:
        """The blocks of one step, int64 [batch, block + 1]."""
        return self.rows[self.chosen(step)]


class ChatBlocks(RowBlocks):
    """Blocks of conversations, each starting at its beginning.

    Conversations are packed into rows once; longer ones are cut.  The rest of a row is padding and not learned.  Raises
    ``ValueError`` for fewer rows than a batch.

    Args:
        tokens: int [tokens] of all conversations.
        learned: bool [tokens].
        starts: index of the first token of each, ascending.
        filler: padding token.
    """

    learned: NDArray[np.bool_]

    def __init__(
        self,
        tokens: NDArray[Any],
        learned: NDArray[Any],
        starts: NDArray[Any],
        block: int,
        batch: int,
        seed: int,
        filler: int,
    ) -> None:
        # The first token has no context, so a piece needs a learned token after it.
        cut = _spans(starts, len(tokens), block + 1)
        spans = [span for span in cut if bool(learned[span.start + 1 : span.stop].any())]
        order = np.random.default_rng((seed, len(spans))).permutation(len(spans))
        packed = _packed([spans[i] for i in order], block + 1)
        if len(packed) < batch:
            raise ValueError(
                f"the data is too short: {len(starts)} conversations of {len(tokens)} tokens fill {len(packed)} "
                f"blocks of {block}, and one step needs {batch}; give more, or a smaller --context or --batch-size"
            )
        rows = np.full((len(packed), block + 1), filler, np.int64)
        super().__init__(rows, batch, seed, np.zeros(rows.shape, bool))
        for row, pieces in enumerate(packed):
            column = 0
            for span in pieces:
                rows[row, column : column + len(span)] = tokens[span.start : span.stop]
                self.learned[row, column : column + len(span)] = learned[span.start : span.stop]
                column += len(span)


def rows_of_step(step: int, batch: int, count: int, seed: int) -> list[int]:
    """Indices of the ``batch`` rows of a step, out of ``count``: every row once per epoch, in an order that is a
    function of (seed, epoch)."""
    indices = [divmod(i, count) for i in range(step * batch, (step + 1) * batch)]
    return [int(epoch_order(seed, turn, count)[0][index]) for turn, index in indices]


@lru_cache(maxsize=2)  # a step has rows of two epochs at most, unless there are fewer than two batches
def epoch_order(seed: int, epoch: int, count: int, block: int = 1) -> tuple[NDArray[np.int64], int]:
    """The order of ``count`` blocks in an epoch, and the epoch's phase, below ``block``."""
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(count)
    order.flags.writeable = False
    return order, int(rng.integers(block))


def _spans(starts: NDArray[Any], end: int, size: int) -> Iterator[range]:
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), end], strict=True):
        for first in range(start, stop, size):
            yield range(first, min(first + size, stop))


def _packed(spans: Sequence[range], size: int) -> list[list[range]]:
    """Spans packed into rows of ``size`` tokens, each into the first open row with room."""
    rows, room = list[list[range]](), list[int]()
    for span in spans:
        # Rows that wait for a piece that fits while conversations are packed
        first = max(0, len(rows) - 64)
        row = next((row for row in range(first, len(rows)) if room[row] >= len(span)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(size)
        rows[row].append(span)
        room[row] -= len(span)
    return rows
