"""How a number of tokens that may be read is divided among texts."""

from __future__ import annotations

from collections.abc import Sequence


def portions(sizes: Sequence[int], most: int) -> dict[int, int]:
    """How many tokens each of some texts gets.

    Half of them are the first text's, which so gets done; the rest goes to those that want least, which so do not wait
    for it.  A text that wants nothing gets that, as long as anything is left.

    Args:
        sizes: tokens per text, in order of arrival.
        most: tokens in all.

    Returns:
        By index of the text, for those that get their turn.
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
