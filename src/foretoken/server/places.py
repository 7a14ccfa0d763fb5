"""Places in a server: what has been admitted, from before it is tokenised until its last byte was taken.

A choice holds its place while it waits, runs, and is read by its client.  An answer that nobody reads therefore counts
like one that is being written, and what is admitted has a bound whatever clients do.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Scope

from foretoken.engine.errors import QueueFull
from foretoken.server.errors import ApiError, bad
from foretoken.server.keys import Caller

MINUTE_S = 60.0


class Places:
    """All of a server: at most ``most`` choices may be admitted at once (``None`` where somebody else counts them), of
    which ``reserved`` are for keys that have none yet, so that one key cannot hold all."""

    def __init__(self, most: int | None, reserved: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.reserved, self.open = most, reserved, 0
        self._clock = clock
        self._by_key: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}  # by key: tokens that are not yet paid for, and since when

    def place(self, caller: Caller) -> Place:
        """The place of one request, which takes nothing yet."""
        return Place(self, caller)

    def check_room(self, caller: Caller, count: int = 1) -> None:
        """Refuse, by a ``QueueFull``, while there is no room for so many of this caller's."""
        if self.most is None:
            return
        if self.open + count > self.most:
            raise QueueFull(f"{self.open} choices run, wait or are being read, of {self.most}", 1.0)
        of_key = self._by_key[caller.name]
        if of_key and self.open + count > self.most - self.reserved:
            raise QueueFull(
                f"{self.open} choices run, wait or are being read, {of_key} of this key, and the last "
                f"{self.reserved} of {self.most} places are for keys that have none",
                1.0,
            )

    def _take(self, caller: Caller, count: int) -> None:
        if self.most is not None:
            _check_size(count, self.most, "this server takes")
            self.check_room(caller, count)
        self._check_quota(caller, count)
        self.open += count
        self._by_key[caller.name] += count

    def _check_quota(self, caller: Caller, count: int) -> None:
        most = caller.most_open
        if most is not None:
            _check_size(count, most, "this key may have")
            if self._by_key[caller.name] + count > most:
                raise _too_many(
                    f"this key has {self._by_key[caller.name]} choices open, of {most}", "key_queue_full", 1
                )
        rate = caller.tokens_per_minute / MINUTE_S
        owed = self._owed(caller)
        if rate and owed > 0:
            raise _too_many(
                f"this key has used its {caller.tokens_per_minute} tokens a minute",
                "key_tokens_exceeded",
                math.ceil(owed / rate),
            )

    def _owed(self, caller: Caller) -> float:
        """Tokens beyond what the key may have used by now: it starts with those of a minute."""
        spent, since = self._spent.get(caller.name, (-float(caller.tokens_per_minute), self._clock()))
        now_s = self._clock()
        paid = max(-float(caller.tokens_per_minute), spent - (now_s - since) * caller.tokens_per_minute / MINUTE_S)
        self._spent[caller.name] = (paid, now_s)
        return paid

    def _spend(self, caller: Caller, tokens: int) -> None:
        if caller.tokens_per_minute:
            self._spent[caller.name] = (self._owed(caller) + tokens, self._clock())

    def _free(self, caller: Caller, count: int) -> None:
        self.open -= count
        self._by_key[caller.name] -= count
        if not self._by_key[caller.name]:
            del self._by_key[caller.name]


class Place:
    """What one request holds; its prompts and answers have ``spent`` so many tokens so far."""

    def __init__(self, places: Places, caller: Caller) -> None:
        self._places, self.caller = places, caller
        self._count = self.spent = 0

    def take(self, count: int) -> None:
        """Admit so many choices.  Raises :class:`QueueFull` where the server has no room for them now, and
        :class:`ApiError`: 400 for more than there can ever be, 429 where what the key may take is used up."""
        self._places._take(self.caller, count)
        self._count += count

    def spend(self, tokens: int) -> None:
        """Count tokens of a prompt that is read, or of an answer."""
        self.spent += tokens
        self._places._spend(self.caller, tokens)

    def close(self) -> None:
        """The last byte was taken, or nobody takes it."""
        count, self._count = self._count, 0
        if count:
            self._places._free(self.caller, count)


def place_of(scope: Scope) -> Place:
    """That of a request which came through the gate; one without limits for others."""
    return scope.setdefault("state", {}).setdefault("place", Places(None).place(Caller(priority=True)))


def _check_size(count: int, most: int, whose: str) -> None:
    if count > most:
        raise bad(
            f"{count} choices are asked for (prompts times n), and {whose} {most} at once: ask for fewer",
            "n",
            "too_many_choices",
        )


def _too_many(message: str, code: str, wait_s: int) -> ApiError:
    return ApiError(429, f"{message}; try again later", code=code, headers={"Retry-After": str(max(1, wait_s))})
