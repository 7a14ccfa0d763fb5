"""Additional input of a PARD-2 draft model: a projection of the target's states at the token before each token.

An et al. 2026 (arXiv 2605.08632).  Row t of the draft model reads ``embed(x_t) + scale * project(h_(t-1))``: h are
hidden states of several layers of the target side by side, zero before the first token; masks after the sequence read
the state of its last token.  Models are trained with and without the states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from foretoken.core import Context, HiddenStates
from foretoken.methods.drafters.growing import readable
from foretoken.methods.drafters.masked import MaskedReader
from foretoken.methods.drafters.narrowed import projected
from foretoken.methods.drafters.reading import UnreadStates
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.models.variants.conditioned import ConditionedModel

FILE = "warp_model.safetensors"
"""File of the projection beside a draft model: ``target_proj.weight`` [D, m D_target], perhaps ``target_proj.bias``
[D]."""
NAME = "target_proj"
SCALE = 0.02
"""Scale of the published models."""
LAYERS = (-1, -8, -16, -24)
"""Layers of the published models, as Transformers counts hidden states: 0 the embedding, -1 the output of the final
norm."""


@dataclass(frozen=True)
class StateProjection:
    """A projection of the target's hidden states to the draft model's width.

    Attributes:
        weight: [D, m D_target].
        bias: [D], or ``None``.
        scale: factor of the result that is added to an embedding.
        taps: names of m hidden states of the target, in concatenation order.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    taps: tuple[str, ...]

    @property
    def width(self) -> int:
        """D_target."""
        return self.weight.shape[1] // len(self.taps)

    def __call__(self, states: Tensor) -> Tensor:
        """[n, D] of concatenated states [n, m D_target]."""
        return F.linear(states.to(self.weight), self.weight, self.bias) * self.scale


def taps_of(layers: Sequence[int], num_layers: int) -> tuple[str, ...]:
    """Names of hidden states by Transformers' index: from 0, the embedding, to ``num_layers``, after the final norm, or
    a negative number from the end.

    Raises:
        ValueError: an index out of range.
    """
    names = []
    for layer in layers:
        depth = layer + num_layers + 1 if layer < 0 else layer
        if not 0 <= depth <= num_layers:
            raise ValueError(
                f"the target has hidden states 0 to {num_layers} (or -1 to {-num_layers - 1}), not {layer}"
            )
        names.append("last" if depth == num_layers else f"layer:{depth}")
    return tuple(names)


def projection_of(network: Any, target: LanguageModel) -> StateProjection | None:
    """The projection of a draft model: its module in training, else the file in its folder; ``None`` if it has none.

    Args:
        network: the draft model, whose configuration lists the states that it reads (``pard2_target_layers``,
            ``pard2_scale``).

    Raises:
        ValueError: a damaged file, or a projection of another target's states.
        CapabilityError: the target exposes no hidden states.
    """
    config = getattr(network, "config", None)
    projection = getattr(network, NAME, None)
    if projection is not None:
        tensors = {f"{NAME}.{name}": value.detach() for name, value in projection.named_parameters()}
    else:
        folder = str(getattr(config, "_name_or_path", "") or "")
        if not folder or not (Path(folder) / FILE).is_file():
            return None
        tensors = read_projection(Path(folder) / FILE)
    parts = TargetParts(target)
    layers = getattr(config, "pard2_target_layers", None) or LAYERS
    taps = taps_of([int(layer) for layer in layers], parts.num_layers)
    reference = next(network.parameters())
    dtype = reference.dtype if reference.is_floating_point() else torch.bfloat16
    weight, bias = tensors[f"{NAME}.weight"], tensors.get(f"{NAME}.bias")
    hidden = int(config.get_text_config().hidden_size)  # type: ignore[union-attr]
    if tuple(weight.shape) != (hidden, len(taps) * parts.hidden_size):
        raise ValueError(
            f"this draft model projects {weight.shape[1]} target state values, and this target has {len(taps)} "
            f"x {parts.hidden_size}: it was trained for another target; taps=false drafts without them"
        )
    return StateProjection(
        weight.to(reference.device, dtype),
        None if bias is None else bias.to(reference.device, dtype),
        float(getattr(config, "pard2_scale", SCALE)),
        taps,
    )


def read_projection(file: Path) -> dict[str, Tensor]:
    """The tensors of a projection's file.  Raises ``ValueError`` if it is damaged or holds none."""
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged or half-written: copy it again ({error})") from None
    weight = tensors.get(f"{NAME}.weight")
    if weight is None or weight.dim() != 2:
        raise ValueError(f"{file} holds no matrix {NAME}.weight, the projection of the target's states")
    return tensors


class TargetStates(MaskedReader):
    """Reads tokens for a draft model, each with the projected state of the token before it.

    Args:
        mask: id of the mask token.
        vocab_size: V of the target.

    Attributes:
        head: a vocabulary projection that replaces the draft model's, or ``None``.
    """

    skipped = 0

    def __init__(self, model: LanguageModel, projection: StateProjection, mask: int, vocab_size: int) -> None:
        self.model: Any = ConditionedModel(model)
        self.wanted, self.projection, self.mask, self.vocab_size = 1, projection, mask, vocab_size
        self.taps = tuple(dict.fromkeys(projection.taps))
        self.head: DraftHead | None = None

    def start(self, context: Context) -> None:
        """Store the prompt's states, with zeros before the first token."""
        nothing = self.projection.weight.new_zeros(1, self.projection.width)
        unread = context.state[self, "pending"] = UnreadStates(-1)
        unread.states.add(HiddenStates.of(dict.fromkeys(self.taps, nothing)))
        unread.add(context, self.taps)

    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        return self.projection(torch.cat([hidden[tap].to(self.projection.weight) for tap in self.projection.taps], -1))

    def tokens_of(self, context: Context) -> Sequence[int]:
        return readable(context.tokens, self.model.vocab_size, self.vocab_size)

    def mask_states(self, count: int, last: Tensor | None) -> Tensor:
        if last is None:
            raise ValueError("a mask must follow a token that was read")
        return last.expand(count, -1)

    def scored(self, feeds: Sequence[Feed]) -> list[Rows]:
        return projected(self.head, self.model.forward, feeds)
