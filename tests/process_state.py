"""What belongs to the whole process, and so to whoever imports foretoken: read, compared and put back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

LOGGERS = ("foretoken", "transformers", "huggingface_hub", "asyncio", "uvicorn")


def _module(name: str) -> Any:
    """A module that has been imported by somebody; nothing is imported here."""
    return sys.modules.get(name)


def _handler(number: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def write(handler: Any) -> None:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    return lambda: signal.getsignal(number), write


def _log(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    log = logging.getLogger(name)

    def write(state: Any) -> None:
        log.handlers[:], log.propagate, log.disabled = state[0], state[2], state[3]
        log.setLevel(state[1])

    # pytest's own handlers come and go with the phases of a test
    return lambda: (
        [handler for handler in log.handlers if "pytest" not in type(handler).__module__],
        log.level, log.propagate, log.disabled,
    ), write  # fmt: skip


def _read_bars() -> Any:
    shown = _module("transformers.utils.logging")
    return None if shown is None else shown.is_progress_bar_enabled()


def _write_bars(shown: Any) -> None:
    module = _module("transformers.utils.logging")
    module.enable_progress_bar() if shown else module.disable_progress_bar()


def _read_backend() -> Any:
    matplotlib = _module("matplotlib")
    name = None if matplotlib is None else dict.__getitem__(matplotlib.rcParams, "backend")
    return name.lower() if isinstance(name, str) else None  # "Agg" is "agg"; matplotlib may not have chosen one yet


def _write_backend(name: Any) -> None:
    dict.__setitem__(_module("matplotlib").rcParams, "backend", name)


def _read_optuna() -> Any:
    optuna = _module("optuna")
    return None if optuna is None else optuna.logging.get_verbosity()


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    **{f"the handler of {number.name}": _handler(number) for number in (signal.SIGINT, signal.SIGTERM)},
    **{f"the log {name}": _log(name) for name in LOGGERS},
    "PyTorch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "the precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the working directory": (os.getcwd, os.chdir),
    "sys.excepthook": (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    "threading.excepthook": (lambda: threading.excepthook, lambda hook: setattr(threading, "excepthook", hook)),
    "warnings.showwarning": (lambda: warnings.showwarning, lambda show: setattr(warnings, "showwarning", show)),
    "progress bars of Transformers": (_read_bars, _write_bars),
    "the backend of matplotlib": (_read_backend, _write_backend),
    "the log of optuna": (_read_optuna, lambda level: _module("optuna").logging.set_verbosity(level)),
}


def process_state() -> dict[str, Any]:
    """Every setting as it is; ``None`` where its package has not been imported."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def put_back(before: Mapping[str, Any]) -> list[str]:
    """Make everything what it was; what had changed, in words."""
    changed = []
    for name, (read, write) in SETTINGS.items():
        now = read()
        if now != before[name] and before[name] is not None:
            changed.append(f"{name}: {before[name]} became {now}")
            write(before[name])
    return changed
