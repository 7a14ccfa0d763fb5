"""Request bodies.  Every number has bounds; unknown fields are ignored and listed in a header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    create_model,
    model_validator,
)

from foretoken.options import FIELDS

MOST_PROMPTS, MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 64, 8, 16, 256
MOST_LOGPROBS, MOST_BIASES, MOST_WORDS, MOST_IDS = 20, 300, 128, 4096
MOST_TOOLS = 128
LONGEST_TEXT = 2_000_000
BIG = 2**31 - 1


def encodable(text: Any) -> Any:
    """The text.  Raises ``ValueError`` if it is not valid Unicode, which can be neither tokenised nor sent back."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the text contains half a surrogate pair, which is not a character") from None
    return text


def sendable(value: Any) -> Any:
    """Free-form JSON.  Raises ``ValueError`` for what cannot be sent: half a surrogate pair, NaN, deep nesting."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text inside contains half a surrogate pair, which is not a character") from None
    except ValueError:
        raise ValueError("NaN and Infinity are no JSON") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    return value


def _number(value: Any) -> Any:
    """The value.  Raises ``ValueError`` for anything but a number, such as a numeric string or a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("the value must be a number")
    return value


Text = Annotated[StrictStr, Field(max_length=LONGEST_TEXT), BeforeValidator(encodable)]
Short = Annotated[StrictStr, Field(max_length=256), BeforeValidator(encodable)]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=LONGEST_STOP), BeforeValidator(encodable)]
ModelName = Annotated[StrictStr, Field(min_length=1, max_length=1024), BeforeValidator(encodable)]
FunctionName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
JsonObject = Annotated[dict[str, Any], AfterValidator(sendable)]
Id = Annotated[StrictInt, Field(ge=0, le=BIG)]
Ids = Annotated[list[Id], Field(max_length=LONGEST_TEXT, fail_fast=True)]  # else an error for each of 400,000 wrong ids


def _kind_of(value: Any) -> str | None:
    """Kind of a prompt, which its first element determines.

    A plain union would try every element as each kind and report all failures: a body of 1.5 MB took ten seconds and
    900 MB.
    """
    if isinstance(value, str):
        return "a text"
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], str):
        return "list of texts"
    return "list of lists" if isinstance(value[0], list) else "list of ids"


# The tags have spaces: unlike names of fields, they are left out of the path of an error
Prompt = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True), Tag("list of texts")]
    | Annotated[Ids, Field(min_length=1), Tag("list of ids")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True), Tag("list of lists")],
    Discriminator(
        _kind_of,
        custom_error_type="prompt_kind",
        custom_error_message="the prompt must be text, token ids, or a list of these, and not empty",
    ),
]


def _few_biases(value: Any) -> Any:
    """The biases, counted before any of them is validated."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} tokens may be biased, not {len(value)}")
    return value


def number(low: float, high: float, above: bool = False) -> Any:
    """Type of a finite number from ``low`` (excluded if ``above``) to ``high``."""
    lower = Gt(low) if above else Ge(low)
    return Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False), lower, Le(high)]


def count(low: int, high: int) -> Any:
    """Type of a whole number from ``low`` to ``high``."""
    return Annotated[StrictInt, Field(ge=low, le=high)]


def option(name: str) -> Any:
    """Type of a body's field for an option of :data:`foretoken.options.FIELDS`, or ``None``."""
    field = FIELDS[name]
    if field.served is None or field.kind not in (bool, int, float):
        raise LookupError(f"{name} is not an option of server requests")
    if field.kind is bool:
        return StrictBool | None
    low, high = field.served.low, field.served.high
    if field.kind is int:
        return count(int(low), BIG if math.isinf(high) else int(high)) | None
    return number(low, high, field.served.above) | None


class Body(BaseModel):
    """A JSON object; unknown names are kept apart."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    silent: ClassVar[frozenset[str]] = frozenset()
    """Names that clients send back unchanged, or that are documented to have no effect: they are not reported."""

    @property
    def ignored(self) -> list[str]:
        """Unknown names, followed by those inside other fields, as ``stream_options.name``."""
        return sorted(self.model_extra or {}) + sorted(set(self._inside()))

    def _inside(self) -> Iterator[str]:
        for field in type(self).model_fields:
            value = getattr(self, field)
            parts = value if isinstance(value, list) and value and isinstance(value[0], Body) else [value]
            for part in parts if isinstance(parts[0], Body) else ():
                yield from (f"{field}.{name}" for name in part._unknown())

    def _unknown(self) -> Iterator[str]:
        """Unknown names of an object inside another; empty values are skipped."""
        for name, value in (self.model_extra or {}).items():
            if name not in self.silent and value not in (None, [], {}):
                yield name
        yield from self._inside()


class ShownBody(Body):
    """An object that a template or the answer shows with its unknown names."""

    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(sendable)]] = Field(init=False)


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Speculative(Body):
    """Speculative decoding options of one request."""

    enabled: StrictBool = True
    method: Short | None = None
    num_speculative_tokens: count(0, 256) | None = None  # type: ignore[valid-type]
    tree: Short | None = None
    explain: StrictBool = False


class JsonSchema(Body):
    """OpenAI's wrapper around a schema."""

    name: Short = "answer"
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """Output constraint in vLLM's format: exactly one form, sampled token by token under a mask or as a whole."""

    json_: JsonObject | Text | StrictBool | None = Field(default=None, alias="json")
    regex: Text | None = None
    grammar: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MOST_WORDS)] | None = None
    json_object: StrictBool | None = None
    sampling: Literal["masked", "conditional"] = "masked"

    @property
    def forms(self) -> dict[str, Any]:
        """Requested constraints by their kind in :mod:`foretoken.server.grammar`; exactly one in a valid request."""
        kinds: dict[str, Any] = {
            "json_schema": self.json_,
            "regex": self.regex,
            "grammar": self.grammar,
            "choice": self.choice,
            "json_object": self.json_object or None,
        }
        return {kind: value for kind, value in kinds.items() if value is not None}


M = TypeVar("M", bound=type[BaseModel])


def with_options(model: M) -> M:
    """Give a body a field, ``None`` by default, for every option that the server takes unchanged."""
    fields: dict[str, Any] = {name: (option(name), None) for name, field in FIELDS.items() if field.served is not None}
    extended: Any = create_model(
        model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
    )
    return extended


@with_options
class CompletionBody(Body):
    """Fields that completions and chat completions share."""

    model: ModelName
    n: count(1, MOST_CHOICES) | None = None  # type: ignore[valid-type]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], number(-100, 100)],  # type: ignore[valid-type]
            Field(max_length=MOST_BIASES),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = None
    user: Short | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MOST_WORDS)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    allowed_token_ids: Annotated[list[Id], Field(min_length=1, max_length=MOST_IDS)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MOST_WORDS)] | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=256), BeforeValidator(encodable)] | None = None
    prompt_logprobs: count(0, MOST_LOGPROBS) | None = None  # type: ignore[valid-type]
    add_special_tokens: StrictBool | None = None
    speculative: Speculative | None = None
    timings: StrictBool | None = None


class Prediction(Body):
    """Predicted content of the answer."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(max_length=MOST_PROMPTS)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextPart(Body):
    """A part of a message: text or a refusal."""

    type: Annotated[StrictStr, Field(max_length=64)]
    text: Text = ""
    refusal: Text | None = None

    @model_validator(mode="after")
    def _check_text(self) -> TextPart:
        if self.type == "text" and "text" not in self.model_fields_set:
            raise ValueError("a part of type text needs its text in the field text")
        return self


class CompletionRequest(CompletionBody):
    """``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: count(0, BIG) | None = None  # type: ignore[valid-type]
    logprobs: count(0, MOST_LOGPROBS) | None = None  # type: ignore[valid-type]
    echo: StrictBool | None = None
    suffix: Text | None = None
    best_of: count(1, MOST_CHOICES) | None = None  # type: ignore[valid-type]
    prediction: Prediction | None = None


class CalledFunction(Body):
    """Name and arguments of a called function; a model may have written invalid arguments."""

    name: Short
    arguments: Text | dict[str, Any] | None = None


class ToolCall(Body):
    """A tool call that the model has made."""

    silent = frozenset({"index"})  # of a stream's deltas
    id: Short | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=256)] | None = None
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Short | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of the role {self.role} needs content")
        return self


class Function(ShownBody):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None


class Tool(ShownBody):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function

    def _unknown(self) -> Iterator[str]:
        """No names: a template gets the whole tool."""
        return iter(())


class ChatRequest(CompletionBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_completion_tokens: count(1, BIG) | None = None  # type: ignore[valid-type]
    max_tokens: count(1, BIG) | None = None  # type: ignore[valid-type]
    logprobs: StrictBool | None = None
    top_logprobs: count(0, MOST_LOGPROBS) | None = None  # type: ignore[valid-type]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | JsonObject | None = None
    parallel_tool_calls: StrictBool | None = None
    prediction: Prediction | None = None
    reasoning_effort: Short | None = None
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=16)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    modalities: Annotated[list[Short], Field(max_length=8)] | None = None


class TokenizeRequest(Body):
    """``POST /tokenize``: a text or a conversation."""

    model: Short | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=16)] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: Short | None = None
    tokens: Ids


Prediction.model_rebuild()
