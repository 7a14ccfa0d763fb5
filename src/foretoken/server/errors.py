"""Errors as OpenAI's clients expect them: one nested object, whatever went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

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
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_KINDS = {413: "request_too_large", 500: "api_error"}
"""Where Anthropic's words are others."""
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
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


class AnthropicErrorBody(BaseModel):
    """What is wrong, in Anthropic's words."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Every answer of Anthropic's API that is not a success."""

    type: Literal["error"]
    error: AnthropicErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer} for status in KINDS}
"""What any route may answer besides."""
ANTHROPIC_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": AnthropicError} for status in KINDS}
"""The same for Anthropic's."""


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
    def anthropic_body(self) -> dict[str, Any]:
        """The same in the shape of Anthropic's API."""
        kind = ANTHROPIC_KINDS.get(self.status) or KINDS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message[:LONGEST]}}

    def response_to(self, path: str) -> JSONResponse:
        """The answer to a request of this path, in the shape of its API."""
        body = self.anthropic_body if is_anthropic(path) else self.body
        return JSONResponse(body, self.status, headers=self.headers)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path.endswith(ANTHROPIC_PATHS)


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


def install(app: FastAPI) -> None:
    """Let an app answer all errors so."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        if first["type"] == "json_invalid":
            return bad("the body is no valid JSON", code="json_invalid").response_to(request.url.path)
        names = [part for part in path if not part.isdigit()]
        message = str(first["msg"])
        wrong = bad(f"{'.'.join(path) or 'body'}: {message}", names[0] if names else None, "invalid_value")
        return wrong.response_to(request.url.path)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail) if error.detail else HTTPStatus(error.status_code).phrase
        return ApiError(error.status_code, message, headers=error.headers).response_to(request.url.path)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return error.response_to(request.url.path)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response_to(request.url.path)
