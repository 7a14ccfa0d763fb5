"""From what a client sent to requests of the engine; whatever cannot be honoured is refused here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from foretoken.constraints import Constraint
from foretoken.engine.request import Request
from foretoken.options import make_request
from foretoken.server.errors import bad
from foretoken.server.schemas import REFUSED, ResponseFormat, Shared, StructuredOutputs
from foretoken.server.serving import Serving

GRAMMAR_S = 2.0
"""Seconds in which a grammar must be compiled."""


def check_fields(body: Shared, serving: Serving) -> dict[str, str]:
    """Refuse fields that mean something that cannot be had here; returns headers that name the unknown ones.

    Raises:
        ApiError: 400 or 404.
    """
    serving.check_model(body.model)
    for name in body.ignored:
        if name in REFUSED and (body.model_extra or {}).get(name) not in (None, False, [], {}):
            raise bad(f"{name} is not served: {REFUSED[name]}", name, "unsupported_parameter")
    if body.skip_special_tokens is False:
        raise bad("special tokens are never part of the text: ask for return_token_ids", "skip_special_tokens")
    if body.n is not None and body.n > 1 and not body.temperature and body.temperature is not None:
        raise bad("n above 1 needs a temperature above 0: all choices would be the same", "n")
    wanted = body.speculative
    if wanted is not None:
        _check_drafter(wanted.method, wanted.tree, serving)
    return serving.note_ignored(body.ignored)


def _check_drafter(method: str | None, tree: str | None, serving: Serving) -> None:
    drafter = serving.llm.drafter
    names = {"none", "auto"} if drafter is None else {"none", "auto", drafter.name, drafter.spec, *_members(drafter)}
    if method is not None and method not in names:
        known = ", ".join(sorted(name for name in names if name))
        raise bad(f"this server drafts with {known}: leave speculative.method out", "speculative")
    if tree is not None:
        raise bad("the tree belongs to the drafter that the server was started with", "speculative")


def _members(drafter: Any) -> list[str]:
    return [limits.name for limits in drafter.limits.members]


def engine_requests(
    prompts: Sequence[str | Sequence[int]],
    body: Shared,
    serving: Serving,
    constraints: Sequence[Constraint | None],
    **more: Any,
) -> list[Request]:
    """One request per prompt and choice, in order of their indices.

    Raises:
        ApiError: 400.
    """
    options = {**_options(body, serving), **more}
    seed, count = options.pop("seed", None), body.n or 1
    llm = serving.llm
    found: list[Request] = []
    for prompt in prompts:
        for choice in range(count):
            given = None if seed is None else (seed + choice) % 2**64
            made = make_request(
                prompt,
                llm.tokenizer,
                llm.target.eos_token_ids,
                **options,
                seed=given,
                constraint=constraints[len(found)],
            )
            llm.engine.check(made)
            found.append(made)
    return found


def _options(body: Shared, serving: Serving) -> dict[str, Any]:
    """Sampling and limits in our words; what was not said keeps OpenAI's defaults."""
    wanted = body.speculative
    plain = wanted is not None and (not wanted.enabled or wanted.method == "none")
    options: dict[str, Any] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": None if body.logit_bias is None else {int(k): float(v) for k, v in body.logit_bias.items()},
        "stop": body.stop,
        "include_stop": body.include_stop_str_in_output,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "min_tokens": body.min_tokens,
        "seed": None if body.seed is None else body.seed % 2**64,
        "allowed_token_ids": _known(body.allowed_token_ids, serving),
        "bad_words": body.bad_words,
        "priority": body.priority,
        "cache_salt": body.cache_salt or "",
        "deadline_s": serving.settings.request_timeout,
        "max_draft_tokens": 0 if plain else None if wanted is None else wanted.num_speculative_tokens,
        "explain": None if wanted is None else wanted.explain,
    }
    return {name: value for name, value in options.items() if value is not None}


def _known(ids: Sequence[int] | None, serving: Serving) -> Sequence[int] | None:
    """Ids of the vocabulary; others would be somebody else's memory."""
    wide = serving.llm.target.vocab_size
    for token in ids or ():
        if token >= wide:
            raise bad(f"token {token} is outside the vocabulary of {wide}", "allowed_token_ids")
    return ids


async def constraints_of(body: Shared, count: int, serving: Serving) -> list[Constraint | None]:
    """What the answers must look like, one for each choice.

    Raises:
        ApiError: 400 for a grammar that cannot be compiled, or not in time.
    """
    wanted = _wanted(body.response_format, body.structured_outputs)
    if wanted is None:
        return [None] * count
    kind, spec, param = wanted
    try:
        from foretoken.grammar import compile_constraint
    except ModuleNotFoundError:
        raise bad("structured output needs an extra: pip install 'foretoken[grammar]'", param) from None
    llm = serving.llm

    def compiled() -> list[Constraint | None]:
        return [compile_constraint(kind, spec, llm.tokenizer, llm.target.vocab_size) for _ in range(count)]

    try:
        return await asyncio.wait_for(asyncio.to_thread(compiled), GRAMMAR_S)
    except TimeoutError:
        raise bad("the grammar takes too long to compile: make it smaller", param, "grammar_too_complex") from None
    except ValueError as error:
        raise bad(str(error), param, "invalid_grammar") from None


def _wanted(form: ResponseFormat | None, structured: StructuredOutputs | None) -> tuple[str, Any, str] | None:
    """Kind, text and field of the one thing that is asked for."""
    if form is not None and form.type != "text":
        if structured is not None:
            raise bad("give response_format or structured_outputs, not both", "structured_outputs")
        if form.type == "json_object":
            return "json_object", None, "response_format"
        if form.json_schema is None:
            raise bad("response_format of type json_schema needs json_schema.schema", "response_format")
        return "json_schema", form.json_schema.schema_, "response_format"
    if structured is None:
        return None
    asked: dict[str, Any] = {
        "json_schema": structured.json_,
        "regex": structured.regex,
        "grammar": structured.grammar,
        "choice": structured.choice,
        "json_object": structured.json_object or None,
    }
    given = [(kind, value) for kind, value in asked.items() if value is not None]
    if len(given) != 1:
        raise bad(
            "structured_outputs needs exactly one of json, regex, grammar, choice, json_object", "structured_outputs"
        )
    kind, value = given[0]
    if kind == "choice":
        import re

        return "regex", "|".join(re.escape(one) for one in value), "structured_outputs"
    return kind, value, "structured_outputs"
