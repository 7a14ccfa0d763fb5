"""Mean squares of the inputs of linear layers on a short text, by which rounding to 4 bits weights its errors.

The error of an output is the sum of the errors of its weights, each times its input.  The inputs of real networks
differ in size by orders of magnitude, so a few weights make most of the error.  GPTQ (https://arxiv.org/abs/2210.17323)
weights errors by all second moments of the inputs; their diagonal, one vector for a layer, needs 48 tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.network.alone import alone
from foretoken.models.network.layers import replace_forward

FLOOR = 0.01
"""Least mean square, in units of the layer's mean: inputs that are zero on this text are not zero on others."""


@torch.no_grad()
def input_powers(model: Any, layers: Iterable[nn.Module], ids: Sequence[int]) -> dict[nn.Module, Tensor]:
    """[in] float32 for each of the ``layers`` that a forward over ``ids`` runs; none for an expert without tokens, nor
    for inputs that are not finite, as where a model made for bfloat16 runs in float16."""
    sums: dict[nn.Module, Tensor] = {}
    tokens = torch.tensor([list(ids)], device=model.device) % model.config.get_text_config().vocab_size
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with alone(model), ExitStack() as watched:
        for layer in layers:
            watched.callback(replace_forward(layer, _watching(layer, layer.forward, sums)))
        model(**inputs, use_cache=False)
    usable = {layer: power for layer, power in sums.items() if 0 < float(power.sum()) < inf}
    return {layer: power.add_(FLOOR * power.mean()) for layer, power in usable.items()}


def _watching(layer: nn.Module, forward: Callable[..., Any], sums: dict[nn.Module, Tensor]) -> Callable[..., Any]:
    """The forward of a layer that also adds up the squares of its inputs [..., in]."""

    def run(x: Tensor, *args: Any, **options: Any) -> Any:
        sums[layer] = sums.get(layer, 0) + x.reshape(-1, x.shape[-1]).float().square().sum(0)
        return forward(x, *args, **options)

    return run
