"""Options of a generation, and the request made from them.

Requests, lines of batch jobs, command options, server bodies and model defaults are all derived from
:data:`foretoken.core.fields.FIELDS`. Heavy modules are imported with the first request, because the command line reads
the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from foretoken.core.fields import FIELDS as FIELDS
from foretoken.core.fields import FILTERS as FILTERS
from foretoken.core.fields import Field as Field
from foretoken.core.fields import Range as Range
from foretoken.core.names import did_you_mean
from foretoken.core.prompts import Prompt as Prompt
from foretoken.core.prompts import encode as encode
from foretoken.core.values import OptionError, check_text, ids_of, plain, texts_of, with_article

if TYPE_CHECKING:
    from foretoken.core.constraints import OutputRule
    from foretoken.core.processed import LogitsProcessor
    from foretoken.engine.request import Request

Prediction = str | Sequence[int]


OTHER_NAMES = {
    "max_tokens": "this is max_new_tokens here; ",
    "do_sample": "temperature above 0 samples; ",
    "num_return_sequences": "llm.generate and llm.chat take n; ",
    "n": "llm.generate and llm.chat take it; ",
    "tools": "llm.chat takes template_kwargs={'tools': [...]}; ",
    "system": 'a system prompt is a message {"role": "system", "content": ...}; ',
    "stop_strings": "this is stop here; ",
}
"""Hints for names from other libraries."""
COMMAND_LINE = tuple(name for name, field in FIELDS.items() if field.help)
"""Options of every command that generates."""


class CommonOptions(TypedDict, total=False):
    """Options of a generation that a batch of prompts shares.

    Attributes:
        max_new_tokens: most output tokens (64, or what the context leaves).
        temperature: 0 is greedy, the default.
        top_k: keep the k most likely tokens (0: all).
        top_p: nucleus mass in (0, 1].
        min_p: drop tokens below this fraction of the most likely one.
        repetition_penalty: > 1 discourages tokens of the prompt and output.
        presence_penalty: subtracted from tokens of the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to single tokens' logits.
        logits_processor: Transformers ``LogitsProcessor`` objects.
        stop: string or strings that end the text. The text of a special token, alone or within a string, means that
            token.
        include_stop: keep the stop string, or the text of the stop token, in the text.
        stop_token_ids: tokens that end the text.
        ignore_eos: continue after an end-of-text id.
        min_tokens: fewest output tokens: earlier end-of-text ids, stop tokens and stop strings have no effect. A
            complete constraint, or other rules that allow only an end, do end the text.
        allowed_token_ids: the only tokens allowed in the output, besides those that end it.
        bad_words: texts whose tokens, with and without a leading space, are forbidden in the output; other tokens may
            still spell them.
        constraint: a rule for the output (:mod:`foretoken.core.constraints`) that masks token by token, or a finite
            language from which a whole string is drawn.
        logprobs: report the log-probabilities of the output's tokens and of this many most likely ones.
        prompt_logprobs: the same for the prompt.
        max_draft_tokens: longest draft; 0 decodes plainly.
        drafter: name of the router member that drafts in every round.
        explain: keep a trace of every round.
        priority: in a queue, smaller numbers first.
        deadline_s: seconds after which the request ends with its present output.
        cache_salt: only requests with the same salt share cached sequences and learned drafts.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    logits_processor: Sequence[LogitsProcessor]
    stop: str | Sequence[str] | None
    include_stop: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    constraint: OutputRule | None
    logprobs: int | None
    prompt_logprobs: int | None
    max_draft_tokens: int | None
    drafter: str | None
    explain: bool
    priority: int
    deadline_s: float | None
    cache_salt: str


class Options(CommonOptions, total=False):
    """Options of one generation.

    Attributes:
        seed: fixes sampled output, whatever the drafts and the batch: it equals plain decoding with this seed, up to
            rounding. From 0 to 2**64 - 1.
        prediction: text or ids expected in the answer, for drafters that use it.
    """

    seed: int | None
    prediction: Prediction | None


class BatchOptions(CommonOptions, total=False):
    """Options of several generations: the same seed or prediction for all, or a list with one for each prompt."""

    seed: int | Sequence[int] | None
    prediction: Prediction | Sequence[Prediction | None] | None


def make_request(prompt: Prompt, tokenizer: Any | None, **options: Unpack[Options]) -> Request:
    """A checked request.

    Raises:
        OptionError: an option of a wrong type or out of range.
        ValueError: an invalid prompt, or text or messages without a tokenizer.
        TypeError: an unknown option.
    """
    from foretoken.core.constraints import FiniteLanguage
    from foretoken.core.sampling import SamplingParams
    from foretoken.engine.request import Request

    unknown = [name for name in options if name not in FIELDS]
    if unknown:
        hint = OTHER_NAMES.get(unknown[0]) or did_you_mean(unknown[0], list(FIELDS))
        raise TypeError(f"unknown option {unknown[0]!r}: {hint}use one of {', '.join(FIELDS)}")
    values: dict[str, Any] = dict(options)
    bias, allowed, stops = (values.get(name) for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"))
    rule = _rule(values.get("constraint"))
    if "seed" in values:
        values["seed"] = plain(values["seed"])
    as_given = {name: value for name, value in values.items() if FIELDS[name].kind is not None}
    params = SamplingParams(
        **{name: value for name, value in as_given.items() if FIELDS[name].sampling},
        logit_bias={} if bias is None else bias,
        processors=_processors(values.get("logits_processor")),
    )
    return Request(
        encode(prompt, tokenizer),
        params,
        stop=texts_of("stop", values.get("stop"), "stop string"),
        stop_token_ids=frozenset(ids_of("stop_token_ids", () if stops is None else stops)),
        allowed_token_ids=None if allowed is None else frozenset(ids_of("allowed_token_ids", allowed)),
        bad_words=_spelled(texts_of("bad_words", values.get("bad_words"), "word"), tokenizer),
        prediction=prediction_ids(values.get("prediction"), tokenizer),
        constraint=None if isinstance(rule, FiniteLanguage) else rule,
        language=rule if isinstance(rule, FiniteLanguage) else None,
        **{name: value for name, value in as_given.items() if not FIELDS[name].sampling},
    )


def beside(defaults: Mapping[str, Any], constraint: OutputRule | None) -> dict[str, Any]:
    """A model's defaults for a request with this constraint.

    A finite language ignores default filters, which would remove strings. A request that names filters is refused; one
    that does not need not know the model's defaults.
    """
    from foretoken.core.constraints import FiniteLanguage

    left_out = FILTERS if isinstance(constraint, FiniteLanguage) else ()
    return {name: value for name, value in defaults.items() if name not in left_out}


def reusable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for several requests: iterators, which the first request would exhaust, as tuples."""
    return {name: _reusable(value) for name, value in options.items()}


def _reusable(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterator) else value


def predictions_of(value: Any, count: int, single: bool) -> list[Any]:
    """One prediction per prompt: the given one for all, or a list unchanged. Raises ``OptionError`` for a wrong number
    of predictions.

    Args:
        value: text or ids; for several prompts also a list with one (or ``None``) for each.
        single: whether there is one prompt instead of a list.
    """
    value = _reusable(plain(value))
    several = isinstance(value, list | tuple) and len(value) > 0 and not isinstance(plain(value[0]), int)
    if single or not several:
        return [value] * count
    if len(value) != count:
        raise OptionError(
            "prediction", f"{len(value)} predictions for {count} prompts: give one for all, or one per prompt"
        )
    return [_reusable(each) for each in value]


def _rule(rule: Any) -> Any:
    from foretoken.core.constraints import FiniteLanguage

    if rule is None or isinstance(rule, FiniteLanguage) or hasattr(rule, "processor"):
        return rule
    raise OptionError(
        "constraint",
        "constraint must come from foretoken.server.grammar.compile_constraint or compile_language, not"
        f" {with_article(type(rule).__name__)}",
    )


def _processors(value: Any) -> tuple[LogitsProcessor, ...]:
    if value is None:
        return ()
    wrong: Any = value
    with suppress(TypeError):  # no list
        processors = tuple(value)
        wrong = next((processor for processor in processors if not callable(processor)), None)
        if wrong is None:
            return processors
    kind = with_article(type(wrong).__name__)
    raise OptionError("logits_processor", f"logits_processor must be a list of logits processors, not {kind}")


def _spelled(words: Sequence[str], tokenizer: Any | None) -> list[list[int]]:
    """Token ids of words, each with and without a leading space, as inside a text."""
    return [_ids(form, tokenizer, "bad_words") for word in words for form in (word, f" {word.lstrip()}")]


def prediction_ids(prediction: Prediction | None, tokenizer: Any | None) -> list[int] | None:
    """Token ids of a predicted text, without special tokens; ``None`` for an empty prediction."""
    if prediction is None:
        return None
    if not isinstance(prediction, str):
        ids = plain(prediction)
        return list(ids_of("prediction", [plain(token) for token in ids] if isinstance(ids, list) else ids)) or None
    check_text("prediction", prediction)
    return _ids(prediction, tokenizer, "prediction") or None


def _ids(text: str, tokenizer: Any | None, noun: str) -> list[int]:
    if tokenizer is None:
        raise ValueError(f"a text {noun} needs a tokenizer: pass tokenizer=... to load, or give token ids")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
