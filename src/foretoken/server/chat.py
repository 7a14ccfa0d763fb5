"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretoken.engine.background import Ticket
from foretoken.engine.output import Output, Piece
from foretoken.server.answering import explained, finish_reason
from foretoken.server.call_reader import Call, CallReader
from foretoken.server.errors import RESPONSES, api_error
from foretoken.server.inputs import check_fields
from foretoken.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from foretoken.server.schemas import ChatRequest
from foretoken.server.serving import Serving
from foretoken.server.sse import EventStream
from foretoken.server.turn import Part, Turn

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, responses=RESPONSES)
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = http.app.state.serving
    headers = check_fields(body, serving)
    try:
        return await _Chat(serving, http, body).respond(headers)
    except Exception as error:
        raise api_error(error) from error


def text_of(parts: Sequence[Part]) -> str:
    """The text among the parts of an answer."""
    return "".join(part for part in parts if isinstance(part, str))


def calls_of(parts: Sequence[Part]) -> list[Call]:
    """The calls among them."""
    return [part for part in parts if isinstance(part, Call)]


def ended(reason: str | None, calls: int) -> str | None:
    """Why an answer ended, in OpenAI's words; calls that a limit has cut short are not all there are."""
    found = finish_reason(reason)
    return "tool_calls" if calls and found == "stop" else found


class _Chat:
    """One request."""

    def __init__(self, serving: Serving, http: Request, body: ChatRequest) -> None:
        self.serving, self.body = serving, body
        self.texts = TokenTexts(serving.llm.tokenizer, bool(body.return_tokens_as_token_ids))
        self.turn = Turn(serving, http, body, "chat.completion")
        self.answer = self.turn.answer

    async def respond(self, headers: dict[str, str]) -> Response:
        """The answer, whole or streamed."""
        body, settings = self.body, self.serving.settings
        tickets = await self.turn.start()
        if body.stream:
            self.answer.kind = "chat.completion.chunk"
            events = self.answer.logged(self._events(tickets))
            return EventStream(events, settings.ping, settings.stream_pad, headers)
        outputs = await self.turn.outputs(tickets)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        found = {**self.answer.head, "choices": choices, **self.answer.tail()}
        if body.prompt_logprobs is not None:
            values = outputs[0].prompt_logprobs or []
            found["prompt_logprobs"] = prompt_logprobs(values, self.texts, body.prompt_logprobs)
        return JSONResponse(found, headers=headers)

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        body = self.body
        parts = self.turn.reader().push(output.text, final=True)
        text, calls = text_of(parts), calls_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [call.function for call in calls]
        values = (
            chat_logprobs(output.logprobs, self.texts, body.top_logprobs or 0) if output.logprobs is not None else None
        )
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": values,
            "finish_reason": ended(output.finish_reason, len(calls)),
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            found |= {"token_ids": output.token_ids, "origins": output.origins, "prompt_token_ids": self.turn.prompt}
        return found | explained(body, output, self.serving)

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _events(self, tickets: Sequence[Ticket]) -> AsyncIterator[Any]:
        options = self.body.stream_options
        readers = [self.turn.reader() for _ in tickets]
        for index in range(len(tickets)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None)
        async for index, piece in self.turn.pieces(tickets):
            chunk = self._delta(index, piece, readers[index])
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = self.answer.tail()["usage"]
            yield chunk
        if options is not None and options.include_usage:
            yield {**self.answer.head, "choices": [], **self.answer.tail()}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self.answer.head, "choices": [choice]}

    def _delta(self, index: int, piece: Piece, reader: CallReader) -> dict[str, Any]:
        body, final, before = self.body, piece.finish_reason is not None, reader.count
        parts = reader.push(piece.text, final)
        delta: dict[str, Any] = {"content": text_of(parts)}
        calls = calls_of(parts)
        if calls:
            delta["tool_calls"] = [{"index": place, **call.function} for place, call in enumerate(calls, before)]
        chunk = self._chunk(index, delta, ended(piece.finish_reason, reader.count))
        choice = chunk["choices"][0]
        if final:
            choice["stop_reason"] = piece.stop_reason
        if body.logprobs:
            choice["logprobs"] = chat_logprobs(piece.logprobs, self.texts, body.top_logprobs or 0)
        if body.return_token_ids:
            choice |= {"token_ids": piece.token_ids, "origins": piece.origins}
        choice |= explained(body, piece, self.serving)
        return chunk
