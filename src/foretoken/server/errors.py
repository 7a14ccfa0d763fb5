"""Errors in the format of OpenAI's API: one nested object, whatever went wrong."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from foretoken.core import OptionError
from foretoken.engine.errors import DeadlineExceeded, Draining, EngineClosed, EngineDead, QueueFull, RequestFailed

FIELDS = {
    "max_new_tokens": "max_tokens",
    "include_stop": "include_stop_str_in_output",
    "constraint": "structured_outputs",
}
"""API names of request fields that have another name in the library."""
WRONG_KIND = {
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""Required type of a value, by pydantic's error type."""
LONGEST = 1000
"""Maximum length of a message in characters, whatever it quotes."""
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
Failed = Callable[[str], None]
"""Callback that counts an error answer by its reason."""
log = logging.getLogger("foretoken.server")


class ErrorBody(BaseModel):
    """Error details."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """Error response."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """Error details in Anthropic's format."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Error response of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer} for status in KINDS}
"""Error responses of every route."""
ANTHROPIC_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": AnthropicError} for status in KINDS}
"""Error responses of Anthropic's routes."""


class ApiError(Exception):
    """An error response.  ``message`` states in one sentence how to fix the request, ``param`` names the invalid field,
    and ``code`` is for programs.  ``counted`` is true once the metrics include it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        counted: bool = False,
    ) -> None:
        super().__init__(message)
        self.counted = counted
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str:
        """Label in the metrics."""
        return self.code or KINDS.get(self.status, "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        """JSON object in OpenAI's format."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message[:LONGEST], "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """JSON object in Anthropic's format."""
        kinds = KINDS | {413: "request_too_large", 500: "api_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message[:LONGEST]}}


def answered(error: ApiError, path: str, failed: Failed) -> JSONResponse:
    """Error response in the format of the request's API; ``failed`` is called for an API error that is not yet
    counted."""
    api = ("/v1/", "/tokenize", "/detokenize", "/tokenizer_info")  # errors of the page and of probes are not counted
    if not error.counted and any(part in path for part in api):
        failed(error.reason)
        error.counted = True
    return JSONResponse(error.anthropic_body if is_anthropic(path) else error.body, error.status, headers=error.headers)


def is_anthropic(path: str) -> bool:
    return path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error 400 for a request that cannot be served."""
    return ApiError(400, message, param=param, code=code)


def no_json(reason: str = "") -> ApiError:
    """Error 400 for an unreadable body; ``reason`` states the cause and the remedy."""
    return bad(f"the body is not valid JSON{': ' if reason else ''}{reason}", code="json_invalid")


def shutting_down() -> ApiError:
    """Error 503 while the server drains."""
    return ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})


def still_loading() -> ApiError:
    """Error 503 while the model is being loaded."""
    return ApiError(503, "the model is being loaded", code="loading", headers={"Retry-After": "2"})


def api_error(error: Exception) -> ApiError:
    """Error response for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        return ApiError(503, f"the server is busy: {error}; try again", code="queue_full", headers=wait)
    if isinstance(error, Draining | EngineClosed):
        return shutting_down()
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has stopped", code="engine_dead", headers={"Retry-After": "30"})
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, "the request exceeded its time limit", code="deadline_exceeded")
    if isinstance(error, RequestFailed) and error.reason == "out_of_memory":
        return ApiError(
            503, "out of memory: try again, or ask for less", code="out_of_memory", headers={"Retry-After": "1"}
        )
    if isinstance(error, RequestFailed) and error.reason == "contradiction":
        return bad(str(error), code="contradiction")
    if isinstance(error, OptionError):
        return bad(str(error), FIELDS.get(error.option, error.option), "invalid_value")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed inside the server; others are not affected", code="internal_error")


@contextmanager
def refusals_of_library() -> Iterator[None]:
    """Error 400 for a ``ValueError`` by which the library refuses a request in the block.  Anywhere else it is a bug of
    the server."""
    try:
        yield
    except OptionError:  # names its field
        raise
    except ValueError as error:
        raise bad(str(error)) from error


def _invalid(errors: Sequence[Any], request: Request) -> ApiError:
    """Error 400 for an invalid body in the API's terms, without class names or union alternatives."""
    errors, first = errors[:64], errors[0]
    field = path_of(first)
    if first["type"] == "json_invalid":
        return _unreadable(request)
    if not field:
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return bad("the body must be JSON, with the header Content-Type: application/json", code="content_type")
        return bad("the body must be a JSON object with the fields of this route", code="invalid_value")
    # A union has an error for each alternative; those for alternatives of another type are useless.
    of_field = [fault for fault in errors if str(fault["loc"][1:2]) == str(first["loc"][1:2])]
    deepest = max(len(path_of(fault)) for fault in of_field)
    relevant = [
        fault for fault in of_field if fault["type"] not in WRONG_KIND or len(path_of(fault)) == deepest > 1
    ] or of_field
    kinds = list(dict.fromkeys(WRONG_KIND[fault["type"]] for fault in relevant if fault["type"] in WRONG_KIND))
    chosen = relevant[0]
    is_kind = len(kinds) == len(relevant) or chosen["type"] in WRONG_KIND
    message = f"must be {' or '.join(kinds)}" if is_kind else wording_of(chosen)
    names = [part for part in path_of(chosen) if not part.isdigit()]
    return bad(f"{'.'.join(path_of(chosen))}: {message}", names[0] if names else None, "invalid_value")


def path_of(error: Any) -> list[str]:
    """Path of the error; names of alternatives ("list[constrained-str]") are internal and left out."""
    parts = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    types = ("str", "dict", "int", "float", "bool")  # alternatives whose names look like fields
    return [part for part in parts if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|\d+", part) and part not in types]


def wording_of(error: Any) -> str:
    """pydantic's message, reworded where it uses Python's terms."""
    kind, more = error["type"], error.get("ctx", {})
    wordings = {
        "missing": "is required",
        "too_long": f"may have {more.get('max_length')} items at most",
        "too_short": f"must have {more.get('min_length')} items at least",
        "string_too_long": f"may have {more.get('max_length')} characters at most",
        "string_too_short": f"must have {more.get('min_length')} characters at least",
        "string_pattern_mismatch": f"{str(error['input'])[:40]!r} does not match {more.get('pattern')}",
        "literal_error": f"must be {more.get('expected')}",
    }
    return wordings.get(kind) or str(error["msg"]).removeprefix("Value error, ").replace("Input should", "must")


def _unreadable(request: Request, cause: ValueError | None = None) -> ApiError:
    """Error 400 for a body that is not JSON, explained by the parser's exception and the headers."""
    packed = request.headers.get("content-encoding", "identity").strip()[:32]
    if isinstance(cause, UnicodeDecodeError) and cause.object.startswith(b"\x1f\x8b"):
        packed = "gzip"
    if packed.lower() != "identity":
        return no_json(f"it is compressed ({packed}): send it uncompressed")
    if isinstance(cause, UnicodeDecodeError):
        return no_json(f"byte {cause.start} is not UTF-8 text: send it in UTF-8")
    if cause is not None:  # Python's limit: parsing a longer number takes quadratic time
        return no_json(f"a whole number has more than {sys.get_int_max_str_digits()} digits")
    return no_json()


def _refused(request: Request, error: HTTPException) -> ApiError:
    """Our error for a refusal of the framework: an unknown route, or an unreadable body."""
    status, route = error.status_code, f"{request.method} {request.url.path[:200]}"
    if status == 404:
        return ApiError(404, f"{route} is not served: GET /openapi.json lists the routes", code="unknown_url")
    if status == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"{route} is not served: use {allowed}", code="wrong_method", headers=error.headers)
    if isinstance(error.__cause__, ValueError):
        return _unreadable(request, error.__cause__)
    message = str(error.detail) if error.detail else HTTPStatus(status).phrase
    return ApiError(status, message, headers=error.headers)


def install(app: FastAPI, failed: Failed) -> None:
    """Install handlers that answer and count refusals; other exceptions are the :class:`Gate`'s."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answered(_invalid(error.errors(), request), request.url.path, failed)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return answered(_refused(request, error), request.url.path, failed)

    @app.exception_handler(ApiError)
    async def api_failure(request: Request, error: ApiError) -> JSONResponse:
        return answered(error, request.url.path, failed)
