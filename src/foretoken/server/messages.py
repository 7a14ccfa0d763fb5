"""``POST /v1/messages``: Anthropic's API, on the engine requests of chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretoken.engine.background import Ticket
from foretoken.engine.output import Output
from foretoken.engine.stats import SpecStats
from foretoken.server.call_formats import PARAMETERS
from foretoken.server.call_reader import Call
from foretoken.server.errors import ANTHROPIC_RESPONSES, ApiError, api_error
from foretoken.server.messages_bodies import CountRequest, MessagesRequest, chat_request
from foretoken.server.serving import Serving
from foretoken.server.sse import ANTHROPIC
from foretoken.server.templates import arguments_of
from foretoken.server.turn import ChatTurn, Part

router = APIRouter(responses=ANTHROPIC_RESPONSES)


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await _Message.route(body, http)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountRequest, http: Request) -> Response:
    """Count the tokens of a conversation, tools and system prompt included."""
    serving: Serving = http.app.state.serving
    try:
        message = _Message(serving, http, body)
        headers = serving.note_ignored([*body.ignored, *message.ignored])
        return JSONResponse({"input_tokens": await message.count()}, headers=headers)
    except Exception as error:
        raise api_error(error) from error


class _Message(ChatTurn):
    """One request; its answer is a list of blocks of text and calls.

    Attributes:
        request_body: the body as received.
        parts: parts of a streamed answer so far.
        index: index of the current block.
        writes_text: whether the current block is text.
    """

    kind, dialect = "message", ANTHROPIC

    def __init__(self, serving: Serving, http: Request, body: CountRequest) -> None:
        super().__init__(serving, http, chat_request(body))
        self.request_body: Any = body
        self.ignored: list[str] = []
        if body.output_config is not None and body.output_config.effort is not None:
            self.ignored.append("output_config.effort")
        if self.tool_choice.free and any(tool.strict for tool in body.tools or ()):
            self.ignored.append("tools.strict")
        self.parts: list[Part] = []
        self.index, self.writes_text = 0, False

    @staticmethod
    def renamed(error: ApiError) -> ApiError:
        error.message = error.message.replace(f".{PARAMETERS} (", ".input_schema (")  # the field's name in this API
        return error

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        self.parts = self.reader().push(output.text, final=True)
        return {
            **self._head([_block(part) for part in self.parts if part], _usage(output.stats)),
            **self._end(output.finish_reason, output.stop_reason),
            "metrics": self.tail()["metrics"],
        }

    def _head(self, content: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.serving.settings.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _end(self, reason: str | None, stop: str | int | None) -> dict[str, Any]:
        """Stop reason of the answer."""
        stop_reason = "max_tokens" if reason == "length" else "end_turn"
        if stop_reason == "max_tokens" and self.most < self.request_body.max_tokens:
            stop_reason = "model_context_window_exceeded"
        if reason == "stop" and stop in (self.request_body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if stop_reason == "end_turn" and any(isinstance(part, Call) for part in self.parts):
            stop_reason = "tool_use"
        return {"stop_reason": stop_reason, "stop_sequence": None}

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        begun = {"input_tokens": len(self.prompt), "output_tokens": 0}
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        yield {"type": "message_start", "message": self._head([], begun | cache)}
        reader = self.reader()
        async for _, piece in self.gathered_pieces(tickets):
            for part in reader.push(piece.text, piece.finish_reason is not None):
                for event in self._events_of(part):
                    yield event
            if piece.stats is not None:
                for event in self._closed():
                    yield event
                delta = self._end(piece.finish_reason, piece.stop_reason)
                tail = {"usage": _usage(piece.stats), "metrics": self.tail()["metrics"]}
                yield {"type": "message_delta", "delta": delta, **tail}
        yield {"type": "message_stop"}

    def _events_of(self, part: Part) -> Iterator[dict[str, Any]]:
        self.parts.append(part)
        if isinstance(part, str):
            if not self.writes_text:
                self.writes_text = True
                yield self._block_start({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part})
            return
        yield from self._closed()
        yield self._block_start({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        yield self._close_block()

    def _block_start(self, block: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def _close_block(self) -> dict[str, Any]:
        self.index += 1
        return {"type": "content_block_stop", "index": self.index - 1}

    def _closed(self) -> Iterator[dict[str, Any]]:
        """End of a text block, if one is open."""
        if self.writes_text:
            self.writes_text = False
            yield self._close_block()


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Call):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments_of(part.arguments)}
    return {"type": "text", "text": part}


def _usage(stats: SpecStats) -> dict[str, Any]:
    """Token counts; ``input_tokens`` excludes cached tokens."""
    cached = stats.num_prompt_tokens - stats.num_prompt_tokens_computed
    return {
        "input_tokens": stats.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": stats.num_new_tokens,
    }
