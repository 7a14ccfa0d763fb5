"""Conversion of request bodies to engine requests; whatever cannot be honoured is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from foretoken.core.bos import ids_with_one_bos
from foretoken.core.constraints import OutputRule
from foretoken.engine.request import Request
from foretoken.options import FIELDS, beside, make_request
from foretoken.server.errors import ApiError, bad, path_of, refusals_of_library, wording_of
from foretoken.server.keys import Caller
from foretoken.server.refused_fields import OFF, REFUSED, REFUSED_FORMS
from foretoken.server.schemas import Body, ChatRequest, CompletionBody, ResponseFormat, StructuredOutputs
from foretoken.server.serving import Serving
from foretoken.server.workers import GRAMMARS, NotBegun, in_thread

PATIENCE_S = 0.3
"""Seconds that a new grammar waits for others; its own trial then takes at most 1.6 s."""
MOST_VALUES = 2**19
"""Log-probabilities of the prompts of a request: 64 prompts of 4,096 tokens, each with its most likely other."""


def check_fields(body: CompletionBody, serving: Serving) -> None:
    """Raise ``ApiError`` 400 or 404 for fields that this server cannot honour."""
    serving.check_model(body.model)
    refuse(body, REFUSED)
    if body.structured_outputs is not None:
        refuse(body.structured_outputs, REFUSED_FORMS, "structured_outputs")
    if body.skip_special_tokens is False:
        raise bad("special tokens are never part of the text: use return_token_ids", "skip_special_tokens")
    if body.n is not None and body.n > 1 and not _temperature(body, serving):
        raise bad("n above 1 needs a temperature above 0: all choices would be the same", "n")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options needs stream: true", "stream_options")
    speculative = body.speculative
    if speculative is not None:
        member_of(speculative.method, serving)
        if speculative.tree is not None:
            raise bad("the tree belongs to the drafter that the server was started with: leave it out", "speculative")


def refuse(body: Body, unserved: Mapping[str, str], field: str = "") -> None:
    """Raise ``ApiError`` 400, with the reason, for fields that are not served; ``field`` has the body, unless it is the
    request's."""
    for name, value in (body.model_extra or {}).items():
        if name in unserved and value and value != OFF.get(name):
            path = f"{field}.{name}" if field else name
            raise bad(f"{path} is not served: {unserved[name]}", field or name, "unsupported_parameter")


def chat_of(request: Mapping[str, Any]) -> ChatRequest:
    """Another API's request as a chat completion.  Raises ``ApiError`` 400 if it is beyond the limits of one: its own
    fields are valid, but a system prompt, tool results and calls are counted otherwise there."""
    try:
        return ChatRequest.model_validate(request)
    except ValidationError as error:
        first = error.errors()[0]
        path = path_of(first)
        message = f"{path[0]}: as a chat completion, {'.'.join(path)} {wording_of(first)}"
        raise bad(message, path[0], "invalid_value") from None


def member_of(method: str | None, serving: Serving) -> str | None:
    """Member of a group of drafters that a request names by its spec or the beginning of it; ``None`` for no choice.
    Raises ``ApiError`` 400 for an unknown method."""
    drafter = serving.llm.drafter
    spec = "none" if drafter is None else drafter.limits.name
    if method is None or method in ("none", "auto") or _begins(spec, method):
        return None
    members = [] if drafter is None else [limits.name for limits in drafter.limits.members]
    for name in members:
        if _begins(name, method):
            return name
    names = ", ".join(sorted({"none", "auto", spec, *members}))
    raise bad(f"speculative.method must be one of {names}: this server has no other drafter", "speculative")


def _begins(spec: str, method: str) -> bool:
    """Whether ``method`` names a spec: by its name, by name and path, or in full."""
    return spec == method or spec.startswith((f"{method},", f"{method}:"))


def encoded(text: str, serving: Serving, special: bool, field: str, must_fit: bool = True) -> list[int]:
    """Token ids of a text; two megabytes take a second, so call it in a thread.  Raises ``ApiError`` 400 without a
    tokenizer and, if the text ``must_fit``, for one beyond the context."""
    tokenizer = serving.llm.tokenizer
    if tokenizer is None:
        raise bad("this model has no tokenizer: give token ids", field)
    if must_fit:
        check_fits(text, serving, field)
    return ids_with_one_bos(text, tokenizer, special)


def check_fits(text: str, serving: Serving, field: str) -> None:
    """Raise ``ApiError`` 400, before tokenising, for a text that cannot fit into the context."""
    context, least = serving.llm.target.context_length, serving.lengths.least(text)
    if least > context:
        raise bad(
            f"the text has {len(text)} characters, at least {least} tokens, and the model's context is "
            f"{context}{_because(serving)}",
            field,
            "context_length_exceeded",
        )


def room_of(serving: Serving, prompt: int) -> int:
    """Maximum number of tokens after a prompt of ``prompt`` tokens, by the context and ``kv_memory``; 0 or less for
    none."""
    context_room = serving.llm.target.context_length - prompt
    cache_room = serving.llm.engine.requests.budget.room(prompt)
    return context_room if cache_room is None else min(context_room, cache_room)


def usual_limit(serving: Serving, longest: int, default: int | None) -> int:
    """Token limit of a request that sets none: the room after its longest prompt, at most its route's ``default`` and
    the server's.  At least one, so that a prompt without room is refused."""
    limits = [room_of(serving, longest), default, serving.settings.default_max_tokens or None]
    return max(1, min(limit for limit in limits if limit is not None))


def engine_requests(
    prompts: Sequence[Sequence[int]],
    body: CompletionBody,
    serving: Serving,
    constraints: Sequence[OutputRule | None],
    field: str,
    caller: Caller,
    **more: Any,
) -> list[Request]:
    """One request per prompt and choice, in order of their indices; many of them take a while.  Invalid ones are
    answered with 400.

    Args:
        constraints: one per prompt and choice.
        field: name of the prompts' field.
        more: options of :func:`foretoken.options.make_request`.
    """
    predicted = more.get("prediction")
    if predicted is not None:
        check_fits(predicted, serving, "prediction")
    defaults = beside(serving.llm.defaults.sampling, constraints[0] if constraints else None)
    options = {**_options(body, serving, caller.tenant, defaults), **more}
    if getattr(body, "min_tokens", None) is None and "min_tokens" in options:  # the model's, as generate applies it
        options["min_tokens"] = min(options["min_tokens"], options["max_new_tokens"])
    for prompt in prompts:
        _check_lengths(len(prompt), options, serving, body, field)
    if more.get("prompt_logprobs") is not None:
        _check_num_values(sum(map(len, prompts)) * (body.n or 1), 1 + more["prompt_logprobs"], body)
    seed, count = options.pop("seed", None), body.n or 1
    llm = serving.llm
    requests: list[Request] = []
    for prompt in prompts:
        for choice in range(count):
            choice_seed = None if seed is None else (seed + choice) % 2**64
            with refusals_of_library():
                bare = make_request(
                    prompt, llm.tokenizer, **options, seed=choice_seed, constraint=constraints[len(requests)]
                )
                request = replace(bare, owner=caller.name, owner_running=caller.running)
                llm.engine.check(request)
            requests.append(request)
    return requests


def _because(serving: Serving) -> str:
    """Reason for the context limit, in parentheses; empty if only the model's configuration sets it."""
    reason = serving.llm.target.context_why
    return f" ({reason})" if reason else ""


def _check_lengths(size: int, options: Mapping[str, Any], serving: Serving, body: CompletionBody, field: str) -> None:
    """Raise ``ApiError`` 400 naming the field at fault, which the engine does not know."""
    context, max_tokens = serving.llm.target.context_length, options["max_new_tokens"]
    limit = "max_tokens" if getattr(body, "max_tokens", None) is not None else "max_completion_tokens"
    if size >= context:
        raise bad(
            f"the prompt has {size} tokens and the model's context is {context}{_because(serving)}",
            field,
            "context_length_exceeded",
        )
    if size + max_tokens > context:
        raise bad(
            f"{limit} is {max_tokens}, but after a prompt of {size} tokens only {context - size} of the context's "
            f"{context} are left{_because(serving)}",
            limit,
            "context_length_exceeded",
        )
    room = room_of(serving, size)
    if max_tokens > room:
        memory = f"--kv-memory {serving.settings.kv_memory}"
        if room < 1:
            raise bad(f"the prompt has {size} tokens, too many for {memory}", field, "context_length_exceeded")
        raise bad(
            f"{limit} is {max_tokens}, but after a prompt of {size} tokens {memory} has room for {room}",
            limit,
            "context_length_exceeded",
        )
    if options.get("min_tokens", 0) > max_tokens:
        raise bad(f"min_tokens is {options['min_tokens']}, more than max_tokens, {max_tokens}", "min_tokens")


def _check_num_values(num_tokens: int, each: int, body: CompletionBody) -> None:
    """Raise ``ApiError`` 400 for too many log-probabilities of prompts; those of an answer come at the model's
    speed."""
    if num_tokens * each > MOST_VALUES:
        raise bad(
            f"{num_tokens} prompt tokens (with n) times {each} log-probabilities are {num_tokens * each}, more than "
            f"{MOST_VALUES} of one request: give fewer prompts or ask for fewer log-probabilities",
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )


def _options(body: CompletionBody, serving: Serving, tenant: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options and limits under the library's names; missing values are the model's (``defaults``), else
    OpenAI's."""
    speculative = body.speculative
    plain = speculative is not None and (not speculative.enabled or speculative.method == "none")
    options: dict[str, Any] = {
        **{name: _served(name, body, defaults) for name, field in FIELDS.items() if field.served is not None},
        "temperature": _temperature(body, serving),
        "logit_bias": _biases(body.logit_bias, serving),
        "stop": body.stop,
        "include_stop": body.include_stop_str_in_output,
        "stop_token_ids": _checked_ids(body.stop_token_ids, serving, "stop_token_ids"),
        "allowed_token_ids": _checked_ids(body.allowed_token_ids, serving, "allowed_token_ids"),
        "bad_words": body.bad_words,
        "cache_salt": f"{tenant}/{body.cache_salt or ''}" if tenant else body.cache_salt or "",
        "deadline_s": serving.settings.request_timeout,
        "max_draft_tokens": 0 if plain else None if speculative is None else speculative.num_speculative_tokens,
        "drafter": None if speculative is None or plain else member_of(speculative.method, serving),
        "explain": None if speculative is None else speculative.explain,
    }
    return {name: value for name, value in options.items() if value is not None}


def _served(name: str, body: CompletionBody, defaults: Mapping[str, Any]) -> Any:
    """Value of an option that the server takes unchanged, in the library's form: a ``top_k`` of -1 keeps all tokens,
    and a seed may be negative."""
    value = getattr(body, name)
    if value is None:
        return defaults.get(name)
    if name == "top_k":
        return max(value, 0)
    return value % 2**64 if name == "seed" else value


def _checked_ids(ids: Sequence[int] | None, serving: Serving, field: str) -> Sequence[int] | None:
    """The ids.  Raises ``ApiError`` 400 for ids outside of the vocabulary, which would address other memory."""
    wide = serving.llm.target.vocab_size
    for token in ids or ():
        if token >= wide:
            raise bad(f"token {token} is outside the vocabulary of {wide}", field)
    return ids


def _temperature(body: CompletionBody, serving: Serving) -> float:
    """The requested temperature, else the model's, else OpenAI's."""
    return float(_served("temperature", body, {"temperature": 1.0, **serving.llm.defaults.sampling}))


def _biases(biases: Mapping[str, float] | None, serving: Serving) -> dict[int, float] | None:
    if biases is None:
        return None
    _checked_ids([int(token) for token in biases], serving, "logit_bias")
    return {int(token): float(value) for token, value in biases.items()}


async def constraints_of(
    body: CompletionBody, count: int, serving: Serving, calls: str = "", schemas: Mapping[str, Any] | None = None
) -> list[OutputRule | None]:
    """Output constraints, one per choice.  Raises ``ApiError``: 400 for a grammar that does not compile, or not in
    time, 503 while others are being compiled.

    Args:
        calls: grammar of forced tool calls.
        schemas: its schemas, by path in the request; each is tried separately, for an error that names it.
    """
    rule = ("grammar", calls, "tools") if calls else _output_rule(body.response_format, body.structured_outputs)
    if rule is None:
        return [None] * count
    kind, spec, param = rule
    try:
        from foretoken.server.grammar import TrialBusy, checked_grammar, compile_constraint, compile_language
    except ModuleNotFoundError:
        raise bad("structured output needs an extra: pip install 'foretoken[grammar]'", param) from None
    llm = serving.llm
    as_a_whole = body.structured_outputs is not None and body.structured_outputs.sampling == "conditional"

    def compiled() -> list[OutputRule | None]:
        width, ends = llm.target.vocab_size, llm.target.eos_token_ids
        for label, schema in (schemas or {}).items():
            try:
                checked_grammar("json_schema", schema, PATIENCE_S)
            except ValueError as error:
                raise bad(f"{label}: {error}", param, "invalid_grammar") from None
        if as_a_whole:  # a language has no state, so one serves all choices
            return [compile_language(kind, spec, llm.tokenizer, width, PATIENCE_S, ends)] * count
        first = compile_constraint(kind, spec, llm.tokenizer, width, PATIENCE_S, ends)
        return [first, *(first.fresh() for _ in range(count - 1))]

    try:
        # Time limit for compiling a grammar; a language has one more second for listing its strings
        return await in_thread(GRAMMARS, compiled, 3.0 if as_a_whole else 2.0)
    except (TrialBusy, NotBegun):
        raise ApiError(
            503, "other grammars are being compiled: try again", code="grammars_queued", headers={"Retry-After": "2"}
        ) from None
    except TimeoutError:
        raise bad("the grammar takes too long to compile: make it smaller", param, "grammar_too_complex") from None
    except ValueError as error:
        # Each schema is valid by itself: the error would describe a grammar that the client has never seen
        together = "the schemas of these tools are too large together: force fewer or smaller tools"
        raise bad(together if calls else str(error), param, "invalid_grammar") from error


def _output_rule(form: ResponseFormat | None, structured: StructuredOutputs | None) -> tuple[str, Any, str] | None:
    """Kind, spec and field name of the requested constraint, if any."""
    forms = {} if structured is None else structured.forms
    if form is not None and form.type != "json_schema" and (form.json_schema or (form.model_extra or {}).get("schema")):
        raise bad(f"response_format of type {form.type} has no schema: use the type json_schema", "response_format")
    if form is not None and form.type != "text":
        if forms:
            raise bad("give response_format or structured_outputs, not both", "structured_outputs")
        if form.type == "json_object":
            return "json_object", None, "response_format"
        if form.json_schema is None:
            raise bad("response_format of type json_schema needs json_schema.schema", "response_format")
        return "json_schema", form.json_schema.schema_, "response_format"
    if structured is None:
        return None
    if len(forms) != 1:
        raise bad(
            "structured_outputs needs exactly one of json, regex, grammar, choice, json_object", "structured_outputs"
        )
    return *forms.popitem(), "structured_outputs"
