"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretoken.core.constraints import OutputRule
from foretoken.engine.background import Ticket
from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.output import Output, Piece
from foretoken.engine.request import Request as EngineRequest
from foretoken.server.answering import Answer, Gathered, explained, finish_reason
from foretoken.server.errors import RESPONSES, api_error, bad
from foretoken.server.inputs import check_fields, constraints_of, encoded, engine_requests, tenant_of
from foretoken.server.logprobs import Offsets, TokenTexts, completion_logprobs, prompt_logprobs
from foretoken.server.running import outputs_of, pieces_of
from foretoken.server.schemas import CompletionRequest
from foretoken.server.serving import Serving
from foretoken.server.sse import EventStream
from foretoken.server.workers import TEXTS, in_thread

router = APIRouter()


@router.post("/v1/completions", response_model=None, responses=RESPONSES)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue one or several prompts."""
    serving: Serving = http.app.state.serving
    headers = check_fields(body, serving)
    try:
        return await _Completions(serving, http, body).respond(headers)
    except Exception as error:
        raise api_error(error) from error


class _Completions:
    """One request.

    Attributes:
        prompts: token ids, one list per prompt.
        unwritten: whether only the prompt's own values are wanted (``max_tokens: 0``).
    """

    def __init__(self, serving: Serving, http: Request, body: CompletionRequest) -> None:
        self.serving, self.http, self.body = serving, http, body
        self.engine = serving.engine
        self.texts = TokenTexts(serving.llm.tokenizer, bool(body.return_tokens_as_token_ids))
        self._check()
        self.prompts: list[list[int]] = []
        self.unwritten = body.max_tokens == 0
        self.answer = Answer(serving, http, body, "text_completion")

    def _check(self) -> None:
        body = self.body
        if body.suffix:
            raise bad("this model cannot fill in the middle: leave suffix out", "suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad("best_of must be n: all choices are returned", "best_of")
        if body.max_tokens == 0 and not body.echo:
            raise bad("max_tokens 0 needs echo: there would be nothing to return", "max_tokens")
        if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
            raise bad("logprobs of a prompt are not streamed: leave stream out, or what asks for them", "stream")

    def _encoded(self) -> list[list[int]]:
        """Token ids of all prompts.

        Raises:
            ApiError: an empty one, an id outside the vocabulary, or text for a model without a tokenizer.
        """
        given = self.body.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        special = self.body.add_special_tokens is not False
        found = [encoded(one, self.serving, special, "prompt") if isinstance(one, str) else list(one) for one in given]
        wide = self.serving.llm.target.vocab_size
        for ids in found:
            if not ids:
                raise bad("a prompt is empty: give at least one token", "prompt")
            if max(ids) >= wide:
                raise bad(f"token {max(ids)} is outside the vocabulary of {wide}", "prompt")
        return found

    async def respond(self, headers: dict[str, str]) -> Response:
        """The answer, whole or streamed."""
        body = self.body
        several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        self.answer.check_room((len(body.prompt) if several else 1) * (body.n or 1))
        self.prompts = await in_thread(TEXTS, self._encoded, cost=self.answer.size)
        constraints = await constraints_of(body, len(self.prompts) * (body.n or 1), self.serving)
        tickets = self.answer.submit(await in_thread(TEXTS, lambda: self._requests(constraints), cost=self.answer.size))
        if body.stream:
            events = self.answer.logged(self._events(tickets))
            return EventStream(events, self.serving.settings.ping, self.serving.settings.stream_pad, headers)
        outputs = await self.answer.finished(outputs_of(self.engine, tickets, self.answer.saw))
        for index, output in enumerate(outputs):
            self.answer.note(index, output.stats, output.finish_reason, output.why)
        self.answer.log(200)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return JSONResponse(
            {**self.answer.head, "choices": choices, **self.answer.tail(self._written)}, headers=headers
        )

    def _requests(self, constraints: Sequence[OutputRule | None]) -> list[EngineRequest]:
        """What the engine is asked."""
        body = self.body
        tokens = 16 if body.max_tokens is None else max(body.max_tokens, 1)
        asked = [one for one in (body.logprobs if body.echo else None, body.prompt_logprobs) if one is not None]
        return engine_requests(
            self.prompts,
            body,
            self.serving,
            constraints,
            "prompt",
            tenant_of(self.http),
            max_new_tokens=tokens,
            logprobs=body.logprobs,
            prompt_logprobs=max(asked, default=None),
            prediction=None if body.prediction is None else body.prediction.text,
        )

    @property
    def _written(self) -> int | None:
        return 0 if self.unwritten else None

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        body, prompt = self.body, self.prompts[index // (self.body.n or 1)]
        ids = [] if self.unwritten else output.token_ids
        before = self._prompt_text(prompt) if body.echo else ""
        text = before + ("" if self.unwritten else output.text)
        found: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output, prompt, ids, len(before), len(text)),
            "finish_reason": "length" if self.unwritten else finish_reason(output.finish_reason),
            "stop_reason": None if self.unwritten else output.stop_reason,
        }
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.texts, body.prompt_logprobs)
        if body.return_token_ids:
            found |= {"token_ids": ids, "prompt_token_ids": prompt, "origins": output.origins[: len(ids)]}
        return found | explained(body, output, self.serving)

    def _logprobs(
        self, output: Output, prompt: Sequence[int], ids: Sequence[int], before: int, whole: int
    ) -> dict[str, Any] | None:
        """Values of a choice whose text begins with ``before`` characters of the prompt and has ``whole`` in all."""
        if self.body.logprobs is None:
            return None
        tokenizer = self.serving.llm.tokenizer
        found: list[TokenLogprobs | None] = [*(output.logprobs or ())][: len(ids)]
        offsets = Offsets(tokenizer, before).push(ids, whole)
        if self.body.echo:
            found = [*(output.prompt_logprobs or ()), *found]
            offsets = [*Offsets(tokenizer).push(prompt, before), *offsets]
            ids = [*prompt, *ids]
        return completion_logprobs(found, ids, self.texts, self.body.logprobs, offsets)

    def _prompt_text(self, ids: Sequence[int]) -> str:
        tokenizer = self.serving.llm.tokenizer
        return str(tokenizer.decode(list(ids), skip_special_tokens=True)) if tokenizer is not None else ""

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _events(self, tickets: Sequence[Ticket]) -> AsyncIterator[Any]:
        options = self.body.stream_options
        gathered = [Gathered(self.serving.settings.stream_interval) for _ in tickets]
        places = [_Place(self.serving.llm.tokenizer) for _ in tickets]
        if self.body.echo:
            for index in range(len(tickets)):
                text = self._prompt_text(self.prompts[index // (self.body.n or 1)])
                places[index] = _Place(self.serving.llm.tokenizer, len(text))
                yield self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None})
        async for index, piece in pieces_of(self.engine, tickets, self.answer.saw):
            if piece.stats is not None:
                self.answer.note(index, piece.stats, piece.finish_reason, piece.why)
            ready = gathered[index].push(piece)
            if ready is not None:
                chunk = self._chunk(self._delta(index, ready, places[index]))
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self.answer.tail()["usage"]
                yield chunk
        if options is not None and options.include_usage:
            yield {**self.answer.head, "choices": [], **self.answer.tail(self._written)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self.answer.head, "choices": [choice]}

    def _delta(self, index: int, piece: Piece, place: _Place) -> dict[str, Any]:
        body = self.body
        if self.unwritten:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason(piece.finish_reason)}
        values = None
        if body.logprobs is not None:
            offsets = place.after(piece)
            values = completion_logprobs(piece.logprobs, piece.token_ids, self.texts, body.logprobs, offsets)
        found: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": values,
            "finish_reason": finish_reason(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        if body.return_token_ids:
            found |= {"token_ids": piece.token_ids, "origins": piece.origins}
        return found | explained(body, piece, self.serving)


class _Place:
    """How far the text of a streamed choice is.

    Args:
        tokenizer: a Transformers tokenizer, or ``None``.
        sent: characters that are sent before the first token.
    """

    def __init__(self, tokenizer: Any | None, sent: int = 0) -> None:
        self._offsets, self._sent = Offsets(tokenizer, sent), sent

    def after(self, piece: Piece) -> list[int]:
        """Where the piece's tokens begin."""
        self._sent += len(piece.text)
        return self._offsets.push(piece.token_ids, self._sent)
