"""What chat completions and completions share: the route, and an answer of choices, whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from foretoken.engine.background import Ticket
from foretoken.engine.output import Output, Piece
from foretoken.engine.trace import RoundTrace
from foretoken.server.answering import Answer
from foretoken.server.errors import api_error
from foretoken.server.inputs import check_fields
from foretoken.server.logprobs import TokenTexts
from foretoken.server.schemas import CompletionBody
from foretoken.server.serving import Serving


class Choices(ABC):
    """One request, and the choices that answer it.

    Attributes:
        chunk: the kind of the objects of a stream, where that is another than the answer's.
        answer: what is counted and logged of it.
        written: tokens of the answer that are billed; ``None``: those that the engine wrote.
        ignored: known fields that have no effect on this request.
    """

    chunk: ClassVar[str] = ""
    written: int | None = None
    ignored: Sequence[str] = ()
    answer: Answer

    def __init__(self, serving: Serving, http: Request, body: Any) -> None:
        self.serving, self.http, self.body = serving, http, body
        self.texts = TokenTexts(serving.llm.tokenizer, bool(body.return_tokens_as_token_ids))

    @classmethod
    async def route(cls, body: CompletionBody, http: Request) -> Response:
        """The answer to a request; whatever is wrong is an :class:`~foretoken.server.errors.ApiError`."""
        serving: Serving = http.app.state.serving
        check_fields(body, serving)
        try:
            found = cls(serving, http, body)
            return await found.respond(serving.note_ignored([*body.ignored, *found.ignored]))
        except Exception as error:
            raise api_error(error) from error

    async def respond(self, headers: dict[str, str]) -> Response:
        """The answer, whole or streamed."""
        tickets, answer = await self.start(), self.answer
        if self.body.stream:
            answer.kind = self.chunk or answer.kind
            return answer.streamed(answer.logged(self._events(tickets)), headers)
        outputs = await answer.outputs(tickets)
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        whole = {**answer.head, "choices": choices, **answer.tail(self.written), **self.also(outputs)}
        return JSONResponse(whole, headers=headers)

    async def _events(self, tickets: Sequence[Ticket]) -> AsyncIterator[Any]:
        options, answer, sent = self.body.stream_options, self.answer, 0
        running = options is not None and options.continuous_usage_stats
        for choice in self.beginnings(len(tickets)):
            yield {**answer.head, "choices": [choice], **({"usage": answer.usage_so_far(0)} if running else {})}
        async for index, piece in answer.pieces(tickets):
            chunk = {**answer.head, "choices": [self.delta(index, piece)]}
            sent += len(piece.token_ids)
            if running:
                chunk["usage"] = answer.usage_so_far(sent if self.written is None else self.written)
            yield chunk
        if options is not None and options.include_usage:
            yield {**answer.head, "choices": [], **answer.tail(self.written)}

    @abstractmethod
    async def start(self) -> Sequence[Ticket]:
        """Hand it to the engine."""

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """One of a whole answer."""

    def also(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """What a whole answer says besides."""
        return {}

    @abstractmethod
    def beginnings(self, count: int) -> Iterator[dict[str, Any]]:
        """What is streamed of ``count`` choices before any token."""

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """What a choice of a stream gains."""

    def told(self, ids: Sequence[int], found: Output | Piece, **more: Any) -> dict[str, Any]:
        """What a choice, or what it gains, says of its tokens (and ``more`` beside them) and rounds, if it is asked."""
        said: dict[str, Any] = {}
        if self.body.return_token_ids:
            said |= {"token_ids": ids, **more, "origins": found.origins[: len(ids)]}
        if self.body.speculative is not None and self.body.speculative.explain:
            said["speculative"] = {**explained(found.rounds, self.serving), "why": found.why}
        return said


def explained(rounds: Sequence[RoundTrace], serving: Serving) -> dict[str, Any]:
    """Traces, with the texts of their tokens."""
    tokenizer = serving.llm.tokenizer

    def text(token: int) -> str:
        return str(tokenizer.decode([token])) if tokenizer is not None else str(token)

    return {
        "rounds": [
            {**one.as_dict(), "texts": [text(token) for token in one.tokens], "next_text": text(one.next_token)}
            for one in rounds
        ]
    }
