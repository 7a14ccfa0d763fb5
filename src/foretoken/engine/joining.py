"""From a request to what the engine keeps of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretoken.core import Context, Rng
from foretoken.core.noise import Noise, random_seed
from foretoken.engine.processors import MinTokens
from foretoken.engine.request import Request, Running
from foretoken.engine.stopping import Stopper
from foretoken.models.base import LanguageModel
from foretoken.sampling import Sampler, SamplingParams


def stopper_of(request: Request, target: LanguageModel, tokenizer: Any | None) -> Stopper:
    """What decides where the output ends.

    Raises:
        ValueError: stop strings that are empty, or without a tokenizer.
    """
    eos = frozenset() if request.ignore_eos else target.eos_token_ids
    stop_ids = request.stop_token_ids
    return Stopper(
        eos, request.stop, request.max_new_tokens, tokenizer, stop_ids=stop_ids, include=request.include_stop
    )


def join(request_id: int, request: Request, target: LanguageModel, tokenizer: Any | None, races: bool) -> Running:
    """A waiting request.

    Args:
        request_id: its number.
        request: what was asked.
        target: the model that answers.
        tokenizer: for stop strings.
        races: whether draft and target share noise, so that the seed fixes the text.
    """
    tokens = list(request.prompt)
    seed = _seed(request)
    noise = Noise(seed) if seed is not None and races else None
    sampler = Sampler(_params(request, target), len(tokens), noise)
    context = Context(request_id, tokens, len(tokens), sampler, Rng(seed or 0), prediction=request.prediction)
    context.max_length = len(tokens) + request.max_new_tokens
    context.salt = request.cache_salt
    context.rng.tests = [] if request.explain else None
    if request.constraint is not None:
        request.constraint.starts_at(len(tokens))
        context.forced = request.constraint.forced
    run = Running(request, context, stopper_of(request, target, tokenizer), seed=seed)
    run.stats.num_prompt_tokens = run.stats.num_prompt_tokens_computed = len(tokens)
    run.stats.note_target(target.describe())
    return run


def _seed(request: Request) -> int | None:
    """Given, or drawn; none for a greedy request."""
    if request.params.temperature == 0:
        return None
    return random_seed() if request.seed is None else request.seed


def _params(request: Request, target: LanguageModel) -> SamplingParams:
    """The request's sampling, with what its other fields ask of the logits."""
    extra: list[Any] = []
    if request.constraint is not None:
        extra.append(request.constraint.processor)
    if request.min_tokens:
        ends = request.stop_token_ids | target.eos_token_ids
        extra.append(MinTokens(ends, len(request.prompt), request.min_tokens))
    params = request.params
    return replace(params, processors=(*params.processors, *extra)) if extra else params
