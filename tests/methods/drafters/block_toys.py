"""Random block networks over a tiny target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Context, Rng
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.blocks import BlockDrafter
from foretoken.methods.drafters.nets.block import BlockNet
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import llama

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def target(vocab: int = 32) -> HuggingFaceModel:
    return HuggingFaceModel(llama(vocab))


def shape_of(model: LanguageModel, **changes: Any) -> dict[str, Any]:
    parts = TargetParts(model)
    layer = asdict(LayerConfig.of_target(parts.config))
    return {**layer, "vocab_size": parts.vocab_size, "layers": 2, "taps": "1,2", "block": 4, "mask_token": 7, **changes}


def random_net(kind: type[BlockDrafter], model: LanguageModel, seed: int = 0, **changes: Any) -> Any:
    net = kind.net_class(kind.net_config(**shape_of(model, **changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return net.eval()


def drafter_of(kind: type[BlockDrafter], model: LanguageModel, net: BlockNet, **options: Any) -> Any:
    return kind.of(net, TargetParts(model), model, **options)


def started(
    drafter: BlockDrafter,
    model: LanguageModel,
    tokens: Sequence[int] = PROMPT,
    params: SamplingParams | None = None,
    seed: int = 0,
    noise: bool = False,
) -> Context:
    """A request whose prompt the target has read."""
    sampler = Sampler(params or SamplingParams(), len(tokens), Noise(seed) if noise else None)
    context = Context(0, list(tokens), len(tokens), sampler, Rng(seed))
    context.hidden = taps_of(model, tokens[:-1], drafter.taps)
    drafter.start(context)
    return context


def taps_of(model: LanguageModel, tokens: Sequence[int], taps: Sequence[str]) -> dict[str, Tensor]:
    sequence = model.open()
    states = model.prefill(sequence, tokens, taps)
    model.release(sequence)
    return states


@torch.no_grad()
def whole_pass(net: BlockNet, parts: TargetParts, context: Tensor, anchor: int, rows: int) -> Tensor:
    """States [rows, D] of a block behind places [n, D], written out: keys of the text, then those of the rows."""
    n = len(context)
    positions = torch.arange(n + rows)
    stored = [net.keys(context[None], positions[None, :n], layer) for layer in range(net.config.layers)]

    def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([stored[layer][0], key], 2), torch.cat([stored[layer][1], value], 2)

    masks = []
    for reach, causal in zip(net.config.reaches, net.config.causals, strict=True):
        mask = torch.zeros(1, 1, rows, n + rows)
        for row in range(rows):
            for place in range(n + rows):
                far = bool(reach) and abs(n + row - place) > reach
                if far or (causal and place > n + row):
                    mask[0, 0, row, place] = -torch.inf
        masks.append(mask)
    ids = torch.tensor([anchor] + [net.config.mask_token] * (rows - 1))
    x = net.embedded(ids, parts.embed.weight)
    states: Tensor = net(x[None], positions[None, n:], masks, keep)[0]
    return states
