"""How a number of tokens that may be read is divided among texts."""

from __future__ import annotations

from collections.abc import Sequence


def portions(wanted: Sequence[int], most: int) -> dict[int, int]:
    """How many tokens each of some texts gets.

    Half of them are the first text's, which so gets done; the rest goes to those that want least, which so do not wait
    for it.  A text that wants nothing gets that, as long as anything is left.

    Args:
        wanted: tokens per text, in order of arrival.
        most: tokens in all.

    Returns:
        By index of the text, for those that get their turn.
    """
    given: dict[int, int] = {}
    left = most
    order = range(len(wanted))
    for i in [*order[:1], *sorted(order, key=wanted.__getitem__)]:
        room = -(-left // 2) if not given else left
        size = min(wanted[i] - given.get(i, 0), room)
        if size > 0 or wanted[i] == 0:
            given[i] = given.get(i, 0) + size
            left -= size
        if left <= 0:
            break
    return given
