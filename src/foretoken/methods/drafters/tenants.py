"""Separate learned state of drafters for each tenant, so that nobody's text shows in another's drafts.

A tenant is a ``cache_salt``.  The times of a stream reveal the number of accepted draft tokens: drafts from other
people's texts would reveal those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Tenants(Generic[T]):
    """Learned state by tenant; the least recently used tenant is dropped first.

    Args:
        new: creates a new tenant's state.
        most: maximum tenants.
        size: size of a tenant's state, for ``room``.
        room: maximum total size, not counting the most recently used tenant.
    """

    def __init__(
        self, new: Callable[[], T], most: int = 64, size: Callable[[T], int] | None = None, room: int = 0
    ) -> None:
        self._new, self._most, self._size, self._room = new, most, size, room
        self._by_salt: OrderedDict[str, T] = OrderedDict()

    def of(self, salt: str) -> T:
        """The state of the requests with this salt."""
        learned = self._by_salt.get(salt)
        if learned is None:
            learned = self._by_salt[salt] = self._new()
        self._by_salt.move_to_end(salt)
        size = self._size or (lambda _: 0)  # computed every time, because states grow
        by_salt = self._by_salt
        while len(by_salt) > 1 and (len(by_salt) > self._most or sum(map(size, by_salt.values())) > self._room):
            by_salt.popitem(last=False)
        return learned

    def __len__(self) -> int:
        return len(self._by_salt)

    def clear(self) -> None:
        self._by_salt.clear()
