"""``POST /v1/messages``: Anthropic's API, on the same engine requests as chat completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretoken.engine.background import Ticket
from foretoken.engine.stats import SpecStats
from foretoken.server.call_formats import PARAMETERS
from foretoken.server.call_reader import Call
from foretoken.server.errors import ANTHROPIC_RESPONSES, api_error
from foretoken.server.inputs import check_fields
from foretoken.server.messages_bodies import CountRequest, MessagesRequest, chat_request
from foretoken.server.serving import Serving
from foretoken.server.sse import ANTHROPIC
from foretoken.server.turn import ChatTurn, Part

router = APIRouter(responses=ANTHROPIC_RESPONSES)
REASONS = {"length": "max_tokens", "context": "model_context_window_exceeded"}
"""Why an answer ended, in Anthropic's words; else ``end_turn``."""


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = http.app.state.serving
    try:
        headers, turn = _turn(body, http, serving)
        tickets = await turn.start()
        if body.stream:
            return turn.answer.streamed(
                turn.answer.logged(_MessageStream(turn, body).events(tickets)), headers, ANTHROPIC
            )
        (output,) = await turn.answer.outputs(tickets)
        parts = turn.reader().push(output.text, final=True)
        found = {
            **_head(turn, [_block(part) for part in parts if part], _usage(output.stats)),
            **_end(turn, body, output.finish_reason, output.stop_reason, parts),
            "metrics": turn.answer.tail()["metrics"],
        }
        return JSONResponse(found, headers=headers)
    except Exception as error:
        failure = api_error(error)
        failure.message = failure.message.replace(f".{PARAMETERS} (", ".input_schema (")  # as it is called here
        raise failure from error


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountRequest, http: Request) -> Response:
    """Count the tokens of a conversation, tools and system prompt included."""
    serving: Serving = http.app.state.serving
    try:
        headers, turn = _turn(body, http, serving)
        return JSONResponse({"input_tokens": await turn.count()}, headers=headers)
    except Exception as error:
        raise api_error(error) from error


def _turn(body: CountRequest, http: Request, serving: Serving) -> tuple[dict[str, str], ChatTurn]:
    """Headers that name the fields that were ignored, and the request."""
    inner = chat_request(body)
    check_fields(inner, serving)
    ignored = list(body.ignored)
    if body.output_config is not None and body.output_config.effort is not None:
        ignored.append("output_config.effort")
    turn = ChatTurn(serving, http, inner, "message", clamps=True)
    if turn.choice.free and any(tool.strict for tool in body.tools or ()):
        ignored.append("tools.strict")
    return serving.note_ignored(ignored), turn


def _block(part: Part) -> dict[str, Any]:
    """A part of the answer."""
    if isinstance(part, Call):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments)}
    return {"type": "text", "text": part}


def _head(turn: ChatTurn, content: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": turn.answer.id,
        "type": "message",
        "role": "assistant",
        "model": turn.serving.settings.name,
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(stats: SpecStats) -> dict[str, Any]:
    """Tokens: what was found in the cache is not in ``input_tokens``."""
    cached = stats.num_prompt_tokens - stats.num_prompt_tokens_computed
    return {
        "input_tokens": stats.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": stats.num_new_tokens,
    }


def _end(
    turn: ChatTurn, body: MessagesRequest, reason: str | None, stop: str | int | None, parts: Sequence[Part]
) -> dict[str, Any]:
    """Why the answer ended."""
    found = REASONS.get(reason or "", "end_turn")
    if found == "max_tokens" and turn.most < body.max_tokens:
        found = "model_context_window_exceeded"
    if reason == "stop" and stop in (body.stop_sequences or ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if found == "end_turn" and any(isinstance(part, Call) for part in parts):
        found = "tool_use"
    return {"stop_reason": found, "stop_sequence": None}


class _MessageStream:
    """The events of one answer: blocks of text and calls, each begun, continued and ended."""

    def __init__(self, turn: ChatTurn, body: MessagesRequest) -> None:
        self.turn, self.body = turn, body
        self.index, self.writes_text = 0, False
        self.parts: list[Part] = []

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """All of them."""
        begun = {"input_tokens": len(self.turn.prompt), "output_tokens": 0}
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        yield {"type": "message_start", "message": _head(self.turn, (), begun | cache)}
        reader = self.turn.reader()
        async for _, piece in self.turn.answer.pieces(tickets):
            for part in reader.push(piece.text, piece.finish_reason is not None):
                for one in self._events_of(part):
                    yield one
            if piece.stats is not None:
                for one in self._closed():
                    yield one
                delta = _end(self.turn, self.body, piece.finish_reason, piece.stop_reason, self.parts)
                tail = {"usage": _usage(piece.stats), "metrics": self.turn.answer.tail()["metrics"]}
                yield {"type": "message_delta", "delta": delta, **tail}
        yield {"type": "message_stop"}

    def _events_of(self, part: Part) -> Iterator[dict[str, Any]]:
        self.parts.append(part)
        if isinstance(part, str):
            if not self.writes_text:
                self.writes_text = True
                yield self._began({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part})
            return
        yield from self._closed()
        yield self._began({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        yield self._ended()

    def _began(self, block: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def _ended(self) -> dict[str, Any]:
        self.index += 1
        return {"type": "content_block_stop", "index": self.index - 1}

    def _closed(self) -> Iterator[dict[str, Any]]:
        """The end of a text, if one is being written."""
        if self.writes_text:
            self.writes_text = False
            yield self._ended()
