"""The check of every fast path: logits on ordinary text, judged by the model in the next wider precision.

A fast forward and the public one differ by rounding, which is large in 16 bits: on special tokens of real chat models,
whose activations are massive, the public bfloat16 forward itself is off by 17 % of the size of its logits.  So neither
forward is the reference.  The judge is the same network in float32 (float64 for a float32 model), widened one module at
a time, so that no second copy of the weights exists.  A path passes if its error is at most :data:`MOST` times the
public forward's own, plus :data:`ROUNDING`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.cache.masks import RowPlan, additive_masks
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.network.call import NetworkCall, Outputs

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network

Run = Callable[[NetworkCall], Outputs]
"""A forward, public or lean."""
MOST = 1.5
"""Maximum error, in units of the public forward's.  Two forwards that round in different places differ by up to 1.3."""
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Additional error, in standard deviations of a row of logits, that a sound path may have if the public forward happens
to have none."""
APART = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The same for a network that cannot be widened: its public forward, which also rounds, is then the judge."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def wider(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The next wider precision on a device; ``None`` if there is none."""
    wide = WIDER.get(dtype)
    return None if wide == torch.float64 and device.type == "mps" else wide


CHAIN = 16
"""Number of leading probe tokens that form a chain; the others branch."""
PARENTS = (*range(-1, CHAIN - 1), CHAIN - 1, CHAIN - 1, CHAIN, CHAIN, CHAIN + 1, CHAIN + 2, CHAIN + 3, CHAIN + 2)
NODES, TEXTS = len(PARENTS), 2
"""Tokens per probe text, and number of texts.  With one text, the tree has eight rows, whose errors vary so much that
the medians of two sound forwards were up to 1.7 apart (SmolLM2 with AVX2: one of 12 texts was refused, of six pairs
none)."""
ROWS = TEXTS * NODES
SENTENCE = (
    "The river runs past the old mill, and on Sundays the children stand on the bridge and count the boats.  When it "
    "rains they sit in the kitchen instead, where their grandmother bakes bread and tells them how the village looked "
    "before the railway came."
)
"""Probe text: ordinary words, long enough in any tokenizer."""


def ordinary_ids(vocab_size: int, count: int = ROWS) -> list[int]:
    """Ids spread over the vocabulary, without the special tokens at its ends."""
    low, high = vocab_size // 8, max(vocab_size - vocab_size // 8, vocab_size // 8 + 1)
    return [low + (7919 * (i + 1)) % (high - low) for i in range(count)]


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute in ``dtype`` inside the block: a module's weights are widened while it runs.

    Weights of a linear layer are widened slab by slab.

    Quantised layers multiply by their dequantised weights, in the same precision.
    """
    handles: list[Any] = []
    linear: list[nn.Module] = []
    parameters: dict[nn.Module, dict[str, Any]] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        parameters[module] = dict(module._parameters)
        for name, weight in parameters[module].items():
            if weight is not None and weight.is_floating_point():
                module._parameters[name] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        wide = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return tuple(wide), kwargs

    def after(module: nn.Module, *_: Any) -> None:
        module._parameters.update(parameters.pop(module, {}))

    for module in model.modules():
        if isinstance(module, nn.Embedding):  # the selected rows are widened, not the table
            handles.append(module.register_forward_hook(lambda _, __, out: out.to(dtype)))
        elif isinstance(module, QuantisedLinear):
            handles.append(module.register_forward_hook(_by_numbers(dtype)))
        elif type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_by_slabs, module, dtype)  # type: ignore[method-assign]
            linear.append(module)
        elif any(weight is not None for weight in module._parameters.values()):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in linear:
            del module.forward
        for module, weights in parameters.items():
            module._parameters.update(weights)


@contextmanager
def _without_kernels(model: nn.Module) -> Iterator[None]:
    """Inside the block, quantised layers multiply by their dequantised weights, in float32.

    If a kernel rounds activations to few bits, so does this: it is part of the computation.
    """
    quantised = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    handles = [module.register_forward_hook(_by_numbers(torch.float32, as_read=True)) for module in quantised]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_slabs(module: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """The layer in ``dtype``, in slabs of widened rows that fit the processor's cache."""
    # Slabs of 4 MiB take half as long as the whole weight (1.0 and 2.1 s at 1.5B).
    rows = max(1, (4 << 20) // (module.in_features * dtype.itemsize))
    slabs = module.weight.detach().split(rows)
    biases = [None] * len(slabs) if module.bias is None else module.bias.detach().to(dtype).split(rows)
    x = x.to(dtype)
    return torch.cat([F.linear(x, slab.to(dtype), bias) for slab, bias in zip(slabs, biases, strict=True)], -1)


def _by_numbers(dtype: torch.dtype, as_read: bool = False) -> Callable[[Any, Any, Tensor], Tensor]:
    """A hook that replaces a quantised layer's output by that of its dequantised weight."""

    def replaced(module: Any, args: Any, out: Tensor) -> Tensor:
        x = args[0]
        wide: Tensor = module.product.by_numbers(module.product.read(x) if as_read else x, dtype)
        return wide.to(x.dtype)

    return replaced


@torch.inference_mode()
def probe_logits(network: Network, run: Run, dtype: torch.dtype, ids: Sequence[int]) -> Tensor | None:
    """Float64 logits [48, V] of the texts, one after the other; ``None`` if the model cannot run or they are not
    finite."""
    try:
        texts = [_text_logits(network, run, dtype, ids[at : at + NODES]) for at in range(0, ROWS, NODES)]
    except RuntimeError:  # experts in a dtype that their kernel lacks: using the model raises it again
        return None
    logits = torch.cat(texts)
    return logits if bool(torch.isfinite(logits).all()) else None


def _text_logits(network: Network, run: Run, dtype: torch.dtype, ids: Sequence[int]) -> Tensor:
    """Float64 logits [24, V] of a chain that ends in a branching tree, with windows shorter than the chain."""
    depths: list[int] = []
    for parent in PARENTS:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    tokens = torch.tensor([list(ids)], device=network.device) % network.vocab_size
    # Windows of three tokens instead of thousands give layers of different types different masks.
    layers = {n: m if m.kind == "full" else replace(m, size=3) for n, m in network.layer_masks.items()}
    masks = additive_masks([RowPlan(0, PARENTS, depths, NODES)], layers, NODES, NODES, dtype, network.device)
    cache = TreeCache(network.depth, NODES)  # separate: another forward may store another dtype
    cache.plan(0, 1, [0], NODES, NODES)
    positions = torch.tensor([depths], device=network.device)
    return run(NetworkCall(cache, tokens, positions, masks, [(0, 0, NODES)], ()))[0][0].cpu().double()


@dataclass(frozen=True)
class Errors:
    """Median errors over rows of logits, in standard deviations of the row, of the chains and of the trees after
    them."""

    chain: float
    tree: float


@dataclass(frozen=True)
class Judge:
    """Logits of a model on the probe in a wider precision, and the errors of its public forward.

    Attributes:
        ids: the probe.
        truth: [48, V] float64 logits, on the CPU because not every device has float64.
        public: errors of the public forward.
        rounding: additional error allowed to a path, by dtype.
    """

    ids: Sequence[int]
    truth: Tensor
    public: Errors
    rounding: Mapping[torch.dtype, float]

    @classmethod
    def of(cls, network: Network, ids: Sequence[int]) -> Judge | None:
        """``None`` for a model that cannot run the probe; float64 models are their own judge."""
        with _without_kernels(network.model):
            logits = probe_logits(network, network.run_public, network.dtype, ids)
        if logits is None:
            return None
        wide, truth = wider(network.dtype, network.device), None
        if wide is not None:
            with widened(network.model, wide):
                truth = probe_logits(network, network.run_public, wide, ids)
        if truth is None:  # float64, or a kernel for one dtype only
            return cls(ids, logits, Errors(0.0, 0.0), APART)
        return cls(ids, truth, _errors(logits, truth), ROUNDING)

    def fault(self, network: Network, run: Run, dtype: torch.dtype, coarse: bool = False) -> str | None:
        """Description of what is wrong with a forward; ``None`` if it passes.

        Args:
            dtype: dtype of its hidden states.
            coarse: whether it multiplies in bfloat16 or by quantised weights, whatever the model's dtype.
        """
        logits = probe_logits(network, run, dtype, self.ids)
        if logits is None:
            return "it cannot be run, or its logits are not finite"
        # Only a public forward in bfloat16 shows the rounding of bfloat16 arithmetic.
        finer = network.dtype != torch.bfloat16
        rounding = APART[torch.bfloat16] if coarse and finer else self.rounding[network.dtype]
        errors = _errors(logits, self.truth)
        for kind in ("chain", "tree"):
            error, public = getattr(errors, kind), getattr(self.public, kind)
            if not error <= MOST * public + rounding:
                return f"its logits of a {kind} are off by {error:.2g}, those of the public forward by {public:.2g}"
        return None


def _errors(logits: Tensor, truth: Tensor) -> Errors:
    """The median ignores the few rows (special tokens, a changed expert) in which rounding itself is large."""
    rows = (logits - truth).square().mean(-1).sqrt() / truth.std(-1).clamp_min(1e-30)
    texts = rows.view(-1, NODES)
    return Errors(float(texts[:, :CHAIN].median()), float(texts[:, CHAIN:].median()))
