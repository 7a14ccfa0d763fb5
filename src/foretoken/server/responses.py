"""``POST /v1/responses``: OpenAI's Responses API, on the engine requests of chat completions; nothing is stored."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretoken.engine.background import Ticket
from foretoken.engine.ends import dropped_ids
from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.output import Output
from foretoken.engine.request import Request as EngineRequest
from foretoken.server.call_reader import Call, CallReader
from foretoken.server.errors import RESPONSES, api_error
from foretoken.server.logprobs import Offsets, TokenTexts, chat_logprobs
from foretoken.server.responses_bodies import ResponsesRequest, chat_request, no_effect, renamed
from foretoken.server.serving import Serving
from foretoken.server.sse import RESPONSES_API
from foretoken.server.turn import ChatTurn, Part

router = APIRouter()


@router.post("/v1/responses", response_model=None, responses=RESPONSES)
async def responses(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await _Response.route(body, http)


class _Response(ChatTurn):
    """One request; its answer is a list of items.

    Attributes:
        request_body: the body as received.
        items: finished items of a streamed answer.
        message: the message item being written, if any.
        values: log-probabilities of its tokens.
        tokens: log-probabilities of tokens that were not yet sent.
    """

    kind, dialect, renamed = "response", RESPONSES_API, staticmethod(renamed)

    def __init__(self, serving: Serving, http: Request, body: ResponsesRequest) -> None:
        super().__init__(serving, http, chat_request(body))
        self.request_body, self.ignored = body, [*no_effect(body)]
        self.texts = TokenTexts(serving.llm.tokenizer)
        self.tools = [tool.model_dump() for tool in body.tools or ()]
        if self.tool_choice.free and any(tool["strict"] for tool in self.tools):
            self.tools = [{**tool, "strict": False} if tool["strict"] else tool for tool in self.tools]
            self.ignored.append("tools.strict")
        self.items: list[dict[str, Any]] = []
        self.message: dict[str, Any] | None = None
        self.values: list[TokenLogprobs] = []
        self.tokens: _Tokens  # from the request on, which says which tokens have a text

    def submit(self, requests: Sequence[EngineRequest]) -> list[Ticket]:
        tokenizer = self.serving.llm.tokenizer
        self.tokens = _Tokens(tokenizer, dropped_ids(requests[0], tokenizer))
        return super().submit(requests)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        self.tokens.push(output.logprobs or ())
        reader = self.reader()
        parts = reader.push(output.text, final=True)
        items = [
            self.item(part, self.tokens.until(end)) for part, end in zip(parts, ends_of(reader, True), strict=True)
        ]
        if items and items[-1]["type"] == "message":
            items[-1]["status"] = status_of(output.finish_reason)
        return self.ended(items, output.finish_reason)

    def item(
        self, part: Part, values: Sequence[TokenLogprobs] | None = None, status: str = "completed"
    ) -> dict[str, Any]:
        """An item of the output: a message or a call."""
        if isinstance(part, Call):
            return {
                "type": "function_call",
                "id": f"fc_{part.id.removeprefix('call_')}",
                "call_id": part.id,
                "name": part.name,
                "arguments": part.arguments,
                "status": status,
            }
        return {
            "type": "message",
            "id": f"msg_{uuid.uuid4().hex}",
            "role": "assistant",
            "status": status,
            "content": [self.content(part, values)],
        }

    def content(self, text: str, values: Sequence[TokenLogprobs] | None = None) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(values)}

    def logprobs(self, values: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]]:
        """Log-probabilities of tokens, if requested."""
        if not self.body.logprobs:
            return []
        return chat_logprobs(values or (), self.texts, self.body.top_logprobs or 0)["content"]

    def ended(self, items: Sequence[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        """The final response object."""
        response = self.object(status_of(reason), items)
        tail = self.tail()
        spent = tail["usage"]
        return response | {
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "usage": {
                "input_tokens": spent["prompt_tokens"],
                "input_tokens_details": {**spent["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": spent["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": spent["total_tokens"],
            },
            "metrics": tail["metrics"],
        }

    def object(self, status: str, items: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The response object with the items so far."""
        body = self.request_body
        text = {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.serving.settings.name,
            "output": list(items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": self.tools,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    async def logged_events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """Numbered events; an error is the last of them."""
        number, events = 0, super().logged_events(tickets)
        try:
            async for event in events:
                yield {**event, "sequence_number": number}
                number += 1
        except Exception as error:
            failure = self.renamed(api_error(error))
            code = "server_error" if failure.status >= 500 else "invalid_prompt"
            failed = {**self.object("failed"), "error": {"code": code, "message": failure.body["error"]["message"]}}
            yield {"type": "response.failed", "response": failed, "sequence_number": number}
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """All events, without their numbers."""
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self.object("in_progress")}
        reader = self.reader()
        async for _, piece in self.gathered_pieces(tickets):
            self.tokens.push(piece.logprobs)
            final = piece.finish_reason is not None
            parts = reader.push(piece.text, final)
            for part, end in zip(parts, ends_of(reader, final), strict=True):
                for event in self._events_of(part, self.tokens.until(end)):
                    yield event
            if final and self.message is not None:
                self.values.extend(self.tokens.until(None))
            if piece.stats is not None:
                for event in self._closed(status_of(piece.finish_reason)):
                    yield event
                response = self.ended(self.items, piece.finish_reason)
                yield {"type": f"response.{response['status']}", "response": response}

    def _events_of(self, part: Part, values: Sequence[TokenLogprobs]) -> Iterator[dict[str, Any]]:
        if isinstance(part, str):
            yield from self._text(part, values)
            return
        yield from self._closed()
        item, index = self.item(part), len(self.items)
        where = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": part.arguments}
        yield {"type": "response.function_call_arguments.done", **where, "name": part.name, "arguments": part.arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        self.items.append(item)

    def _text(self, text: str, values: Sequence[TokenLogprobs]) -> Iterator[dict[str, Any]]:
        if self.message is None:
            self.message = self.item("", status="in_progress")
            begun = {**self.message, "content": []}
            yield {"type": "response.output_item.added", "output_index": len(self.items), "item": begun}
            yield {"type": "response.content_part.added", **self._where, "part": self.content("")}
        self.message["content"][0]["text"] += text
        self.values.extend(values)
        delta = {"delta": text, "logprobs": self.logprobs(values)}
        yield {"type": "response.output_text.delta", **self._where, **delta}

    @property
    def _where(self) -> dict[str, Any]:
        """Position of the text being written."""
        message = self.message or {}
        return {"item_id": message.get("id"), "output_index": len(self.items), "content_index": 0}

    def _closed(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End of a message, if one is open."""
        if self.message is None:
            return
        text = self.message["content"][0]["text"]
        part = self.content(text, self.values)
        item = {**self.message, "status": status, "content": [part]}
        yield {"type": "response.output_text.done", **self._where, "text": text, "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.done", **self._where, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self.message, self.values = None, []


class _Tokens:
    """Log-probabilities of an answer's tokens, each for the part in whose text it begins; calls report none."""

    def __init__(self, tokenizer: Any | None, dropped: frozenset[int] | None = None) -> None:
        self._offsets = Offsets(tokenizer, dropped=dropped)
        self._tokens: list[tuple[int, TokenLogprobs]] = []

    def push(self, values: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens."""
        begins = self._offsets.push([value.token_id for value in values])
        self._tokens.extend(zip(begins, values, strict=True))

    def until(self, end: int | None) -> list[TokenLogprobs]:
        """Remove and return the tokens that begin before a position of the answer, or all that are left."""
        count = len(self._tokens) if end is None else bisect_left(self._tokens, end, key=lambda token: token[0])
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return [value for _, value in taken]


def ends_of(reader: CallReader, final: bool) -> list[int | None]:
    """Ends of the parts that a reader has just returned; the last of an answer has all tokens behind its text, too."""
    return [*reader.ends[:-1], None] if final and reader.ends else [*reader.ends]


def status_of(reason: str | None) -> str:
    """Status of an answer and of its last message; a call is only reported once it is complete."""
    return "incomplete" if reason == "length" else "completed"
