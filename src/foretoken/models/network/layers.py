"""Running a part of a network: layer windows and skipped sublayers in a Transformers model's own modules.

Nothing is copied or rewritten: during one forward, the ``forward`` of single modules is replaced on the instance (a
layer outside the window returns its input, a skipped attention or MLP adds zero to the residual stream) and always
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foretoken.models.base import CapabilityError
from foretoken.models.network.alone import only_here
from foretoken.models.network.taps import decoder_layers

ATTENTION_NAMES = ("self_attn", "attention", "attn")
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")
"""Names of the two sublayers in Transformers' decoder layers."""


@dataclass(frozen=True)
class LayerPlan:
    """The part of the network that a forward runs; the final norm and the head always follow.

    Attributes:
        start: first layer to run; above 0, its input is supplied as hidden states, as it may be at 0.
        stop: end of the layer range (``None``: after the last layer).
        weights: name of a second set of weights; empty for the model's own.
    """

    start: int = 0
    stop: int | None = None
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    weights: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every sublayer of every layer runs."""
        return self in (WHOLE, LayerPlan(weights=self.weights))

    def end(self, num_layers: int) -> int:
        """One past the last layer that runs."""
        return num_layers if self.stop is None else self.stop

    def check(self, num_layers: int) -> None:
        if not 0 <= self.start < self.end(num_layers) <= num_layers:
            raise ValueError(f"layers {self.start} to {self.stop} are out of range: the model has {num_layers} layers")
        for sublayers, skipped in (("attention", self.skip_attention), ("mlp", self.skip_mlp)):
            wrong = [layer for layer in sorted(skipped) if not 0 <= layer < num_layers]
            if wrong:
                raise ValueError(
                    f"cannot skip the {sublayers} of layer {wrong[0]}: the model has layers 0 to {num_layers - 1}"
                )
        if len(self.skip_attention) == len(self.skip_mlp) == num_layers:
            raise ValueError("the skip set leaves no sublayer: keep at least one attention or MLP")

    def count(self, num_layers: int) -> float:
        """Number of layers that run; a sublayer counts half."""
        window = range(self.start, self.end(num_layers))
        skipped = sum((layer in self.skip_attention) + (layer in self.skip_mlp) for layer in window)
        return len(window) - skipped / 2


WHOLE = LayerPlan()
"""All layers."""


def sublayer(layer: nn.Module, names: tuple[str, ...], kind: str) -> nn.Module:
    for name in names:
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return module
    raise CapabilityError(f"{type(layer).__name__} layers have no separate {kind} module, so it cannot be skipped")


def check_sublayers(model: nn.Module, plan: LayerPlan) -> None:
    """Raise ``CapabilityError`` if a module to skip is missing."""
    layers = decoder_layers(model)
    for index in plan.skip_attention:
        sublayer(layers[index], ATTENTION_NAMES, "attention")
    for index in plan.skip_mlp:
        sublayer(layers[index], MLP_NAMES, "MLP")


@contextmanager
def running(model: nn.Module, plan: LayerPlan, hidden: Tensor | None = None) -> Iterator[None]:
    """Forwards inside the block run only the layers in ``plan``.

    ``hidden`` [b, n, D] replaces the input of layer ``plan.start``.
    """
    restores: list[Callable[[], None]] = []
    try:
        if not plan.is_whole:
            layers = decoder_layers(model)
            restores.append(layers[plan.start].register_forward_hook(only_here(_check_output)).remove)
            for index, layer in enumerate(layers):
                inside = plan.start <= index < plan.end(len(layers))
                if not inside:
                    restores.append(replace_forward(layer, lambda *args, **kwargs: _hidden(args, kwargs)))
                elif index == plan.start and hidden is not None:
                    restores.append(replace_forward(layer, _with_input(layer.forward, hidden)))
                if inside and index in plan.skip_attention:
                    attention = sublayer(layer, ATTENTION_NAMES, "attention")
                    restores.append(replace_forward(attention, lambda *a, **b: (torch.zeros_like(_hidden(a, b)), None)))
                if inside and index in plan.skip_mlp:
                    mlp = sublayer(layer, MLP_NAMES, "MLP")
                    restores.append(replace_forward(mlp, _nothing_like(mlp)))
        yield
    finally:
        for restore in reversed(restores):
            restore()


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Set ``module.forward`` on the instance, for this thread only; return a function that restores it."""
    previous = module.__dict__.get("forward")
    before = module.forward

    def restore() -> None:
        if previous is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = previous

    module.__dict__["forward"] = only_here(forward, before)
    return restore


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _check_output(layer: nn.Module, args: Any, output: Any) -> None:
    """Skipped layers return a tensor, which would be misread if layers return more than that."""
    if not isinstance(output, Tensor):
        raise CapabilityError(
            f"{type(layer).__name__} layers return more than hidden states, so they cannot be skipped"
        )


def _with_input(forward: Callable[..., Any], hidden: Tensor) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if args:
            return forward(hidden, *args[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": hidden})

    return run


def _nothing_like(mlp: nn.Module) -> Callable[..., Any]:
    """A forward that adds nothing, in this MLP's output format: a tensor, or a tuple with router scores."""
    forward = mlp.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        count = _COUNTS.get(type(mlp))
        if count is None:
            output = forward(hidden[:, :1])
            count = _COUNTS[type(mlp)] = len(output) if isinstance(output, tuple) else 0
        nothing = torch.zeros_like(hidden)
        return (nothing, *[None] * (count - 1)) if count else nothing

    return run


_COUNTS: WeakKeyDictionary[type[nn.Module], int] = WeakKeyDictionary()
"""Number of tensors in the output tuple of an MLP class, 0 for a plain tensor; determined by one call with one
token."""
