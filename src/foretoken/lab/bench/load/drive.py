"""Passes of a load test: all arms at all levels in turns, until done or interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from uuid import uuid4

import httpx

from foretoken.lab.bench.load.client import Drafts, Sample, ask, counters
from foretoken.lab.bench.load.settings import Ask, Level, LoadSettings, ServerArm, arrivals
from foretoken.lab.prompts import BenchPrompt
from foretoken.lab.timing import interleave

Tell = Callable[[int, int, str], None]
"""Called with (requests done, total, current pass)."""


@dataclass
class Pass:
    """One pass of an arm at a level.

    Attributes:
        seconds: time from the first request to the last end.
        lag_s: maximum delay of sending behind the planned arrival times.
        drafts: increase of the server's counters, for servers that report nothing per request.
        cut: whether it was interrupted.
    """

    arm: ServerArm
    level: Level
    number: int
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    lag_s: float = 0.0
    drafts: Drafts | None = None
    cut: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of completed requests."""
        return sum(sample.tokens for sample in self.samples if sample.ok)


class Driver:
    """Sends the requests of a load test; prompts are grouped by category."""

    def __init__(
        self, http: httpx.AsyncClient, settings: LoadSettings, prompts: Mapping[str, Sequence[BenchPrompt]], tell: Tell
    ) -> None:
        self.http, self.settings, self.prompts, self.tell = http, settings, prompts, tell
        self.stop = asyncio.Event()
        self.sent = 0
        self._all = 0
        # A server that was measured before knows that run's prompts and answers under its salts.
        self._run = uuid4().hex

    async def run(self, arms: Sequence[ServerArm]) -> list[Pass]:
        """Run every level and pass, or those finished before an interrupt.  Raises ``ValueError`` if a server refuses
        all warm-up requests."""
        settings, passes = self.settings, []
        self._all = len(arms) * len(settings.levels) * settings.passes * settings.requests
        for arm in arms:
            await self._warm(arm)
        for level in settings.levels:
            for number, arm in interleave(arms, settings.passes):
                if not self.stop.is_set():
                    passes.append(await self._pass(arm, level, number))
        return passes

    async def _warm(self, arm: ServerArm) -> None:
        """Send the warm-up requests.  If all fail, the test would measure only errors."""
        self.tell(0, self._all, f"{arm.name}: warming up")
        asks = self.settings.asks(self.prompts, self.settings.warmup)
        samples = await self._gathered([self._ask(arm, request, f"warm-{arm.name}") for request in asks])
        bad = [sample for sample in samples if not sample.ok]
        if bad and len(bad) == len(samples):
            raise ValueError(f"{arm.name} at {arm.server.url} answers no request ({bad[0].error}): {bad[0].detail}")
        if arm.extra.get("speculative") == {"enabled": False}:
            _check_plain(arm, samples)

    async def _ask(self, arm: ServerArm, request: Ask, salt: str) -> Sample:
        return await ask(self.http, self.settings, arm, request, f"{self._run}-{salt}")

    async def _pass(self, arm: ServerArm, level: Level, number: int) -> Pass:
        result = Pass(arm, level, number)
        asks = self.settings.asks(self.prompts, self.settings.requests)
        salt = f"{level.label}-{number}-{arm.name}".replace(" ", "_")
        self.tell(self.sent, self._all, f"{arm.name}, {level.label}")
        before = await counters(self.http, arm.server)

        async def send(index: int) -> None:
            result.samples.append(await self._ask(arm, asks[index], salt))
            self.sent += 1
            self.tell(self.sent, self._all, f"{arm.name}, {level.label}")

        start_s = perf_counter()
        if level.shape == "concurrency":
            await self._clients(int(level.value), len(asks), send)
        else:
            await self._arriving(result, level, len(asks), send)
        ends = [sample.last_s for sample in result.samples if sample.last_s is not None]
        result.seconds = max(ends, default=perf_counter()) - start_s
        result.cut = self.stop.is_set()
        result.drafts = _grown(before, await counters(self.http, arm.server))
        return result

    async def _clients(self, clients: int, count: int, send: Callable[[int], Awaitable[None]]) -> None:
        """Keep ``clients`` requests in flight."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:  # shared by the clients
                await send(number)

        await self._gathered([client() for _ in range(clients)])

    async def _arriving(self, result: Pass, level: Level, count: int, send: Callable[[int], Awaitable[None]]) -> None:
        """Send requests at a rate, regardless of the server's speed."""
        times = arrivals(level, count, (self.settings.seed or 0) + result.number)
        start_s = perf_counter()

        async def at(number: int) -> None:
            await asyncio.sleep(max(0.0, start_s + times[number] - perf_counter()))
            result.lag_s = max(result.lag_s, perf_counter() - start_s - times[number])
            await send(number)

        await self._gathered([at(number) for number in range(count)])

    async def _gathered(self, work: Sequence[Awaitable[Sample | None]]) -> list[Sample]:
        """Results of all awaitables, or of those finished before an interrupt; the others are cancelled."""
        tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            pending = set(tasks)
            while pending and not self.stop.is_set():
                ended, _ = await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
                pending -= ended
                for task in ended - {stopped}:
                    task.result()
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
        finished = [task.result() for task in tasks if not task.cancelled()]
        return [sample for sample in finished if sample is not None]


def _check_plain(arm: ServerArm, samples: Sequence[Sample]) -> None:
    """Raise ``ValueError`` if the server drafts although speculation was disabled."""
    ignored = any("speculative" in sample.ignored for sample in samples)
    if ignored or any(sample.drafts is not None and sample.drafts.drafted for sample in samples):
        raise ValueError(
            f"{arm.server.url} does not turn speculation off for a request, which --compare needs: start "
            "a second server without drafts, and give both addresses"
        )


def _grown(before: Drafts | None, after: Drafts | None) -> Drafts | None:
    if before is None or after is None:
        return None
    rounds = None if before.rounds is None or after.rounds is None else after.rounds - before.rounds
    return Drafts(rounds, after.drafted - before.drafted, after.accepted - before.accepted)


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """Make the first Ctrl-C or SIGTERM set ``stop`` and append its number to the list, if signals can be caught; a
    second one has its usual effect."""
    loop = asyncio.get_running_loop()
    caught: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            number, handler = before.popitem()
            loop.remove_signal_handler(number)
            signal.signal(number, handler)  # the loop leaves the default handler, which exits without a message

    def on_signal(number: int) -> None:
        stop.set()
        caught.append(number)
        restore()

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            loop.add_signal_handler(number, on_signal, number)
            before[number] = handler
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
        pass
    try:
        yield caught
    finally:
        restore()
