"""Errors of requests to a running engine."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from foretoken.core import NonFiniteLogitsError
from foretoken.core.constraints import CannotGoOn
from foretoken.core.outside import OutsideError, is_outside, line_of
from foretoken.core.values import named, text_of
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.outside import ControllerError
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.outside import DrafterError
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.outside import VerifierError
from foretoken.models.machine import is_full_memory

Owner = tuple[type[Any], type[OutsideError]]
"""An outside class, and its protocol's error."""


class QueueFull(RuntimeError):
    """The queue is full; try again later.

    Attributes:
        retry_after_s: seconds after which to retry.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(RuntimeError):
    """The server is shutting down and takes no new requests."""


class EngineDead(RuntimeError):
    """The engine's thread has ended."""


class TargetGone(RuntimeError):
    """The target can no longer run, which ends the engine."""


class EngineClosed(EngineDead):
    """The engine was closed before the request ended."""


class DeadlineExceeded(RuntimeError):
    """A request's deadline passed before its first token."""


class RequestFailed(RuntimeError):
    """A request failed.

    Attributes:
        reason: ``"out_of_memory"`` (a retry may succeed), ``"contradiction"`` (no output can satisfy the request) or
            ``"error"``.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def as_error(error: BaseException) -> Exception:
    """The error, or one for an exit that code from outside called, which would end the engine for all requests.

    Raises it again if it ends the process by right: an interrupt, or an exit by a signal's handler or by code that is
    no drafter, verifier or controller from outside. An engine's own thread has no such code and no handlers.
    """
    if isinstance(error, Exception):
        return error
    is_by_thread = isinstance(error, SystemExit) and current_thread() is not main_thread()
    if _outside_frame(traceback.walk_tb(error.__traceback__)) is None and not is_by_thread:
        raise error
    return contained(error)


def contained(error: BaseException) -> Exception:
    """The error of a caller's function in the engine, or one for an exit or a cancellation in it. Raises it again if it
    is an interrupt or by a signal's handler."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt) or _is_by_signal(error):
        raise error
    is_exit = isinstance(error, SystemExit)
    message = f"it called exit({text_of(error)})" if is_exit else named(error)
    return RuntimeError(message).with_traceback(error.__traceback__)


def _is_by_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised an error. It runs on top of the code that it interrupts, so that the traceback
    shows that code as well."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(handler, "func", handler) for handler in handlers if callable(handler)]
    functions += [type(function).__call__ for function in functions]
    codes = {code for function in functions if (code := getattr(function, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def blamed(error: Exception) -> Exception:
    """The error, or one that names the outside class and line that raised it."""
    if isinstance(error, OutsideError | NonFiniteLogitsError | CannotGoOn) or is_full_memory(error):
        return error
    outside = _outside_frame(traceback.walk_tb(error.__traceback__))
    if outside is None:
        return _without_super(error) or error
    frames, (cls, kind) = outside
    blame = kind(f"{cls.__name__}.{_place(frames)} raised {named(error)}")
    blame.__cause__ = error
    return blame


def place_of(thread: Thread) -> str:
    """Where a thread is, as ``"Hang.propose (hang.py, line 10)"``: in a method of an outside class, else in the
    innermost function."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = list(traceback.walk_stack(frame))[::-1] if frame is not None else []
    outside = _outside_frame(frames)
    if outside is not None:
        frames, (cls, _) = outside
        return f"{cls.__name__}.{_place(frames)}"
    return _place(frames[-1:]) if frames else "no function"


def _place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """The function of the first frame, with the innermost line of its file."""
    code = frames[0][0].f_code
    line = [number for below, number in frames if below.f_code.co_filename == code.co_filename][-1]
    return f"{code.co_name} ({Path(code.co_filename).name}, line {line})"


@contextmanager
def blaming() -> Iterator[None]:
    """Raise what a class from outside raises, or an exit that it calls, as an error that names it and the line."""
    try:
        yield
    except BaseException as raised:
        blame = blamed(as_error(raised))
        if blame is raised:
            raise
        raise blame from raised


def _outside_frame(stack: Iterable[tuple[FrameType, int]]) -> tuple[list[tuple[FrameType, int]], Owner] | None:
    """The frames of a stack, outermost first, from the innermost method of an outside class on, and that class;
    ``None`` if there is none."""
    frames = list(stack)
    for index in range(len(frames) - 1, -1, -1):
        frame = frames[index][0]
        owner = _owner_of(frame.f_locals)
        if owner is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "foretoken":
            return frames[index:], owner
    return None


def _without_super(error: Exception) -> OutsideError | None:
    """An error for an attribute that a base class of ours sets and an outside object lacks; ``None`` for other
    errors."""
    owner = _owner_of({"self": error.obj}) if isinstance(error, AttributeError) else None
    if owner is None:
        return None
    cls, kind = owner
    blame = kind(
        f"{cls.__name__} ({line_of(cls)}) {text_of(error)}, which its base class sets: call super().__init__(...)"
    )
    blame.__cause__ = error
    return blame


def _owner_of(names: dict[str, Any]) -> Owner | None:
    """The outside class whose method runs in a frame with these names, and its protocol's error; ``None`` for other
    classes."""
    owner = names.get("self", names.get("cls"))
    kind = type(owner)  # not isinstance, which asks the object for its class: it may raise
    cls: type[Any] = owner if issubclass(kind, type) else kind  # type: ignore[assignment]
    protocols: dict[type[Any], type[OutsideError]] = {
        Drafter: DrafterError,
        Verifier: VerifierError,
        Controller: ControllerError,
    }
    errors = (error for protocol, error in protocols.items() if issubclass(cls, protocol) and is_outside(cls))
    return next(((cls, error) for error in errors), None)


def failure_of(error: Exception) -> RequestFailed:
    """The error that a client gets for an exception raised while its request was served."""
    if isinstance(error, CannotGoOn):
        return RequestFailed(str(error), "contradiction")
    reason = "out_of_memory" if is_full_memory(error) else "error"
    return RequestFailed(named(error), reason)
