"""What was found out about a model at load, and remembered: which fast paths pass, and whether bits depend on company.

A check costs up to two seconds at 1.5 billion parameters, so its result is kept, by the model's fingerprint, in the
file of this machine (:mod:`foretoken.models.machine`) for these versions.  Models whose modules were changed by hand
(a ``forward`` of their own, hooks, a class whose ``forward`` was replaced by another package's) are checked every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from foretoken.models.checks.bits import exactness_of
from foretoken.models.checks.judging import NODES, Judge, Run, ordinary_ids
from foretoken.models.machine import WORTH_KEEPING_S, KeptResults
from foretoken.models.network.own_code import constants_by_module, mark_of, numbers_by_module

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network
    from foretoken.models.huggingface import HuggingFaceModel

Probe = Callable[[], Sequence[int] | None]
"""Ids of an ordinary text in the model's own tokenizer; ``None`` where there is none."""
SAMPLED = 16
"""Numbers of every weight that a fingerprint looks at, spread over it."""


class Checks:
    """The checks of one model, which is about to be run and is on its public forward; ``probe`` gives its ordinary
    text."""

    def __init__(self, network: Network, probe: Probe | None) -> None:
        self.network, self.probe = network, probe
        self.key = fingerprint(network.model)
        self._is_slow = False

    @cached_property
    def ids(self) -> Sequence[int]:
        """The probe's ids, as many as it needs."""
        ordinary = ordinary_ids(self.network.vocab_size)
        text = list(self.probe() or ()) if self.probe is not None else []
        return [*text, *ordinary][: len(ordinary)]

    @cached_property
    def judge(self) -> Judge | None:
        """Made when the first check needs it, which must be before weights are laid out anew."""
        return Judge.of(self.network, self.ids)

    def fault(self, path: str, build: Callable[[], tuple[Run, torch.dtype, bool] | None]) -> str | None:
        """Why a fast path must not be used; ``None`` when it passes.

        Args:
            path: its name, with everything that makes it another one.
            build: makes its forward, the dtype of its hidden states, and whether it is coarse (:meth:`Judge.fault`);
                ``None`` where it cannot be made.
        """
        result = self._known_or_made(path, lambda: self._tried(build))
        return result[0] if result else None

    def _tried(self, build: Callable[[], tuple[Run, torch.dtype, bool] | None]) -> list[str]:
        judge = self.judge  # before anything is laid out anew
        if judge is None:
            return ["the public forward cannot be run on a short text, or its logits are not finite"]
        built = build()
        if built is None:
            return ["its modules are of a kind of their own"]
        reason = judge.fault(self.network, *built)
        return [] if reason is None else [reason]

    def exactness(self, path: str, runner: HuggingFaceModel) -> tuple[str, str]:
        """:func:`foretoken.models.checks.bits.exactness_of` the runner as it now runs, remembered."""
        path = f"bits {path} {torch.get_num_threads()} threads"
        kind, reason = self._known_or_made(path, lambda: list(exactness_of(runner, self.ids[:NODES])))
        return kind, reason

    def _known_or_made(self, path: str, make: Callable[[], list[str]]) -> list[str]:
        """A result, from this process, from the file, or made now."""
        if self.key is None:
            return make()
        name = f"{self.key} {path}"
        stored = KEPT.read(name)
        if isinstance(stored, list) and all(isinstance(line, str) for line in stored):
            self._is_slow |= name in KEPT.stored()
            return stored
        start_s = perf_counter()
        result = make()
        # Of a model with one slow check all results are kept: where the first path is remembered, its weights are laid
        # out without a judge, and what is checked after it would be judged by a network that computes in another way.
        self._is_slow |= perf_counter() - start_s >= WORTH_KEEPING_S
        KEPT.keep(name, result, self._is_slow)
        return result


def fingerprint(model: nn.Module) -> str | None:
    """What tells a network from others: its configuration, the kinds of its modules, what those compute with
    (:mod:`foretoken.models.network.own_code`), some numbers of every weight.

    ``None`` where that would not tell: a module has a ``forward`` of its own or hooks, or its class one from elsewhere.
    """
    digest = hashlib.blake2b(digest_size=12)
    marks = {kind: mark_of(kind) for kind in dict.fromkeys(map(type, model.modules()))}
    if None in marks.values():
        return None
    digest.update("\n".join(map(str, marks.values())).encode())
    for module, names in numbers_by_module(model.modules()):
        digest.update(repr([(name, vars(module)[name]) for name in names]).encode())
    for name, module in model.named_modules():
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return None
        digest.update(f"{name} {type(module).__module__} {type(module).__qualname__}\n".encode())
        product: Any = getattr(module, "product", None)
        if product is not None:  # quantised: its numbers are not among the parameters
            digest.update(f"{product.name} {product.shape} {getattr(product, 'mark', '')}\n".encode())
    constants: Any = [(n, m._buffers[n]) for m, names in constants_by_module(model.modules()) for n in sorted(names)]
    for name, weight in [*model.named_parameters(), *constants]:
        if weight is None:
            continue
        if type(weight) not in (torch.Tensor, nn.Parameter) or weight.is_meta:  # spread over processes, or elsewhere
            return None
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].cpu().double()
        digest.update(f"{name} {weight.dtype} {weight.device} {tuple(weight.shape)}".encode() + some.numpy().tobytes())
    config: Any = getattr(model, "config", None)
    digest.update(b"" if config is None else str(config.to_json_string(use_diff=False)).encode())
    return digest.hexdigest()


@cache
def _code() -> str:
    """Changes with the versions and with the files of this package, which change between two versions too."""
    files = sorted(Path(__file__).parents[1].rglob("*.[pc]*"))
    stats = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files if file.is_file()]
    text = "\n".join([torch.__version__, transformers.__version__, *stats])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


KEPT = KeptResults("checks", _code)
