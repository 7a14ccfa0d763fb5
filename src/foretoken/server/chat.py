"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.output import Output, Piece
from foretoken.server.answering import finish_reason
from foretoken.server.call_reader import Call
from foretoken.server.choices import Choices
from foretoken.server.errors import RESPONSES
from foretoken.server.logprobs import chat_logprobs, prompt_logprobs
from foretoken.server.schemas import ChatRequest
from foretoken.server.serving import Serving
from foretoken.server.turn import ChatTurn, Part

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, responses=RESPONSES)
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await _Chat.route(body, http)


def text_of(parts: Sequence[Part]) -> str:
    """Text among the parts of an answer."""
    return "".join(part for part in parts if isinstance(part, str))


def calls_of(parts: Sequence[Part]) -> list[Call]:
    return [part for part in parts if isinstance(part, Call)]


def ended(reason: str | None, calls: int) -> str | None:
    """Finish reason in OpenAI's terms.  A limit may have cut off further calls, so it takes precedence over
    ``tool_calls``."""
    ending = finish_reason(reason)
    return "tool_calls" if calls and ending == "stop" else ending


class _Chat(Choices, ChatTurn):
    kind, chunk, clamps = "chat.completion", "chat.completion.chunk", False
    body: ChatRequest

    def __init__(self, serving: Serving, http: Request, body: ChatRequest) -> None:
        super().__init__(serving, http, body)
        if self.tool_choice.free and any(tool.function.strict for tool in self.tool_choice.offered):
            self.ignored = ("tools.function.strict",)
        self.readers = [self.reader() for _ in range(body.n or 1)]

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        parts = self.readers[index].push(output.text, final=True)
        text, calls = text_of(parts), calls_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [call.function for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": ended(output.finish_reason, len(calls)),
            "stop_reason": output.stop_reason,
            **self.extras(output.token_ids, output, prompt_token_ids=self.prompt),
        }

    def also(self, outputs: Sequence[Output]) -> dict[str, Any]:
        count = self.body.prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs or [], self.texts, count)}

    def beginnings(self, count: int) -> Iterator[dict[str, Any]]:
        for index in range(count):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        reader, final = self.readers[index], piece.finish_reason is not None
        before, parts = reader.count, reader.push(piece.text, final)
        delta: dict[str, Any] = {"content": text_of(parts)}
        calls = calls_of(parts)
        if calls:
            delta["tool_calls"] = [{"index": number, **call.function} for number, call in enumerate(calls, before)]
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(piece.logprobs) if self.body.logprobs else None,
            "finish_reason": ended(piece.finish_reason, reader.count),
            **({"stop_reason": piece.stop_reason} if final else {}),
            **self.extras(piece.token_ids, piece),
        }

    def _logprobs(self, values: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if values is None else chat_logprobs(values, self.texts, self.body.top_logprobs or 0)
