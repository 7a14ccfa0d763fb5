"""What drafters learn from requests is kept for each tenant apart, so that nobody's text shows in another's drafts.

A tenant is a ``cache_salt``.  How many tokens of a draft are accepted can be seen in the times of a stream: drafts from
other people's texts would tell what those were.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 64
"""Tenants that are remembered."""


class Tenants(Generic[T]):
    """By tenant, what was learned; the tenant that has been away longest is forgotten first.

    Args:
        new: makes what a new tenant starts from.
        most: most tenants.
        size: how much a tenant takes, for ``room``.
        room: most that all of them take together, but for the one that was asked for last.
    """

    def __init__(
        self, new: Callable[[], T], most: int = MOST, size: Callable[[T], int] | None = None, room: int = 0
    ) -> None:
        self._new, self._most, self._size, self._room = new, most, size, room
        self._by_salt: OrderedDict[str, T] = OrderedDict()

    def of(self, salt: str) -> T:
        """What was learned from the requests with this salt."""
        learned = self._by_salt.get(salt)
        if learned is None:
            learned = self._by_salt[salt] = self._new()
        self._by_salt.move_to_end(salt)
        size = self._size or (lambda _: 0)  # asked every time: those that are known have grown since
        by_salt = self._by_salt
        while len(by_salt) > 1 and (len(by_salt) > self._most or sum(map(size, by_salt.values())) > self._room):
            by_salt.popitem(last=False)
        return learned

    def __len__(self) -> int:
        return len(self._by_salt)

    def clear(self) -> None:
        """Forget all of them."""
        self._by_salt.clear()
