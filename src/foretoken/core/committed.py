"""The committed tokens of a request, and the prefixes that end at the nodes of a tree below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, overload


class CommittedTokens(list[int]):
    """A request's tokens: others may read and copy them, and only the engine appends.

    A guess appended by a drafter would appear in the output as if the target had generated it. Slices and copies are
    plain lists.
    """

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("context.tokens is read-only: change a copy, list(context.tokens)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _: Any) -> Any:
        return CommittedTokens, (list(self),)  # by default a copy is made by appending


class NodePrefix(Sequence[int]):
    """The first ``length`` committed tokens and those on a path below them, without a copy."""

    __slots__ = ("committed", "length", "path")
    committed: Sequence[int]
    length: int
    path: Sequence[int]

    def __init__(self, committed: Sequence[int], length: int, path: Sequence[int] = ()) -> None:
        self.committed, self.length, self.path = committed, length, path
        if isinstance(committed, NodePrefix) and length >= committed.length:
            self.path = [*committed.path[: length - committed.length], *path]
            self.committed, self.length = committed.committed, committed.length

    def __len__(self) -> int:
        return self.length + len(self.path)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self.committed, self.length), self.path)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        length = self.length
        if not isinstance(index, slice):
            index = range(len(self))[index]
            return self.committed[index] if index < length else self.path[index - length]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return [*self][index]
        return [*self.committed[start : min(stop, length)], *self.path[max(start - length, 0) : max(stop - length, 0)]]
