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
        self._known: OrderedDict[str, T] = OrderedDict()

    def of(self, salt: str) -> T:
        """What was learned from the requests with this salt."""
        found = self._known.get(salt)
        if found is None:
            found = self._known[salt] = self._new()
        self._known.move_to_end(salt)
        self._forget()  # at every time: those that are known have grown since
        return found

    def _forget(self) -> None:
        while len(self._known) > 1 and (len(self._known) > self._most or self._is_full()):
            self._known.popitem(last=False)

    def _is_full(self) -> bool:
        return self._size is not None and sum(map(self._size, self._known.values())) > self._room

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
