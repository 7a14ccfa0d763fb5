"""Capture and replay for Gated DeltaNet: the state of an accepted prefix without another forward.

The recurrence of such a layer needs only keys, values, decays and write strengths, a few kilobytes per token.  Recorded
during verification, they advance the checkpoint's state to any accepted prefix (Yang et al., "Gated Delta Networks",
equation 10):

    S = exp(g) S;   S = S + k (beta (v - k^T S))^T

A row with zero decay and write strength leaves the state unchanged, which hides padding after a sequence's rows.

Transformers' Gated DeltaNet models call two functions of their modeling file by name; both are wrapped during a
forward.  The function for several tokens pads them to chunks of 64, which suits prompts.  On a CPU, a verification of a
few tokens uses the single-token function of plain decoding instead.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CHUNKED, SINGLE = RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")

_lock = threading.Lock()
_wrapped: dict[ModuleType, tuple[int, dict[str, Callable[..., Any]]]] = {}
_thread = threading.local()


@dataclass(frozen=True)
class RecurrenceInputs:
    """Recurrence inputs of one layer in one forward over n tokens of b sequences.

    Attributes:
        key: [b, n, Hk, Dk].
        value: [b, n, Hv, Dv].
        decay: [b, n, Hv], as logarithms.
        strength: [b, n, Hv].
        normed: whether keys still have to be normalised to unit length.
    """

    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor
    normed: bool

    def of(self, row: int, count: int) -> RecurrenceInputs:
        """The first ``count`` tokens of one row."""
        at = slice(row, row + 1), slice(count)
        return RecurrenceInputs(self.key[at], self.value[at], self.decay[at], self.strength[at], self.normed)


def rule_files(model: nn.Module) -> list[ModuleType]:
    """The modeling files of ``model`` that define both functions."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [file for name in names if (file := sys.modules[name]) and all(hasattr(file, rule) for rule in RULES)]


@contextmanager
def recorded(files: Sequence[ModuleType], padding: Tensor | None = None) -> Iterator[list[RecurrenceInputs]]:
    """Record the recurrence inputs of this thread's forward inside the block, layer by layer.

    The recurrences ignore rows marked in ``padding`` [b, n].
    """
    tape: list[RecurrenceInputs] = []
    if not files:
        yield tape
        return
    _thread.tape, _thread.padding = tape, padding
    for file in files:
        _wrap(file)
    try:
        yield tape
    finally:
        _thread.tape = _thread.padding = None
        for file in files:
            _unwrap(file)


def _wrap(file: ModuleType) -> None:
    """Wrap the functions of a file, unless another thread already has."""
    with _lock:
        count, honest = _wrapped.get(file, (0, {}))
        if not count:
            honest = {name: getattr(file, name) for name in RULES}
            for name, rule in honest.items():
                setattr(file, name, _recording(rule, honest[SINGLE]))
        _wrapped[file] = (count + 1, honest)


def _unwrap(file: ModuleType) -> None:
    with _lock:
        count, honest = _wrapped.pop(file)
        if count > 1:
            _wrapped[file] = (count - 1, honest)
            return
        for name, rule in honest.items():
            setattr(file, name, rule)


def _recording(rule: Callable[..., Any], single: Callable[..., Any]) -> Callable[..., Any]:
    def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        tape = getattr(_thread, "tape", None)
        if tape is not None:
            if _thread.padding is not None:
                options |= {name: options[name].masked_fill(_thread.padding[..., None], 0) for name in ("g", "beta")}
            tape.append(
                RecurrenceInputs(
                    key, value, options["g"], options["beta"], options.get("use_qk_l2norm_in_kernel", False)
                )
            )
            # On a CPU the single-token rule is faster up to 8 tokens: 5 take a third of the time of a chunk.
            if key.shape[1] <= 8 and key.device.type == "cpu":
                return single(query, key, value, *args, **options)
        return rule(query, key, value, *args, **options)

    return call


def replay(state: Tensor, records: Sequence[RecurrenceInputs], count: int) -> None:
    """Advance a state [1, Hv, Dk, Dv] by ``count`` recorded tokens, in place."""
    flat = state.view(-1, *state.shape[-2:])
    for record in records:
        if count <= 0:
            return
        key, value, decay, strength = _prepared(record, count, state)
        for t in range(len(key)):
            flat.mul_(decay[t])
            change = torch.baddbmm(value[t], key[t].transpose(1, 2), flat, alpha=-1).mul_(strength[t])
            flat.baddbmm_(key[t], change)
        count -= len(key)


def _prepared(record: RecurrenceInputs, count: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first ``count`` tokens: keys [n, Hv, Dk, 1], values [n, Hv, 1, Dv], factors and strengths [n, Hv, 1, 1]."""
    key, value, decay, strength = (
        tensor[0, :count].to(state.dtype) for tensor in (record.key, record.value, record.decay, record.strength)
    )
    if record.normed:
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
    key = key.repeat_interleave(value.shape[1] // key.shape[1], dim=1)
    return key[..., None], value[..., None, :], decay.exp()[..., None, None], strength[..., None, None]
