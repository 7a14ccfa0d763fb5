"""Stored results of the checks at load: fast paths that pass, and bitwise exactness.

A check takes up to two seconds at 1.5 billion parameters, so its result is stored in this machine's file
(:mod:`foretoken.models.machine`) by the model's fingerprint and the versions.  Models with manually changed modules (an
instance's own ``forward``, hooks, a class whose ``forward`` another package replaced) are checked every time.
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
"""Token ids of an ordinary text in the model's own tokenizer; ``None`` if there is none."""


def probe_ids(probe: Probe | None, vocab_size: int) -> list[int]:
    """As many ids as a check reads: those of the probe, then such as are spread over the vocabulary."""
    ordinary = ordinary_ids(vocab_size)
    tokens = list(probe() or ()) if probe is not None else []
    return [*tokens, *ordinary][: len(ordinary)]


class Checks:
    """The checks of one model, made while it uses its public forward; ``probe`` supplies ordinary text."""

    def __init__(self, network: Network, probe: Probe | None) -> None:
        self.network, self.probe = network, probe
        self.key = fingerprint(network.model)
        self._is_slow = False

    @cached_property
    def ids(self) -> Sequence[int]:
        """Token ids of the probe, cut to the required length."""
        return probe_ids(self.probe, self.network.vocab_size)

    @cached_property
    def judge(self) -> Judge | None:
        """Created by the first check, which must run before weights are repacked."""
        return Judge.of(self.network, self.ids)

    def fault(self, path: str, build: Callable[[], tuple[Run, torch.dtype, bool] | None]) -> str | None:
        """Reason why a fast path must not be used; ``None`` if it passes.

        Args:
            path: its name, including everything that distinguishes it from other paths.
            build: returns its forward, the dtype of its hidden states, and whether it is coarse (:meth:`Judge.fault`);
                ``None`` if it cannot be built.
        """
        result = self._known_or_made(path, lambda: self._tried(build))
        return result[0] if result else None

    def _tried(self, build: Callable[[], tuple[Run, torch.dtype, bool] | None]) -> list[str]:
        judge = self.judge  # before weights are repacked
        if judge is None:
            return ["the public forward cannot be run on a short text, or its logits are not finite"]
        built = build()
        if built is None:
            return ["its modules are of an unknown kind"]
        reason = judge.fault(self.network, *built)
        return [] if reason is None else [reason]

    def exactness(self, path: str, runner: HuggingFaceModel) -> tuple[str, str]:
        """:func:`foretoken.models.checks.bits.exactness_of` the runner in its present form, stored."""
        path = f"bits {path} {torch.get_num_threads()} threads"
        kind, reason = self._known_or_made(path, lambda: list(exactness_of(runner, self.ids[:NODES])))
        return kind, reason

    def _known_or_made(self, path: str, make: Callable[[], list[str]]) -> list[str]:
        """Result from this process, from the file, or computed now."""
        if self.key is None:
            return make()
        name = f"{self.key} {path}"
        stored = KEPT.read(name)
        if isinstance(stored, list) and all(isinstance(line, str) for line in stored):
            self._is_slow |= name in KEPT.stored()
            return stored
        start_s = perf_counter()
        result = make()
        # After one slow check, all results of the model are stored: if only the first path were stored, its weights
        # would be repacked without a judge, and later checks would be judged by a network that computes differently.
        self._is_slow |= perf_counter() - start_s >= WORTH_KEEPING_S
        KEPT.keep(name, result, self._is_slow)
        return result


def fingerprint(model: nn.Module) -> str | None:
    """Fingerprint of a network: its configuration, its module types and their code
    (:mod:`foretoken.models.network.own_code`), and some values of every weight.

    ``None`` if that is not enough: a module has its own ``forward`` or hooks, or its class has a foreign ``forward``.
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
        if product is not None:  # quantised: its values are not among the parameters
            digest.update(f"{product.name} {product.shape} {getattr(product, 'mark', '')}\n".encode())
    constants: Any = [(n, m._buffers[n]) for m, names in constants_by_module(model.modules()) for n in sorted(names)]
    for name, weight in [*model.named_parameters(), *constants]:
        if weight is None:
            continue
        if type(weight) not in (torch.Tensor, nn.Parameter) or weight.is_meta:  # distributed, or stored elsewhere
            return None
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // 16)][:16].cpu().double()
        digest.update(f"{name} {weight.dtype} {weight.device} {tuple(weight.shape)}".encode() + some.numpy().tobytes())
    config: Any = getattr(model, "config", None)
    digest.update(b"" if config is None else str(config.to_json_string(use_diff=False)).encode())
    return digest.hexdigest()


@cache
def code_version(package: Path = Path(__file__).parents[1]) -> str:
    """Hash of the versions and of this package's code, which may change between versions."""
    files = sorted(file for file in package.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    stats = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    text = "\n".join([torch.__version__, transformers.__version__, *stats])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


KEPT = KeptResults("checks", code_version)
