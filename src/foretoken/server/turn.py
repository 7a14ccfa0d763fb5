"""The answer to a conversation, shared by chat completions, messages (Anthropic) and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from starlette.requests import Request as HttpRequest

from foretoken.core.constraints import OutputRule
from foretoken.core.conversation import has_template
from foretoken.engine.background import Ticket
from foretoken.engine.ends import special_tokens
from foretoken.engine.request import Request as EngineRequest
from foretoken.server.answering import Answer
from foretoken.server.call_formats import CallFormat, choice_of, forced, format_of, schemas_of, special_of
from foretoken.server.call_reader import SIGNS, Call, CallReader
from foretoken.server.errors import bad
from foretoken.server.inputs import (
    check_fits,
    constraints_of,
    encoded,
    engine_requests,
    room_of,
    usual_limit,
)
from foretoken.server.schemas import ChatRequest
from foretoken.server.serving import Serving
from foretoken.server.templates import PLAIN_STOP, Conversation, arguments_of, prompt_of, takes_effort
from foretoken.server.workers import TEXTS, in_thread

Part = str | Call


class ChatTurn(Answer):
    """One conversation and its answer.

    Attributes:
        clamps: whether the token limit may exceed the room in the context, which then ends the answer.
        body: the request as a chat completion.
        prompt: token ids, set on start.
        most: token limit of the answer, set on start.
    """

    clamps: ClassVar[bool] = True
    body: ChatRequest

    def __init__(self, serving: Serving, http: HttpRequest, body: ChatRequest) -> None:
        super().__init__(serving, http, body)
        self._check()
        self.tool_choice = choice_of(body)
        self.prompt: list[int] = []
        self.most = 0

    def _check(self) -> None:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        if body.reasoning_effort is not None and not takes_effort(self.serving.llm.tokenizer):
            raise bad("this model's chat template does not support reasoning effort: leave it out", "reasoning_effort")
        if body.stream and body.prompt_logprobs is not None:
            raise bad("logprobs of a prompt are not streamed: leave stream out, or what asks for them", "stream")
        if body.modalities not in (None, ["text"]):
            raise bad("only text is served", "modalities")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise bad("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
        if body.continue_final_message and body.add_generation_prompt:
            raise bad(
                "continue_final_message excludes add_generation_prompt: leave one of them out",
                "add_generation_prompt",
            )

    @cached_property
    def format(self) -> CallFormat:
        """Call format of the model."""
        return format_of(str(getattr(self.serving.llm.tokenizer, "chat_template", None) or ""))

    def reader(self) -> CallReader:
        return CallReader(self.tool_choice.names, self.tool_choice.most)

    def conversation(self) -> Conversation:
        """Input of the chat template."""
        body = self.body
        return Conversation(
            body.messages,
            self.tool_choice.offered,
            dict(body.chat_template_kwargs or {}),
            body.add_generation_prompt is not False,
            bool(body.continue_final_message),
            body.reasoning_effort,
        )

    async def count(self) -> int:
        """Number of prompt tokens, even beyond the context, so that a client learns by how much."""
        prompt = await prompt_of(self.serving.llm.tokenizer, self.conversation())
        return len(await in_thread(TEXTS, lambda: self._encoded(prompt), cost=len(prompt)))

    async def start(self) -> Sequence[Ticket]:
        body, choice = self.body, self.tool_choice
        count = body.n or 1
        self.check_room(count)
        prompt = await prompt_of(self.serving.llm.tokenizer, self.conversation())
        calls, schemas = "", schemas_of(body.tools or (), choice.forced)
        if choice.forced:
            special = special_of(self.serving.llm.tokenizer)
            calls = forced(self.format, choice.forced, choice.most, special)
        constraints = await constraints_of(body, count, self.serving, calls, schemas)
        requests = await in_thread(TEXTS, lambda: self._requests(prompt, constraints), cost=self.size)
        return self.submit(requests)

    def _encoded(self, prompt: str) -> list[int]:
        special = self.body.add_special_tokens
        if special is None:
            special = not has_template(self.serving.llm.tokenizer)
        return encoded(prompt, self.serving, special, "messages", must_fit=False)

    def _requests(self, prompt: str, constraints: Sequence[OutputRule | None]) -> list[EngineRequest]:
        body, llm = self.body, self.serving.llm
        check_fits(prompt, self.serving, "messages")
        self.prompt = self._encoded(prompt)
        usual = usual_limit(self.serving, len(self.prompt), llm.defaults.sampling.get("max_new_tokens"))
        self.most = body.max_completion_tokens or body.max_tokens or usual
        if self.clamps:
            self.most = min(self.most, max(1, room_of(self.serving, len(self.prompt))))
        requests = engine_requests(
            [self.prompt],
            body,
            self.serving,
            constraints,
            "messages",
            self.slot.caller,
            max_new_tokens=self.most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            prediction=self._prediction(),
            **({} if has_template(llm.tokenizer) else {"stop": self._stops()}),
        )
        if not self.tool_choice.offered:
            return requests
        # Text without special tokens would lack the marks by which the reader finds a call behind other text
        special = special_tokens(llm.tokenizer)
        signs = frozenset(special[sign] for sign in SIGNS if sign in special)
        return [replace(request, shown_special=signs) for request in requests]

    def _stops(self) -> list[str]:
        stop = self.body.stop
        return [*([stop] if isinstance(stop, str) else stop or ()), PLAIN_STOP]

    def _prediction(self) -> str | None:
        """Predicted text: the client's, else, where a call is forced, earlier calls of the same tools, the last one
        first. Names and keys are forced anyway, and values often repeat."""
        if self.body.prediction is not None:
            return self.body.prediction.text
        names = {tool.function.name for tool in self.tool_choice.forced}
        past = [
            self.format.call_text(call.function.name, arguments_of(call.function.arguments))
            for message in reversed(self.body.messages if names else [])
            for call in message.tool_calls or ()
            if call.function.name in names
        ]
        return "\n".join(past)[:4000] or None
