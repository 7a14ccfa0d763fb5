"""Base of all routes that generate text: a request from arrival to its answer, which is counted and logged."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fastapi.responses import Response
from starlette.requests import Request as HttpRequest

from foretoken.engine.background import Ticket
from foretoken.engine.errors import Draining, EngineDead, QueueFull
from foretoken.engine.output import Output, Piece
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.server import usage
from foretoken.server.errors import ApiError, api_error, bad
from foretoken.server.inputs import check_fields
from foretoken.server.limits import log_request
from foretoken.server.running import ClientGone, outputs_of, pieces_then_cancel, submit_all, while_connected
from foretoken.server.schemas import CompletionBody
from foretoken.server.serving import Serving
from foretoken.server.slots import RequestSlot, slot_of
from foretoken.server.sse import OPENAI, Dialect, EventStream
from foretoken.server.workers import LARGE, TEXTS, in_thread, json_bytes

VALUE_COST = 20
"""Cost of a value of an answer, in characters to tokenise: some eight microseconds of building and encoding."""


def finish_reason(reason: str | None) -> str | None:
    """Finish reason in OpenAI's terms."""
    return "stop" if reason == "eos" else reason


class Answer(ABC):
    """One HTTP request of a route that generates text.

    Attributes:
        kind: type of the answer's object.
        dialect: format of its streams.
        body: the request as a completion or a chat completion.
        ignored: known fields that have no effect on this request.
        stats: statistics of finished choices, by index.
        reasons: their finish reasons.
        last_s: time of the last tokens of a choice, by index.
        num_new_tokens: tokens of the answer so far.
    """

    kind: ClassVar[str]
    dialect: ClassVar[Dialect] = OPENAI
    ignored: Sequence[str] = ()

    def __init__(self, serving: Serving, http: HttpRequest, body: Any) -> None:
        check_fields(body, serving)
        self.serving, self.http, self.body = serving, http, body
        self.began_s, self.created = time.monotonic(), int(time.time())
        prefixes = {"text_completion": "cmpl-", "chat.completion": "chatcmpl-", "message": "msg_", "response": "resp_"}
        self.id = f"{prefixes[self.kind]}{body.request_id or uuid.uuid4().hex}"
        self.stats: dict[int, SpecStats] = {}
        self.reasons: list[str] = []
        self.last_s: dict[int, float] = {}
        self.why, self.prompt_tokens, self.num_new_tokens = "", 0, 0

    @classmethod
    async def route(cls, body: Any, http: HttpRequest) -> Response:
        """Answer a request, whole or streamed.  Raises every error as :class:`ApiError`."""
        serving: Serving = http.app.state.serving
        try:
            answer = cls(serving, http, body)
            headers, settings = serving.note_ignored([*body.ignored, *answer.ignored]), serving.settings
            tickets = await answer.start()
            if body.stream:
                # From the engine to the client, each around the one before: ``_counted_pieces`` (a ticket's),
                # ``_merged`` (several tickets'), ``pieces_then_cancel``, ``gathered_pieces`` (notes ends, too),
                # ``events`` (the API's objects), ``logged_events``, ``encoded_events`` (errors, too),
                # ``EventStream`` (comments).
                events = answer.logged_events(tickets)
                unread = partial(answer.unread, tickets)
                return EventStream(events, settings.ping, settings.stream_pad, headers, cls.dialect, unread)
            content = await answer.encoded(await answer.outputs(tickets))
            return Response(content, media_type="application/json", headers=headers)
        except Exception as error:
            raise cls.renamed(api_error(error)) from error

    @staticmethod
    def renamed(error: ApiError) -> ApiError:
        """The error with the field names of this API."""
        return error

    @abstractmethod
    async def start(self) -> Sequence[Ticket]:
        """Submit the request to the engine.  Raises ``ApiError`` if it is refused."""

    @abstractmethod
    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The complete answer."""

    async def encoded(self, outputs: Sequence[Output]) -> bytes:
        """The complete answer as JSON; a large one is built in a thread, as the event loop would wait for it."""
        cost = VALUE_COST * sum(map(num_values, outputs))
        if cost < LARGE:
            return json_bytes(self.whole(outputs))
        return await in_thread(TEXTS, lambda: json_bytes(self.whole(outputs)), cost=cost)

    @abstractmethod
    def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """Events of a streamed answer."""

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue the requests.  Raises :class:`ApiError` if the engine refuses them."""
        with self._refusals():
            tickets = submit_all(self.serving.engine, requests, self.began_s)
        prompts = requests[:: self.body.n or 1]
        self.prompt_tokens = sum(len(request.prompt) for request in prompts)
        self.slot.spend(self.prompt_tokens)
        return tickets

    def check_room(self, count: int) -> None:
        """Take ``count`` slots before the prompt is tokenised: an overloaded server has no time for prompts that it
        will refuse.

        Raises :class:`ApiError`: 503 if the server is full, draining or without an engine, 400 for more choices than
        can ever be admitted and for a priority that this key may not request, 429 if its quota is used up.
        """
        with self._refusals():
            if (getattr(self.body, "priority", None) or 0) < 0 and not self.slot.caller.priority:
                raise bad(
                    "a priority below 0 is not allowed for this key: leave it out",
                    "priority",
                    "priority_not_allowed",
                )
            self.serving.engine.check_room()
            self.slot.take(count)

    @property
    def size(self) -> int:
        """Bytes of the request's body: the cost of tokenising it."""
        return int(self.http.scope["state"].get("size", 1))

    @property
    def slot(self) -> RequestSlot:
        """The request's slot in the server."""
        return slot_of(self.http.scope)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Count and log refusals inside the block."""
        try:
            yield
        except (QueueFull, Draining, EngineDead, ApiError) as error:
            failure = self.serving.rejected(error)
            self.log(failure.status)
            raise failure from error
        except Exception as error:
            self.log(api_error(error).status)
            raise

    def saw(self, index: int, tokens: int) -> None:
        """Note a block of tokens of a choice."""
        now_s = time.monotonic()
        before = self.last_s.get(index)
        if before is not None and tokens:
            self.serving.metrics.came((now_s - before) / tokens)
        self.last_s[index] = now_s
        self.num_new_tokens += tokens
        self.slot.spend(tokens)

    async def outputs(self, tickets: Sequence[Ticket]) -> list[Output]:
        """The complete outputs, counted and logged.  Raises ``ApiError`` if the request failed."""
        try:
            outputs = await while_connected(self.http.receive, outputs_of(self.serving.engine, tickets, self.saw))
        except ClientGone:
            self.log(499)
            raise ApiError(408, "the client went away", counted=True) from None
        except Exception as error:
            failure = api_error(error)
            self.log(failure.status)
            raise failure from error
        for index, output in enumerate(outputs):
            self.note(index, output.stats, output.finish_reason, output.why)
        self.log(200)
        return outputs

    async def gathered_pieces(self, tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of each choice, with its index; ends are noted."""
        gathered = [Gathered(self.serving.settings.stream_interval) for _ in tickets]
        async for index, piece in pieces_then_cancel(self.serving.engine, tickets, self.saw):
            if piece.stats is not None:
                self.note(index, piece.stats, piece.finish_reason, piece.why)
            ready = gathered[index].push(piece)
            if ready is not None:
                yield index, ready

    def note(self, index: int, stats: SpecStats, reason: str | None, why: str = "") -> None:
        """Note the end of a choice."""
        self.stats[index] = stats
        self.reasons.append(finish_reason(reason) or "unknown")
        self.why = why or self.why

    @property
    def all_stats(self) -> list[SpecStats]:
        """Statistics of finished choices, in order."""
        return [self.stats[index] for index in sorted(self.stats)]

    @property
    def prompt_stats(self) -> list[SpecStats]:
        """Statistics of one choice per prompt."""
        count = self.body.n or 1
        return [stats for index, stats in sorted(self.stats.items()) if index % count == 0]

    def tail(self, completion: int | None = None) -> dict[str, Any]:
        """Usage and metrics for the end of an answer."""
        drafter = self.serving.llm.drafter
        longest = 0 if drafter is None else drafter.max_depth
        tail: dict[str, Any] = {
            "usage": usage.usage(self.prompt_stats, self.all_stats, completion),
            "metrics": usage.metrics(self.all_stats, time.monotonic() - self.began_s, longest, self._predicted),
        }
        if getattr(self.body, "prediction", None) is None:  # the server's own predictions are not billed
            for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
                tail["usage"]["completion_tokens_details"][name] = 0
        if self.body.timings:
            tail["timings"] = usage.timings(self.prompt_stats, self.all_stats)
        return tail

    def usage_so_far(self, completion: int) -> dict[str, Any]:
        """Usage of a stream after ``completion`` tokens; its details cover finished choices only."""
        whole = self.prompt_tokens + completion
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion, "total_tokens": whole}
        return {**self.tail()["usage"], **counts}

    @property
    def _predicted(self) -> float | None:
        """Speedup over plain decoding that the cost model currently predicts."""
        return self.serving.engine.status.controller.get("predicted_speedup")

    def log(self, status: int) -> None:
        """Write the log line of the request."""
        whole = usage.merged(self.all_stats)
        fields = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "first_token_s": round(whole.first_token_s, 4),
            "mean_acceptance_length": round(whole.mean_acceptance_length, 3),
            "finish_reason": ",".join(self.reasons) or ("abort" if status in (499, 504) else ""),
            "why": self.why,
        }
        if self.serving.settings.log_prompts:
            fields["prompt"] = prompt_text(self.body)[: self.serving.settings.log_prompts]
        log_request(self.http.scope, status, self.began_s, **fields)

    def unread(self, tickets: Sequence[Ticket]) -> None:
        """End a request whose client has left before its stream began."""
        for ticket in tickets:
            self.serving.engine.cancel(ticket)
        self.log(499)

    async def logged_events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """Events of a streamed answer, with a log line however it ends."""
        status, events = 499, self.events(tickets)
        try:
            async for event in events:
                yield event
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
    """The prompt, or the contents of the messages, as received."""
    prompt = getattr(body, "prompt", None)
    return str(prompt if prompt is not None else [m.content for m in getattr(body, "messages", ())])


def num_values(output: Output) -> int:
    """Number of values that an answer may have for an output: tokens, log-probabilities and traced draft tokens."""
    rows = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    traced = sum(len(trace.tokens) for trace in output.rounds)
    return len(output.token_ids) + sum(1 + len(row.top) for row in rows if row is not None) + traced


class Gathered:
    """Pieces of one choice that are sent together: at least ``least`` tokens, or the remainder at the end."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._pieces: list[Piece] = []

    def push(self, piece: Piece) -> Piece | None:
        """The gathered piece if it can be sent now, else ``None``."""
        self._pieces.append(piece)
        if piece.finish_reason is None and sum(len(part.token_ids) for part in self._pieces) < self._least:
            return None
        pieces, self._pieces = self._pieces, []
        names = ("token_ids", "accepted", "origins", "logprobs", "rounds")  # with an entry per token or round
        lists: dict[str, Any] = {name: [value for part in pieces for value in getattr(part, name)] for name in names}
        text = "".join(part.text for part in pieces)
        return replace(piece, text=text, prompt_logprobs=pieces[0].prompt_logprobs, **lists)
