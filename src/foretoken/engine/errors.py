"""What can go wrong with a request that was sent to a running engine."""

from __future__ import annotations

import torch

from foretoken.core.constraints import CannotGoOn


class QueueFull(RuntimeError):
    """As many requests wait as may; ask again later.

    Attributes:
        retry_after_s: seconds after which it may be worth it.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(RuntimeError):
    """No new requests are taken: the server is about to stop."""


class EngineDead(RuntimeError):
    """The engine's thread has ended."""


class TargetGone(RuntimeError):
    """The target cannot run anything any more, which ends the engine."""


class EngineClosed(EngineDead):
    """The engine was closed before the request had ended."""


class DeadlineExceeded(RuntimeError):
    """A request's time was up before it had a token."""


class RequestFailed(RuntimeError):
    """Something went wrong with this request.

    Attributes:
        reason: ``"out_of_memory"`` (it may work later), ``"contradiction"`` (what was asked for cannot be) or
            ``"error"``.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def is_full_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory left."""
    # PyTorch's allocator for the CPU raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def failure_of(error: Exception) -> RequestFailed:
    """What a sender is told of what was raised while its request was served."""
    if isinstance(error, CannotGoOn):
        return RequestFailed(str(error), "contradiction")
    reason = "out_of_memory" if is_full_memory(error) else "error"
    return RequestFailed(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, reason)
