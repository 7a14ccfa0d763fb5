"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretoken.core.constraints import OutputRule
from foretoken.engine.background import Ticket
from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.output import Output, Piece
from foretoken.engine.request import Request as EngineRequest
from foretoken.server.answering import finish_reason
from foretoken.server.choices import Choices
from foretoken.server.errors import RESPONSES, bad
from foretoken.server.inputs import constraints_of, encoded, engine_requests, usual_limit
from foretoken.server.logprobs import Offsets, completion_logprobs, prompt_logprobs
from foretoken.server.schemas import CompletionRequest
from foretoken.server.serving import Serving
from foretoken.server.workers import TEXTS, in_thread

router = APIRouter()


@router.post("/v1/completions", response_model=None, responses=RESPONSES)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue one or several prompts."""
    return await _Completions.route(body, http)


class _Completions(Choices):
    """One request.

    Attributes:
        prompts: token ids, one list per prompt.
        unwritten: whether only the prompt's log-probabilities are requested (``max_tokens: 0``).
        offsets, sent: token offsets and number of characters sent, per streamed choice.
        untold: tokens whose text is held back, per streamed choice: id, log-probabilities, offset.
    """

    kind = "text_completion"
    body: CompletionRequest

    def __init__(self, serving: Serving, http: Request, body: CompletionRequest) -> None:
        super().__init__(serving, http, body)
        self._check()
        self.prompts: list[list[int]] = []
        self.unwritten = body.max_tokens == 0
        self.billed = 0 if self.unwritten else None
        self.offsets: list[Offsets] = []
        self.sent: list[int] = []
        self.untold: list[list[tuple[int, TokenLogprobs, int]]] = []

    def _check(self) -> None:
        body = self.body
        if body.suffix:
            raise bad("this model cannot fill in the middle: leave suffix out", "suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad("best_of must equal n: all choices are returned", "best_of")
        if body.max_tokens == 0 and not body.echo:
            raise bad("max_tokens 0 needs echo: nothing else is returned", "max_tokens")
        if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
            raise bad("logprobs of a prompt are not streamed: leave stream out, or what asks for them", "stream")

    def _encoded(self) -> list[list[int]]:
        """Token ids of all prompts.  Raises ``ApiError`` 400 for an empty prompt, an id outside of the vocabulary, and
        text for a model without a tokenizer."""
        inputs: Any = self.body.prompt
        if isinstance(inputs, str) or isinstance(inputs[0], int):
            inputs = [inputs]
        special = self.body.add_special_tokens is not False
        prompts = [
            encoded(text, self.serving, special, "prompt") if isinstance(text, str) else list(text) for text in inputs
        ]
        wide = self.serving.llm.target.vocab_size
        for ids in prompts:
            if not ids:
                raise bad("a prompt is empty: give at least one token", "prompt")
            if max(ids) >= wide:
                raise bad(f"token {max(ids)} is outside the vocabulary of {wide}", "prompt")
        return prompts

    async def start(self) -> Sequence[Ticket]:
        body, size = self.body, self.size
        several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        self.check_room((len(body.prompt) if several else 1) * (body.n or 1))
        self.prompts = await in_thread(TEXTS, self._encoded, cost=size)
        constraints = await constraints_of(body, len(self.prompts) * (body.n or 1), self.serving)
        return self.submit(await in_thread(TEXTS, lambda: self._requests(constraints), cost=size))

    def _requests(self, constraints: Sequence[OutputRule | None]) -> list[EngineRequest]:
        body = self.body
        tokens = body.max_tokens
        if tokens is None:
            tokens = usual_limit(self.serving, max(map(len, self.prompts)), 16)
        counts = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
        return engine_requests(
            self.prompts,
            body,
            self.serving,
            constraints,
            "prompt",
            self.slot.caller,
            max_new_tokens=max(tokens, 1),
            logprobs=body.logprobs,
            prompt_logprobs=max(counts, default=None),
            prediction=None if body.prediction is None else body.prediction.text,
        )

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        body, prompt = self.body, self._prompt(index)
        ids = [] if self.unwritten else output.token_ids
        before = self._prompt_text(prompt) if body.echo else ""
        text = before + ("" if self.unwritten else output.text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output, prompt, ids, len(before), len(text)),
            "finish_reason": "length" if self.unwritten else finish_reason(output.finish_reason),
            "stop_reason": None if self.unwritten else output.stop_reason,
        }
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.texts, body.prompt_logprobs)
        return choice | self.extras(ids, output, prompt_token_ids=prompt)

    def _logprobs(
        self, output: Output, prompt: Sequence[int], ids: Sequence[int], before: int, whole: int
    ) -> dict[str, Any] | None:
        """Log-probabilities of a choice whose text has ``whole`` characters, the first ``before`` of them from the
        prompt."""
        if self.body.logprobs is None:
            return None
        tokenizer = self.serving.llm.tokenizer
        values: list[TokenLogprobs | None] = [*(output.logprobs or ())][: len(ids)]
        offsets = [min(begin, whole) for begin in Offsets(tokenizer, before).push(ids)]
        if self.body.echo:
            values = [*(output.prompt_logprobs or ()), *values]
            offsets = [*(min(begin, before) for begin in Offsets(tokenizer).push(prompt)), *offsets]
            ids = [*prompt, *ids]
        return completion_logprobs(values, ids, self.texts, self.body.logprobs, offsets)

    def _prompt(self, index: int) -> list[int]:
        return self.prompts[index // (self.body.n or 1)]

    def _prompt_text(self, ids: Sequence[int]) -> str:
        tokenizer = self.serving.llm.tokenizer
        return str(tokenizer.decode(list(ids), skip_special_tokens=True)) if tokenizer is not None else ""

    def beginnings(self, count: int) -> Iterator[dict[str, Any]]:
        for index in range(count):
            text = self._prompt_text(self._prompt(index)) if self.body.echo else ""
            self.offsets.append(Offsets(self.serving.llm.tokenizer, len(text)))
            self.sent.append(len(text))
            self.untold.append([])
            if self.body.echo:
                yield {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        body = self.body
        if self.unwritten:  # the only token, which is not told, may be an end of text
            reason = None if piece.finish_reason is None else "length"
            return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
        return {
            "index": index,
            "text": piece.text,
            "logprobs": None if body.logprobs is None else self._values(index, piece, body.logprobs),
            "finish_reason": finish_reason(piece.finish_reason),
            "stop_reason": piece.stop_reason,
            **self.extras(piece.token_ids, piece),
        }

    def _values(self, index: int, piece: Piece, count: int) -> dict[str, Any]:
        """Log-probabilities of the tokens that begin in the text sent so far.

        The others wait for their text: a stop string that cuts it also changes their offsets.
        """
        begins = self.offsets[index].push(piece.token_ids)
        untold = [*self.untold[index], *zip(piece.token_ids, piece.logprobs, begins, strict=True)]
        self.sent[index] += len(piece.text)
        sent = self.sent[index]
        ready = sum(begin <= sent for _, _, begin in untold) if piece.finish_reason is None else len(untold)
        entries, self.untold[index] = untold[:ready], untold[ready:]
        offsets = [min(begin, sent) for _, _, begin in entries]
        return completion_logprobs(
            [entry[1] for entry in entries], [entry[0] for entry in entries], self.texts, count, offsets
        )
