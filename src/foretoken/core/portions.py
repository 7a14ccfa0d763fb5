"""Division of a token budget among sequences."""

from __future__ import annotations

from collections.abc import Sequence


def portions(sizes: Sequence[int], most: int) -> dict[int, int]:
    """Number of tokens for each sequence.

    The first sequence gets half, so that it finishes. The rest goes to the smallest sizes first, so that these do not
    wait for it. A size of 0 is included as long as budget remains.

    Args:
        sizes: tokens per sequence, in order of arrival.
        most: tokens in all.

    Returns:
        Tokens by index, for the sequences that get any turn.
    """
    portion_of: dict[int, int] = {}
    remaining = most
    order = range(len(sizes))
    for i in [*order[:1], *sorted(order, key=sizes.__getitem__)]:
        room = -(-remaining // 2) if not portion_of else remaining
        size = min(sizes[i] - portion_of.get(i, 0), room)
        if size > 0 or sizes[i] == 0:
            portion_of[i] = portion_of.get(i, 0) + size
            remaining -= size
        if remaining <= 0:
            break
    return portion_of
