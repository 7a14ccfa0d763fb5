"""What completions and chat share while they answer: ids, choices, counting, logging, streams that end well."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from foretoken.engine.background import Ticket
from foretoken.engine.errors import Draining, EngineDead, QueueFull
from foretoken.engine.output import Output, Piece
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.server import usage
from foretoken.server.errors import ApiError, api_error, bad
from foretoken.server.limits import log_request
from foretoken.server.places import Place, place_of
from foretoken.server.running import ClientGone, outputs_of, pieces_of, submit_all, while_connected
from foretoken.server.schemas import CompletionBody
from foretoken.server.serving import Serving
from foretoken.server.sse import OPENAI, Dialect, EventStream

T = TypeVar("T")
PREFIXES = {"text_completion": "cmpl-", "chat.completion": "chatcmpl-", "message": "msg_", "response": "resp_"}
"""Of ids, by the kind of answer."""
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


def finish_reason(reason: str | None) -> str | None:
    """In OpenAI's words."""
    return None if reason is None else REASONS.get(reason, reason)


@dataclass
class Answer:
    """One HTTP request on its way."""

    serving: Serving
    http: HttpRequest
    body: CompletionBody
    kind: str
    began_s: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    stats: dict[int, SpecStats] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    why: str = ""
    last_s: dict[int, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    written: int = 0

    def __post_init__(self) -> None:
        given = self.body.request_id
        self.id = f"{PREFIXES[self.kind]}{given or uuid.uuid4().hex}"

    @cached_property
    def head(self) -> dict[str, Any]:
        """What every object begins with."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.serving.settings.name,
            "system_fingerprint": fingerprint(self.serving),
        }

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue what it asks for.

        Raises:
            QueueFull, Draining, EngineDead: it is not taken.
        """
        tickets = self._taken(lambda: submit_all(self.serving.engine, requests))
        prompts = requests[:: self.body.n or 1]
        self.prompt_tokens = sum(len(one.prompt) for one in prompts)
        self.place.spend(self.prompt_tokens)
        return tickets

    def check_room(self, count: int) -> None:
        """Take so many places, or refuse: an overloaded server has no time to tokenise what it will not take.

        Raises:
            QueueFull, Draining, EngineDead: they would not be taken.
            ApiError: 400, more than there can ever be, or a priority that this key may not ask for; 429, its quota is
                used up.
        """
        self._taken(lambda: self._take(count))

    def _take(self, count: int) -> None:
        if (getattr(self.body, "priority", None) or 0) < 0 and not self.place.caller.priority:
            raise bad(
                "a priority below 0 comes before other requests, which this key may not: leave it out",
                "priority",
                "priority_not_allowed",
            )
        self.serving.engine.check_room()
        self.place.take(count)

    @property
    def size(self) -> int:
        """Bytes of what was asked: what it costs to tokenise it."""
        return int(self.http.scope["state"].get("size", 1))

    @property
    def place(self) -> Place:
        """What it holds in the server."""
        return place_of(self.http.scope)

    def _taken(self, ask: Callable[[], T]) -> T:
        """What the engine says; refusals are counted and logged."""
        try:
            return ask()
        except (QueueFull, Draining, EngineDead, ApiError) as error:
            failure = self.serving.rejected(error)
            self.log(failure.status)
            raise failure from error
        except Exception as error:
            self.log(api_error(error).status)
            raise

    def saw(self, index: int, tokens: int) -> None:
        """A block of tokens of a choice has come."""
        now = time.monotonic()
        before = self.last_s.get(index)
        if before is not None and tokens:
            self.serving.metrics.came((now - before) / tokens)
        self.last_s[index] = now
        self.written += tokens
        self.place.spend(tokens)

    async def outputs(self, tickets: Sequence[Ticket]) -> list[Output]:
        """The whole answers, counted and logged.  Raises ``ApiError`` where it failed."""
        found = await self.finished(outputs_of(self.serving.engine, tickets, self.saw))
        for index, output in enumerate(found):
            self.note(index, output.stats, output.finish_reason, output.why)
        self.log(200)
        return found

    async def pieces(self, tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Piece]]:
        """What each answer gains, with its index."""
        gathered = [Gathered(self.serving.settings.stream_interval) for _ in tickets]
        async for index, piece in pieces_of(self.serving.engine, tickets, self.saw):
            if piece.stats is not None:
                self.note(index, piece.stats, piece.finish_reason, piece.why)
            ready = gathered[index].push(piece)
            if ready is not None:
                yield index, ready

    def streamed(self, events: AsyncIterator[Any], headers: dict[str, str], dialect: Dialect = OPENAI) -> EventStream:
        settings = self.serving.settings
        return EventStream(events, settings.ping, settings.stream_pad, headers, dialect)

    async def finished(self, work: Awaitable[T]) -> T:
        """The result of the engine's work for an answer in one piece; logged whatever comes of it.

        Raises:
            ApiError: it failed.
        """
        try:
            return await while_connected(self.http, work)
        except ClientGone:
            self.log(499)
            raise ApiError(408, "the client went away", counted=True) from None
        except Exception as error:
            failure = api_error(error)
            self.log(failure.status)
            raise failure from error

    def note(self, index: int, stats: SpecStats, reason: str | None, why: str = "") -> None:
        """A choice has ended."""
        self.stats[index] = stats
        self.reasons.append(finish_reason(reason) or "unknown")
        self.why = why or self.why

    @property
    def all_stats(self) -> list[SpecStats]:
        """Of the choices that have ended, in order."""
        return [self.stats[index] for index in sorted(self.stats)]

    @property
    def prompt_stats(self) -> list[SpecStats]:
        """One for each prompt."""
        count = self.body.n or 1
        return [stats for index, stats in sorted(self.stats.items()) if index % count == 0]

    def tail(self, written: int | None = None) -> dict[str, Any]:
        """Usage and measurements, for the end of an answer."""
        whole = usage.merged(self.all_stats)
        drafter = self.serving.llm.drafter
        longest = 0 if drafter is None else drafter.max_depth
        found: dict[str, Any] = {
            "usage": usage.usage(self.prompt_stats, self.all_stats, written),
            "metrics": usage.metrics(whole, time.monotonic() - self.began_s, longest, self._predicted),
        }
        if getattr(self.body, "prediction", None) is None:  # what the server predicts by itself is nobody's bill
            found["usage"]["completion_tokens_details"] |= dict.fromkeys(usage.PREDICTED, 0)
        if self.body.timings:
            found["timings"] = usage.timings(whole)
        return found

    def usage_so_far(self, written: int) -> dict[str, Any]:
        """Usage within a stream that has sent so many tokens; its details are those of choices that have ended."""
        whole = self.prompt_tokens + written
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": written, "total_tokens": whole}
        return {**self.tail()["usage"], **counts}

    @property
    def _predicted(self) -> float | None:
        """What the cost model promises just now, over plain decoding."""
        found: float | None = self.serving.engine.status.controller.get("predicted_speedup")
        return found

    def log(self, status: int) -> None:
        """One line about the request."""
        whole = usage.merged(self.all_stats)
        fields = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.written,
            "first_token_s": round(whole.first_token_s, 4),
            "mean_acceptance_length": round(whole.mean_acceptance_length, 3),
            "finish_reason": ",".join(self.reasons) or ("abort" if status in (499, 504) else ""),
            "why": self.why,
        }
        if self.serving.settings.log_prompts:
            fields["prompt"] = prompt_text(self.body)[: self.serving.settings.log_prompts]
        log_request(self.http.scope, status, self.began_s, **fields)

    async def logged(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Events of a stream, with a line in the log however it ends."""
        status = 499
        try:
            async for one in events:
                yield one
            status = 200
        except Exception as error:
            failure = api_error(error)
            status = failure.status
            self.serving.metrics.failed(failure.reason)
            raise
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            self.log(status)


def prompt_text(body: CompletionBody) -> str:
    """What was asked, as it came."""
    found = getattr(body, "prompt", None)
    return str(found if found is not None else [m.content for m in getattr(body, "messages", ())])


def fingerprint(serving: Serving) -> str:
    """The same for answers that a seed would make again."""
    drafter = serving.llm.drafter
    return f"foretoken-{serving.settings.dtype}-{'none' if drafter is None else drafter.name}"


class Gathered:
    """Pieces of one choice that are sent together: at least so many tokens, or what is left at the end."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._held: list[Piece] = []

    def push(self, piece: Piece) -> Piece | None:
        """What can be sent now."""
        self._held.append(piece)
        if piece.finish_reason is None and sum(len(one.token_ids) for one in self._held) < self._least:
            return None
        held, self._held = self._held, []
        if len(held) == 1:
            return piece
        return Piece(
            "".join(one.text for one in held),
            [token for one in held for token in one.token_ids],
            [flag for one in held for flag in one.accepted],
            [origin for one in held for origin in one.origins],
            piece.finish_reason,
            piece.stats,
            piece.seed,
            piece.stop_reason,
            [found for one in held for found in one.logprobs],
            [found for one in held for found in one.rounds],
            held[0].prompt_logprobs,
            piece.why,
        )
