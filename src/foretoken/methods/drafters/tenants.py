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
        room: maximum total size when a tenant is looked up; the most recently used tenant is always kept.
        shrink: drops the older part of a tenant's state; false if it has none. One small tenant then leaves a large one
            the newer part.
    """

    def __init__(
        self,
        new: Callable[[], T],
        most: int = 64,
        size: Callable[[T], int] = lambda _: 0,
        room: int = 0,
        shrink: Callable[[T], bool] = lambda _: False,
    ) -> None:
        self._new, self._most, self._size, self._room, self._shrink = new, most, size, room, shrink
        self._by_salt: OrderedDict[str, T] = OrderedDict()

    def of(self, salt: str) -> T:
        """The state of the requests with this salt."""
        learned = self._by_salt.get(salt)
        if learned is None:
            learned = self._by_salt[salt] = self._new()
        self._by_salt.move_to_end(salt)
        by_salt = self._by_salt
        if len(by_salt) > self._most:
            by_salt.popitem(last=False)
        # Sizes are computed every time, because states grow.
        while len(by_salt) > 1 and sum(map(self._size, by_salt.values())) > self._room:
            if not self._shrink(next(iter(by_salt.values()))):
                by_salt.popitem(last=False)
        return learned

    def __len__(self) -> int:
        return len(self._by_salt)

    def clear(self) -> None:
        self._by_salt.clear()
