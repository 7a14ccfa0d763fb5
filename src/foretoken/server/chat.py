"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretoken.constraints import Constraint
from foretoken.engine.background import Ticket
from foretoken.engine.output import Output, Piece
from foretoken.engine.request import Request as EngineRequest
from foretoken.server import tools
from foretoken.server.answering import Answer, Gathered, explained, finish_reason
from foretoken.server.errors import RESPONSES, api_error, bad
from foretoken.server.inputs import check_fields, constraints_of, encoded, engine_requests, tenant_of
from foretoken.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from foretoken.server.running import outputs_of, pieces_of
from foretoken.server.schemas import ChatRequest
from foretoken.server.serving import Serving
from foretoken.server.sse import EventStream
from foretoken.server.templates import PLAIN_STOP, has_template, prompt_of, takes_effort
from foretoken.server.workers import TEXTS, in_thread

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


class _Chat:
    """One request."""

    def __init__(self, serving: Serving, http: Request, body: ChatRequest) -> None:
        self.serving, self.http, self.body = serving, http, body
        self.engine = serving.engine
        self.texts = TokenTexts(serving.llm.tokenizer, bool(body.return_tokens_as_token_ids))
        self._check()
        self.prompt: list[int] = []
        self.offered = {tool.function.name for tool in body.tools or ()} if body.tool_choice != "none" else set()
        self.answer = Answer(serving, http, body, "chat.completion")

    def _check(self) -> None:
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        if body.reasoning_effort is not None and not takes_effort(self.serving.llm.tokenizer):
            raise bad("this model's template takes no reasoning effort: leave it out", "reasoning_effort")
        if body.stream and body.prompt_logprobs is not None:
            raise bad("logprobs of a prompt are not streamed: leave stream out, or what asks for them", "stream")
        if body.modalities not in (None, ["text"]):
            raise bad("only text is served", "modalities")
        if body.tool_choice is not None and not isinstance(body.tool_choice, str):
            raise bad("a tool cannot be forced: tool_choice may be auto or none", "tool_choice")
        if body.tool_choice == "required":
            raise bad("a call cannot be forced: tool_choice may be auto or none", "tool_choice")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise bad("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")

    async def respond(self, headers: dict[str, str]) -> Response:
        """The answer, whole or streamed."""
        body, llm = self.body, self.serving.llm
        self.answer.check_room(body.n or 1)
        asked = body.tools if self.offered else None
        generate = body.add_generation_prompt is not False
        kwargs = dict(body.chat_template_kwargs or {})
        prompt = await prompt_of(llm.tokenizer, body.messages, asked, kwargs, generate, body.reasoning_effort)
        constraints = await constraints_of(body, body.n or 1, self.serving)
        tickets = self.answer.submit(
            await in_thread(TEXTS, lambda: self._requests(prompt, constraints), cost=self.answer.size)
        )
        if body.stream:
            self.answer.kind = "chat.completion.chunk"
            events = self.answer.logged(self._events(tickets))
            return EventStream(events, self.serving.settings.ping, self.serving.settings.stream_pad, headers)
        outputs = await self.answer.finished(outputs_of(self.engine, tickets, self.answer.saw))
        for index, output in enumerate(outputs):
            self.answer.note(index, output.stats, output.finish_reason, output.why)
        self.answer.log(200)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        found = {**self.answer.head, "choices": choices, **self.answer.tail()}
        if body.prompt_logprobs is not None:
            values = outputs[0].prompt_logprobs or []
            found["prompt_logprobs"] = prompt_logprobs(values, self.texts, body.prompt_logprobs)
        return JSONResponse(found, headers=headers)

    def _requests(self, prompt: str, constraints: Sequence[Constraint | None]) -> list[EngineRequest]:
        """What the engine is asked."""
        body, llm = self.body, self.serving.llm
        templated = has_template(llm.tokenizer)
        special = not templated if body.add_special_tokens is None else body.add_special_tokens
        self.prompt = encoded(prompt, self.serving, special, "messages")
        room = max(1, llm.target.context_length - len(self.prompt))
        most = min(room, llm.defaults.sampling.get("max_new_tokens", room))
        return engine_requests(
            [self.prompt],
            body,
            self.serving,
            constraints,
            "messages",
            tenant_of(self.http),
            max_new_tokens=body.max_completion_tokens or body.max_tokens or most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            prediction=None if body.prediction is None else body.prediction.text,
            **({} if templated else {"stop": self._stops()}),
        )

    def _stops(self) -> list[str]:
        given = self.body.stop
        return [*([given] if isinstance(given, str) else given or ()), PLAIN_STOP]

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        body = self.body
        text, calls = tools.parse(output.text, self.offered) if self.offered else (output.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        calls = calls[:1] if body.parallel_tool_calls is False else calls
        if calls:
            message["tool_calls"] = calls
        values = (
            chat_logprobs(output.logprobs, self.texts, body.top_logprobs or 0) if output.logprobs is not None else None
        )
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": values,
            "finish_reason": "tool_calls" if calls else finish_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            found |= {"token_ids": output.token_ids, "origins": output.origins, "prompt_token_ids": self.prompt}
        if body.speculative is not None and body.speculative.explain:
            found["speculative"] = {**explained(output.rounds, self.serving), "why": output.why}
        return found

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _events(self, tickets: Sequence[Ticket]) -> AsyncIterator[Any]:
        options = self.body.stream_options
        gathered = [Gathered(self.serving.settings.stream_interval) for _ in tickets]
        held = [_Held(self.offered) for _ in tickets]
        for index in range(len(tickets)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None)
        async for index, piece in pieces_of(self.engine, tickets, self.answer.saw):
            if piece.stats is not None:
                self.answer.note(index, piece.stats, piece.finish_reason, piece.why)
            ready = gathered[index].push(piece)
            if ready is not None:
                chunk = self._delta(index, ready, held[index])
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self.answer.tail()["usage"]
                yield chunk
        if options is not None and options.include_usage:
            yield {**self.answer.head, "choices": [], **self.answer.tail()}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self.answer.head, "choices": [choice]}

    def _delta(self, index: int, piece: Piece, held: _Held) -> dict[str, Any]:
        body, final = self.body, piece.finish_reason is not None
        text, calls = held.push(piece.text, final)
        calls = calls[:1] if body.parallel_tool_calls is False else calls
        delta: dict[str, Any] = {"content": text}
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        reason = "tool_calls" if calls else finish_reason(piece.finish_reason)
        chunk = self._chunk(index, delta, reason)
        choice = chunk["choices"][0]
        if final:
            choice["stop_reason"] = piece.stop_reason
        if body.logprobs:
            choice["logprobs"] = chat_logprobs(piece.logprobs, self.texts, body.top_logprobs or 0)
        if body.return_token_ids:
            choice |= {"token_ids": piece.token_ids, "origins": piece.origins}
        if body.speculative is not None and body.speculative.explain:
            choice["speculative"] = {**explained(piece.rounds, self.serving), "why": piece.why}
        return chunk


class _Held:
    """Text of one choice that may turn out to be a call of a tool is held back until that is certain."""

    def __init__(self, offered: set[str]) -> None:
        self._offered, self._text, self._sent = offered, "", 0

    def push(self, new: str, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text that can be sent, and the calls, which come at the end."""
        self._text += new
        if not self._offered:
            return new, []
        if final:
            text, calls = tools.parse(self._text, self._offered)
            return ("" if calls else text[self._sent :]), calls
        if tools.may_begin(self._text):
            return "", []
        text, self._sent = self._text[self._sent :], len(self._text)
        return text, []
