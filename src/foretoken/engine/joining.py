"""Setup of a request's state in the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from foretoken.core import Context, OptionError, Rng
from foretoken.core.context import CommittedTokens
from foretoken.core.noise import Noise, random_seed
from foretoken.core.processed import LogitsProcessor
from foretoken.core.sampling import Sampler
from foretoken.engine.conditional import LanguageRound, whole_params
from foretoken.engine.ends import dropped_ids, ends_of, rules_of
from foretoken.engine.processors import AllowedTokens, BadWords, MinTokens, OfAnswer
from foretoken.engine.request import Request, Running
from foretoken.engine.stopping import Stopper
from foretoken.models.base import LanguageModel
from foretoken.models.native.noise import noise_source


def stopper_of(request: Request, target: LanguageModel, tokenizer: Any | None) -> Stopper:
    """The request's stop rules. Raises ``ValueError`` for empty stop strings, or without a tokenizer."""
    ends = ends_of(request, target, tokenizer)
    return Stopper(
        ends.eos,
        request.stop,
        request.max_new_tokens,
        tokenizer,
        stop_ids=ends.stops,
        special_stops=ends.special_stops,
        special=ends.special,
        include=request.include_stop,
        dropped=dropped_ids(request, tokenizer),
        min_tokens=request.min_tokens,
    )


def join(request_id: int, request: Request, target: LanguageModel, tokenizer: Any | None, races: bool) -> Running:
    """A waiting request. With ``races``, draft and target share noise, so that the seed fixes the output."""
    tokens = CommittedTokens(request.prompt)
    seed = _seed(request)
    # A string of a language is drawn as a whole with one uniform, while noise belongs to tokens.
    noise = Noise(seed, noise_source()) if seed is not None and races and request.language is None else None
    params = request.params if request.language is None else whole_params(request.params)
    # An encoder's input is not part of the sequence that penalties and processors see.
    skipped = len(tokens) - len(target.answer_start) if target.answer_start else 0
    processors = [OfAnswer(processor, skipped) for processor in params.processors] if skipped else params.processors
    params = replace(params, processors=(*processors, *rules(request, target, tokenizer)))
    sampler = Sampler(params, len(tokens), noise, skipped)
    context = Context(request_id, tokens, len(tokens), sampler, Rng(seed or 0), prediction=request.prediction)
    context.max_length = len(tokens) + request.max_new_tokens
    context.salt = request.cache_salt
    context.rng.tests = [] if request.explain else None
    context.constraint = request.constraint
    context.protect()
    run = Running(request, context, stopper_of(request, target, tokenizer), seed=seed)
    if request.language is not None:
        ends = ends_of(request, target, tokenizer).ids
        run.language_round = LanguageRound(
            request.language, ends, request.params.temperature == 0, context.rng.uniforms(2)
        )
    run.stats.num_prompt_tokens = run.stats.num_prompt_tokens_computed = len(tokens)
    run.stats.note_target(target.describe())
    return run


def _seed(request: Request) -> int | None:
    """The request's seed, or a random one; none for a greedy request."""
    if request.params.temperature == 0:
        return None
    return random_seed() if request.seed is None else int(request.seed)


def rules(request: Request, target: LanguageModel, tokenizer: Any | None) -> list[LogitsProcessor]:
    """Logits processors of a request's fields outside its sampling parameters, in order of application.

    With a constraint, ``ignore_eos`` means to continue as long as the constraint allows.
    """
    processors: list[LogitsProcessor] = []
    ends = ends_of(request, target, tokenizer).ids
    if request.allowed_token_ids is not None:
        processors.append(AllowedTokens(request.allowed_token_ids, ends))
    if request.bad_words:
        processors.append(BadWords(request.bad_words))
    if request.constraint is not None:
        processors.append(OfAnswer(request.constraint.processor, len(request.prompt)))
    goes_on = request.ignore_eos and request.constraint is not None
    least = request.max_new_tokens if goes_on else request.min_tokens
    if least and ends:
        processors.append(MinTokens(ends, len(request.prompt), least))
    return processors


def check_rules(request: Request, target: LanguageModel, tokenizer: Any | None) -> None:
    """Raise ``OptionError`` if a request's rules leave no first token; later tokens are not known yet."""
    allowed = request.allowed_token_ids
    if allowed is not None and request.min_tokens and allowed <= ends_of(request, target, tokenizer).ids:
        raise OptionError(
            "allowed_token_ids",
            f"allowed_token_ids contains only end-of-text tokens, and min_tokens={request.min_tokens} forbids them",
        )
    if allowed is None and not request.bad_words:
        return
    scores = torch.zeros(1, target.vocab_size)
    ids = torch.tensor([list(request.prompt)])
    for rule in rules(request, target, tokenizer):
        scores = rule(ids, scores)
    if not bool((scores > -torch.inf).any()):
        option = "bad_words" if allowed is None else "allowed_token_ids"
        raise OptionError(option, f"{rules_of(request)} allow no first token")
