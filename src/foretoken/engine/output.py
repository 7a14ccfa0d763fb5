"""Output of a request: whole, and as pieces of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.engine.ends import dropped_ids, special_tokens
from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.request import Emission, Origin, Running
from foretoken.engine.stats import SpecStats
from foretoken.engine.stopping import Detokenizer, FinishReason
from foretoken.engine.trace import RoundTrace


@dataclass
class Output:
    """One finished generation.

    Attributes:
        text: the new text, cut before a stop string, without special tokens.
        token_ids: the new tokens only.
        finish_reason: ``eos``, ``stop``, ``length`` or ``deadline``.
        stats: counts and times.
        origins: source of each token: an accepted draft token, recovered, bonus or plainly decoded.
        seed: the given or random seed of a sampled output; ``None`` for a greedy output. A coupled output (any with a
            seed, unless another verifier was named) is reproduced by this seed.
        stop_reason: the stop string or token id that ended it.
        logprobs: of the new tokens, if requested.
        prompt_logprobs: of the prompt's tokens, if requested; the first has none.
        rounds: a trace of each round, with ``explain=True``.
        why: the controller's reason for its last draft decision.
        note: one line for the user where the text shows nothing; empty otherwise.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: SpecStats
    origins: list[Origin] = field(default_factory=list)
    seed: int | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    rounds: list[RoundTrace] = field(default_factory=list)
    why: str = ""
    note: str = ""


@dataclass
class Piece:
    """A part of a stream: the output of one round.

    Attributes:
        text: new text that is certain (may be empty while a character is incomplete).
        token_ids: new tokens.
        accepted: per token, whether it was an accepted draft token.
        origins: source of each token.
        finish_reason, stats, seed, stop_reason, why, note: as in :class:`Output`, on the last piece.
        logprobs: of its tokens, if requested.
        rounds: trace of its round, with ``explain=True``.
        prompt_logprobs: as in :class:`Output`, on the first piece.
    """

    text: str
    token_ids: list[int]
    accepted: list[bool]
    origins: list[Origin]
    finish_reason: FinishReason | None = None
    stats: SpecStats | None = None
    seed: int | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: list[RoundTrace] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    why: str = ""
    note: str = ""


class Pieces:
    """Converts a request's emissions into pieces of text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer, self._sent = tokenizer, 0
        self._text: Detokenizer  # from the first round on, which names the request
        self._first = True

    def push(self, run: Running, emission: Emission) -> Piece:
        """The piece of one round."""
        if self._first:
            self._text = Detokenizer(self._tokenizer, dropped=dropped_ids(run.request, self._tokenizer))
        final = emission.finish_reason is not None
        self._text.push(emission.token_ids[:-1] if final and run.stopper.drops_last else emission.token_ids)
        prompt = run.prompt_logprobs if self._first and run.request.prompt_logprobs is not None else None
        self._first = False
        return Piece(
            self._certain(run, final),
            list(emission.token_ids),
            [origin == "accepted" for origin in emission.origins],
            list(emission.origins),
            emission.finish_reason,
            run.stats if final else None,
            run.seed if final else None,
            run.stopper.reason if final else None,
            list(emission.logprobs),
            list(emission.rounds),
            prompt,
            run.why if final else "",
            note_of(run, self._tokenizer, self._whole(run)) if final else "",
        )

    def _whole(self, run: Running) -> str:
        return self._text.text[: run.stopper.cut] + run.stopper.suffix

    def _certain(self, run: Running, final: bool) -> str:
        """New text; a possible beginning of a stop string is held back."""
        if final:
            self._text.flush()
            end = len(self._text.text) if run.stopper.cut is None else run.stopper.cut
        else:
            end = len(self._text.text) - max(0, run.stopper.held_back - 1)
        begin, self._sent = self._sent, max(end, self._sent)
        return self._text.text[begin : self._sent] + (run.stopper.suffix if final else "")


def output_of(run: Running, tokenizer: Any | None) -> Output:
    """The whole output of a finished request. Raises ``RuntimeError`` if it is not finished."""
    if run.finish_reason is None:
        raise RuntimeError("an unfinished request has no output")
    text = ""
    if tokenizer is not None:
        decoder = Detokenizer(tokenizer, dropped=dropped_ids(run.request, tokenizer))
        decoder.push(run.output[:-1] if run.stopper.drops_last else run.output)
        decoder.flush()
        text = decoder.text[: run.stopper.cut] + run.stopper.suffix
    return Output(
        text,
        run.output,
        run.finish_reason,
        run.stats,
        list(run.origins),
        run.seed,
        run.stopper.reason,
        run.logprobs if run.request.logprobs is not None else None,
        run.prompt_logprobs if run.request.prompt_logprobs is not None else None,
        run.rounds,
        run.why,
        note_of(run, tokenizer, text),
    )


def outputs_of(runs: Sequence[Running], tokenizer: Any | None) -> list[Output]:
    """The outputs of requests that ran together. Raises the first error of one, whose ``outputs`` are those of all,
    ``None`` for the requests that failed."""
    outputs = [None if run.error is not None else output_of(run, tokenizer) for run in runs]
    for error in [run.error for run in runs if run.error is not None]:
        error.__dict__["outputs"] = outputs
        raise error
    return [output for output in outputs if output is not None]


def note_of(run: Running, tokenizer: Any | None, text: str) -> str:
    """Why a finished text shows nothing; empty if it shows something, or without a tokenizer."""
    stopper, ids = run.stopper, run.output
    if run.finish_reason == "stop" and stopper.reason is not None:
        # a stop string, or a stop token, with nothing before it
        is_stop_first = stopper.cut is not None or stopper.drops_last or len(ids) == 1
        if is_stop_first and not text.strip() and not stopper.suffix:
            return f"the output began with its stop string or token, {stopper.reason!r}"
    ended_at_once = run.finish_reason == "eos" and len(ids) == 1
    if not ids or text.strip() or (tokenizer is None and not ended_at_once):
        return ""
    if run.finish_reason != "eos":
        return f"the whole output, {_count(ids, 'token')}, is white space or special tokens"
    when = "at once" if ended_at_once else f"after {_count(ids[:-1], 'blank token')}"
    token = ids[-1] if tokenizer is None else tokenizer.convert_ids_to_tokens(int(ids[-1]))
    note = f"the model ended its answer {when}, with {token}"
    if _lacks_template(run.request.prompt, tokenizer):
        note += ": the prompt was given without the model's chat template, which llm.chat and messages apply"
    return note


def _count(ids: Sequence[int], noun: str) -> str:
    return f"{len(ids)} {noun}{'' if len(ids) == 1 else 's'}"


def _lacks_template(prompt: Sequence[int], tokenizer: Any | None) -> bool:
    """Whether the chat template names special tokens and the prompt contains none of them."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    template_ids = (
        {token for text, token in special_tokens(tokenizer).items() if text in template} if template else set()
    )
    return bool(template_ids) and template_ids.isdisjoint(prompt)
