"""LayerSkip training: layer dropout and an early-exit loss turn a target's first layers into a good drafter.

Elhoushi et al. 2024 (arXiv 2404.16710), sections 4.1 and 4.2.  There is no other network: the result is a target, and
``early_exit`` drafts with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.models.network.taps import decoder_layers
from foretoken.training.recipes.base import (
    LAYER_WINDOWS,
    Batch,
    TargetRecipe,
    check_labels,
    check_rank,
    cross_entropy,
    soft_cross_entropy,
    some_positions,
)


@dataclass(frozen=True)
class EarlyExitSettings:
    """Training settings.

    Attributes:
        layer: exit layer for drafting (0: a quarter of the layers).
        dropout: probability that the last layer is dropped for a text; smaller for lower layers, 0 for the first.
        scale: weight of the early exits: e_scale of the paper, or with ``exits="layer"`` the weight of that exit
            relative to the last layer's.
        exits: ``"all"`` (the paper's) or ``"layer"`` (only the drafting exit, in every step).
        every: rotational curriculum for ``exits="all"``: a step trains one in ``every`` early exits.
        labels: ``"text"`` (the paper's) or ``"target"`` (early exits learn the distribution of the last layer).
        rank: 0 trains all weights, a positive rank only a low-rank update of the decoder's linear layers.
    """

    num_layers: int
    layer: int = 0
    dropout: float = 0.1
    scale: float = 1.0
    exits: str = "all"
    every: int = 4
    labels: str = "text"
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1 or self.scale < 0 or self.every < 1:
            raise ValueError(
                "early_exit needs 0 <= dropout < 1, scale >= 0 and every >= 1, "
                f"not {self.dropout}, {self.scale} and {self.every}"
            )
        if not 0 <= self.layer < self.num_layers:
            raise ValueError(f"early_exit needs an exit layer from 1 to {self.num_layers - 1}, not {self.layer}")
        if self.exits not in ("all", "layer"):
            raise ValueError(f"exits must be all or layer, not {self.exits!r}")
        check_rank(self.rank, trains_target=True)
        check_labels(self.labels)

    @property
    def exit_layer(self) -> int:
        return self.layer or max(1, self.num_layers // 4)


class EarlyExitRecipe(TargetRecipe):
    """Trains the target itself; the same final norm and head read every exit."""

    drafter_class = EarlyExitDrafter
    config_class: ClassVar[type[Any]] = EarlyExitSettings
    fixed = ("num_layers",)
    needs = LAYER_WINDOWS
    config: EarlyExitSettings

    def from_target(self) -> dict[str, Any]:
        return {"num_layers": self.parts.num_layers}

    def spec(self, folder: object) -> str:
        """A spec without a folder: only the target is loaded."""
        return f"early_exit,layer={self.config.exit_layer}"

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return EarlyExitDrafter(self.target, self.config.exit_layer)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted sum over this step's exits and the last layer."""
        exits = self.exits(batch.step)
        last = self.config.num_layers
        names = [*(f"layer:{layer}" for layer in exits), "last"]
        keep = self.kept_layers(len(batch.tokens), generator)
        with dropped_layers(self.parts.network, keep):
            states = self.parts.features(batch.tokens[:, :-1], names, grad=True)
        rows, columns = some_positions(batch, 128 * len(batch.tokens), 0, generator)
        logits = self.parts.logits(states["last"][rows, columns])
        labels, counted = batch.tokens[rows, columns + 1], batch.counted(rows, columns)
        weights = self.weights(exits)
        total = weights[last] * cross_entropy(logits, labels, counted)
        distribution = torch.softmax(logits.detach().float(), -1)
        for layer in exits:
            early = self.parts.logits(self.parts.normed(states[f"layer:{layer}"][rows, columns]))
            part = (
                cross_entropy(early, labels, counted)
                if self.config.labels == "text"
                else soft_cross_entropy(early, distribution, counted)
            )
            total = total + weights[layer] * part
        return total

    def exits(self, step: int) -> list[int]:
        """Early exits trained in a step: one in every R layers, in rotation."""
        if self.config.exits == "layer":
            return [self.config.exit_layer]
        return [
            layer for layer in range(1, self.config.num_layers) if layer % self.config.every == step % self.config.every
        ]

    def weights(self, exits: list[int]) -> dict[int, float]:
        """Weights of a step's exits and of the last layer, by exit; they sum to 1."""
        last, scale = self.config.num_layers, self.config.scale
        if self.config.exits == "all":
            return exit_weights(last, scale, exits)
        return {**dict.fromkeys(exits, scale / (1 + scale)), last: 1 / (1 + scale)}

    def kept_layers(self, batch: int, generator: torch.Generator) -> Tensor:
        """Bool [layers, texts]: the layers that each text runs through."""
        rates = torch.tensor(dropout_rates(self.config.num_layers, self.config.dropout))
        return torch.rand(len(rates), batch, generator=generator) >= rates[:, None]


def dropout_rates(layers: int, highest: float) -> list[float]:
    """Dropout probability per layer: exponential from 0 to ``highest`` (S(t) = 1, as for finetuning)."""
    return [highest * (math.exp(layer * math.log(2) / max(1, layers - 1)) - 1) for layer in range(layers)]


def exit_weights(layers: int, scale: float, exits: list[int]) -> dict[int, float]:
    """Weight by exit (number of layers run; ``layers`` is the whole network), normalised over this step's exits.

    With l counted from 0, e(l) = scale * sum of 0..l before the last layer, and (L - 1) + scale * sum of 0..L-2 for it.
    """
    raw = {n: scale * (n - 1) * n / 2 for n in exits}
    raw[layers] = (layers - 1) + scale * (layers - 2) * (layers - 1) / 2
    total = sum(raw.values())
    return {n: weight / total for n, weight in raw.items()} if total else {n: float(n == layers) for n in raw}


@contextmanager
def dropped_layers(network: nn.Module, keep: Tensor) -> Iterator[None]:
    """Inside the block, layers pass on the states of texts that ``keep`` [layers, b] excludes unchanged."""
    handles = []
    for layer, mask in zip(decoder_layers(network), keep, strict=True):
        if not bool(mask.all()):
            handles.append(layer.register_forward_hook(_passing(mask), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _passing(mask: Tensor) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        before: Tensor = args[0] if args else kwargs["hidden_states"]
        after: Tensor = output[0] if isinstance(output, tuple) else output
        mixed = torch.where(mask.to(after.device)[:, None, None], after, before.to(after.dtype))
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    return hook
