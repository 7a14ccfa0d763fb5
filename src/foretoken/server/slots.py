"""Admission slots of a server, held from before a prompt is tokenised until the last byte of the answer was read.

An unread answer counts like one that is being written, so the number of admitted choices is bounded whatever clients
do.

Room is checked four times.  ``Gate.admit`` refuses before the body is parsed, and takes nothing; ``Answer.check_room``
takes the slots, in ``AdmissionSlots._take``, which bounds the choices of the server and of each key.  The engine's own
queue (``AsyncLlm.submit``) has as many places as there are slots, so it refuses only while it drains or when it is
dead, if someone else uses the same ``Llm``, or if more choices leave within a round than there are slots.
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


class AdmissionSlots:
    """Slots of a server.  At most ``most`` choices are admitted at once (``None``: counted elsewhere), and the last
    ``reserved`` slots are kept for keys that hold none, so that one key cannot take all."""

    def __init__(self, most: int | None, reserved: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.reserved, self.open = most, reserved, 0
        self._clock = clock
        self._by_key: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}  # by key: token debt, and the time at which it was computed

    def slot(self, caller: Caller, on_take: Callable[[int], None] | None = None) -> RequestSlot:
        """A slot for one request, which holds nothing yet; ``on_take`` is told the number of choices admitted."""
        return RequestSlot(self, caller, on_take)

    def check_room(self, caller: Caller, count: int = 1) -> None:
        """Raise ``QueueFull`` if ``count`` more choices of this caller do not fit."""
        if self.most is None:
            return
        if self.open + count > self.most:
            raise QueueFull(f"{self.open} of at most {self.most} choices are open", 1.0)
        of_key = self._by_key[caller.name]
        if of_key and self.open + count > self.most - self.reserved:
            raise QueueFull(
                f"{self.open} of at most {self.most} choices are open, {of_key} of this key, and the "
                f"last {self.reserved} are for keys without open choices",
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
                    f"this key has {self._by_key[caller.name]} of at most {most} choices open", "key_queue_full", 1
                )
        rate = caller.tokens_per_minute / 60
        owed = self._owed(caller)
        if rate and owed > 0:
            raise _too_many(
                f"this key has used its {caller.tokens_per_minute} tokens a minute",
                "key_tokens_exceeded",
                math.ceil(owed / rate),
            )

    def _owed(self, caller: Caller) -> float:
        """Tokens that the key has used beyond its budget so far.  A key starts with the tokens of one minute."""
        spent, since = self._spent.get(caller.name, (-float(caller.tokens_per_minute), self._clock()))
        now_s = self._clock()
        paid = max(-float(caller.tokens_per_minute), spent - (now_s - since) * caller.tokens_per_minute / 60)
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


class RequestSlot:
    """Slot of one request; ``spent`` counts the tokens of its prompts and answers so far."""

    def __init__(self, slots: AdmissionSlots, caller: Caller, on_take: Callable[[int], None] | None = None) -> None:
        self._slots, self.caller, self._on_take = slots, caller, on_take
        self._count = self.spent = 0

    def take(self, count: int) -> None:
        """Admit ``count`` choices.  Raises :class:`QueueFull` if the server has no room now, and :class:`ApiError`: 400
        for more choices than can ever be admitted, 429 if the key's quota is used up."""
        self._slots._take(self.caller, count)
        self._count += count
        if self._on_take is not None:
            self._on_take(count)

    def spend(self, tokens: int) -> None:
        """Count tokens of a prompt or of an answer."""
        self.spent += tokens
        self._slots._spend(self.caller, tokens)

    def close(self) -> None:
        """Free the slot: the client has read the last byte or is gone."""
        count, self._count = self._count, 0
        if count:
            self._slots._free(self.caller, count)


def slot_of(scope: Scope) -> RequestSlot:
    """Slot of a request that came through the gate; a slot without limits for any other request."""
    return scope.setdefault("state", {}).setdefault("slot", AdmissionSlots(None).slot(Caller(priority=True)))


def _check_size(count: int, most: int, whose: str) -> None:
    if count > most:
        raise bad(
            f"{count} choices are requested (prompts times n), and {whose} {most} at once: request fewer",
            "n",
            "too_many_choices",
        )


def _too_many(message: str, code: str, wait_s: int) -> ApiError:
    return ApiError(429, f"{message}; try again later", code=code, headers={"Retry-After": str(max(1, wait_s))})
