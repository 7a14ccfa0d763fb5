"""Errors as OpenAI's clients expect them: one nested object, whatever went wrong."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from foretoken.core import OptionError
from foretoken.engine.errors import DeadlineExceeded, Draining, EngineClosed, EngineDead, QueueFull, RequestFailed

FIELDS = {"max_new_tokens": "max_tokens", "include_stop": "include_stop_str_in_output"}
"""Fields of requests that are called otherwise in the library."""
LONGEST = 1000
"""Characters of a message: whatever it quotes, it stays short."""
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
log = logging.getLogger("foretoken.server")


class ErrorBody(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer} for status in KINDS}
"""What any route may answer besides."""


class ApiError(Exception):
    """An answer that is no success.

    Args:
        status: of HTTP.
        message: one sentence that says what to do.
        param: the field that is wrong.
        code: for programs.
        headers: more of them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message[:LONGEST], "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        return ApiError(503, f"the server is busy: {error}; try again", code="queue_full", headers=wait)
    if isinstance(error, Draining | EngineClosed):
        return ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has stopped", code="engine_dead", headers={"Retry-After": "30"})
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, "the request took longer than it may", code="deadline_exceeded")
    if isinstance(error, RequestFailed) and error.reason == "out_of_memory":
        return ApiError(
            503, "out of memory: try again, or ask for less", code="out_of_memory", headers={"Retry-After": "1"}
        )
    if isinstance(error, RequestFailed) and error.reason == "contradiction":
        return bad(str(error), code="contradiction")
    if isinstance(error, OptionError):
        return bad(str(error), FIELDS.get(error.option, error.option), "invalid_value")
    if isinstance(error, ValueError | TypeError) and not isinstance(error, RequestFailed):
        return bad(str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed inside the server; others are not affected", code="internal_error")


def _invalid(errors: Sequence[Any], content_type: str) -> ApiError:
    """What is wrong with a body, in words of the API: no class of ours, no alternative that it was compared with."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return bad("the body is no valid JSON", code="json_invalid")
    if not place:
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return bad("the body must be JSON, with the header Content-Type: application/json", code="content_type")
        return bad("the body must be a JSON object with the fields of this route", code="invalid_value")
    # A place in one of several alternatives names the alternative ("list[constrained-str]"), which is no field.
    named = [part for part in place if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|\d+", part)]
    of_field = [one for one in errors if [str(part) for part in one["loc"]][1:2] == place[:1]]
    deepest = max(of_field, key=lambda one: len(one["loc"])) if len(of_field) > 1 else first
    message = str(deepest["msg"]).removeprefix("Value error, ")
    names = [part for part in named if not part.isdigit()]
    return bad(f"{'.'.join(named)}: {message}", names[0] if names else None, "invalid_value")


def install(app: FastAPI) -> None:
    """Let an app answer all errors so."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors(), request.headers.get("content-type", "")).response

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail) if error.detail else HTTPStatus(error.status_code).phrase
        return ApiError(error.status_code, message, headers=error.headers).response

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response
