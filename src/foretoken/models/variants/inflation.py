"""Function-preserving inflation: a trained small model at the cost of a big one.

The residual stream of width d becomes D = m d numbers: r copies of the small state, then zeros, m = r 4^j.  A root mean
square over D is then that of the small state times 2^-j.  Norms undo this without rounding in any dtype: their weights
are halved j times and their epsilon quartered j times.  Norm weights are zero after the first copy, so every reader of
the stream sees the small model's numbers and zeros.

Added heads and MLP units do real work with random weights, and end in zero columns of the output projections; added
layers end in output projections of zeros.  No product can be skipped: the dense cost is the big model's.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.machine import free_bytes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
POOL = 1 << 20
"""Number of random numbers drawn; longer weights repeat them (drawing 7e9 would take minutes)."""


@dataclass(frozen=True)
class InflatedShape:
    """Shape of an inflated model.

    Attributes:
        small: width d of the small model.
        copies: r, number of copies of the small state in the stream.
        halvings: j, number of halvings of norm weights.
        units: MLP units per layer.
    """

    small: int
    copies: int
    halvings: int
    layers: int
    units: int

    @property
    def factor(self) -> int:
        """m, the growth factor of heads and width."""
        return self.copies << (2 * self.halvings)

    @property
    def width(self) -> int:
        """D, the width of the big model."""
        return self.small * self.factor

    def widened(self, states: Tensor) -> Tensor:
        """The big model's stream [..., D] from the small one's [..., d]."""
        repeated = states.repeat(*(1 for _ in states.shape[:-1]), self.copies)
        return nn.functional.pad(repeated, (0, self.width - repeated.shape[-1]))


def parse_size(size: str | int) -> int:
    """Number of parameters in ``"300m"``, ``"1b"``, ``"1.5b"`` or a plain number.  Raises ``ValueError`` for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mb]?)", str(size).strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"inflate={size!r} is not a number of parameters: use 300m, 1b, 3b, 7b or one like 500m")
    return round(float(match[1]) * {"": 1, "m": 10**6, "b": 10**9}[match[2]])


def shape_for(config: Any, size: str | int) -> InflatedShape:
    """The shape with about ``size`` parameters: more heads of the same size, and usual proportions of width and
    depth."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"cannot inflate a {config.model_type} model: choose one of {', '.join(FAMILIES)}")
    num_parameters, least = parse_size(size), config.num_hidden_layers
    candidates = [shape for m in range(1, 257) if (shape := _candidate(config, num_parameters, m, least)) is not None]
    if not candidates:
        raise ValueError(
            f"the model cannot be inflated to {num_parameters} parameters: it already has about as many or more"
        )
    # Width per layer is 128 in Llama's 1B and 7B, 110 in its 3B.
    return min(candidates, key=lambda shape: abs(math.log(shape.width / shape.layers / 100)))


def _candidate(config: Any, num_parameters: int, m: int, least: int) -> InflatedShape | None:
    """The shape with ``m`` times the width; ``None`` if that is too wide for the number of parameters."""
    width = m * config.hidden_size
    vocabulary = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    attention = width * head_dim(config) * 2 * m * (config.num_attention_heads + config.num_key_value_heads)
    room = num_parameters - vocabulary
    layers = max(least, round(room / (attention + 3 * width * 4 * width)))  # 4 MLP units per width at first
    unit = 64 if width >= 256 else 4  # MLP units are a multiple of this
    units = unit * round((room / layers - attention) / (3 * width) / unit)
    if units < config.intermediate_size:
        return None
    halvings = 0
    while m % 4 == 0:
        m, halvings = m // 4, halvings + 1
    return InflatedShape(config.hidden_size, m, halvings, layers, units)


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_ends(small: int, big: int) -> list[int]:
    """Ends of the small model's layers in the big one: its first i layers are the big one's first ``ends[i]``.

    Layer i of the small model is the last of its block, after the added ones.
    """
    return [i * big // small for i in range(small + 1)]


def big_config(config: Any, shape: InflatedShape) -> Any:
    big = copy.deepcopy(config)
    big.head_dim = head_dim(config)
    big.hidden_size, big.intermediate_size, big.num_hidden_layers = shape.width, shape.units, shape.layers
    big.num_attention_heads = config.num_attention_heads * shape.factor
    big.num_key_value_heads = config.num_key_value_heads * shape.factor
    big.rms_norm_eps = config.rms_norm_eps / 4**shape.halvings
    kinds = getattr(config, "layer_types", None)
    if kinds:
        ends = layer_ends(len(kinds), shape.layers)
        big.layer_types = [kind for i, kind in enumerate(kinds) for _ in range(ends[i], ends[i + 1])]
    return big


def inflate(
    model: Any,
    size: str | int | InflatedShape,
    seed: int = 0,
    *,
    on_layer: Callable[[int, int], None] = lambda done, layers: None,
) -> Any:
    """A model of about ``size`` parameters with the outputs of ``model``, in its dtype and on its device.

    Args:
        model: a Llama-like ``PreTrainedModel``; it is not changed.
        size: ``"300m"``, ``"1b"``, ``"3b"``, ``"7b"``, another number of parameters, or a shape.
        seed: seed of the weights that have no effect.
        on_layer: called after every layer with the number of finished layers and the total.

    Raises:
        ValueError: the architecture is not supported, the weights are quantised, or the size is below the model's own
            or too large for the memory.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError("cannot inflate a model whose weights are quantised: give its full checkpoint")
    small = model.config.get_text_config()
    shape = size if isinstance(size, InflatedShape) else shape_for(small, size)
    config = big_config(small, shape)
    with torch.device("meta"):
        big = type(model)(config).to(model.dtype)
    _check_memory(big, model.device)
    big.generation_config = copy.deepcopy(model.generation_config)
    big.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    fill = _Filler(shape, model.dtype, model.device, seed)
    _set(big.model.embed_tokens, weight=shape.widened(model.model.embed_tokens.weight.detach()))
    sources = _sources(model.model.layers, shape.layers)
    for i, (layer, source) in enumerate(zip(big.model.layers, sources, strict=True)):
        fill.layer(layer, source)
        on_layer(i + 1, shape.layers)
    fill.norm(big.model.norm, model.model.norm)
    if config.tie_word_embeddings:
        big.lm_head.weight = big.model.embed_tokens.weight
    else:
        fill.reader(big.lm_head, model.lm_head)
    return big.requires_grad_(False).eval()


def _sources(layers: Any, count: int) -> Iterator[Any]:
    """For each big layer, the small one that it contains; ``None`` for added layers."""
    ends = layer_ends(len(layers), count)
    for i, layer in enumerate(layers):
        yield from [None] * (ends[i + 1] - ends[i] - 1)
        yield layer


def _check_memory(big: Any, device: torch.device) -> None:
    needed = sum(p.numel() * p.element_size() for p in big.parameters())
    free = free_bytes() if device.type == "cpu" else None
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    if free is not None and needed > free:
        raise ValueError(
            f"the inflated model needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: "
            "choose a smaller size, or dtype=bfloat16"
        )


def _set(module: nn.Module, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))


class _Filler:
    def __init__(self, shape: InflatedShape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        generator = torch.Generator().manual_seed(seed)
        # Small enough that sums over any width stay near 1; never zero.
        drawn = torch.rand(POOL, generator=generator) + 0.5
        signs = torch.randint(0, 2, (POOL,), generator=generator) * 2 - 1
        self.pool = (drawn * signs / math.sqrt(shape.width)).to(dtype).to(device)

    def random(self, *size: int) -> Tensor:
        """Numbers of the pool, repeated from its start."""
        count = math.prod(size)
        numbers = torch.empty(count, dtype=self.dtype, device=self.device)
        whole = count // POOL
        numbers[: whole * POOL].view(whole, POOL).copy_(self.pool.expand(whole, POOL))
        numbers[whole * POOL :].copy_(self.pool[: count - whole * POOL])
        return numbers.view(size)

    def layer(self, layer: Any, source: Any | None) -> None:
        """Fill one decoder layer; without a ``source`` it adds nothing to the stream."""
        attention, mlp = layer.self_attn, layer.mlp
        for owner, names in ((attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))):
            for name in names:
                self.reader(getattr(owner, name), _source_layer(source, owner, layer, name))
        self.writer(attention.o_proj, _source_layer(source, attention, layer, "o_proj"))
        self.writer(mlp.down_proj, _source_layer(source, mlp, layer, "down_proj"))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.norm(getattr(layer, name), None if source is None else getattr(source, name))
        for name in ("q_norm", "k_norm"):  # per head: width and epsilon do not change
            if hasattr(attention, name):
                self.head_norm(getattr(attention, name), None if source is None else getattr(source.self_attn, name))

    def reader(self, linear: Any, source: Any | None) -> None:
        """Fill a layer that reads the stream: everything after the first copy is multiplied by zeros."""
        self._linear(linear, source, self.random, 1)

    def writer(self, linear: Any, source: Any | None) -> None:
        """Fill a layer that writes to every copy in the stream, from the small model's heads and units only."""
        self._linear(linear, source, partial(torch.zeros, dtype=self.dtype, device=self.device), self.shape.copies)

    @staticmethod
    def _linear(linear: Any, source: Any | None, fill: Callable[..., Tensor], copies: int) -> None:
        """Fill a layer with copies of the small layer's weights one below the other, and the rest with ``fill``."""
        weight = fill(linear.out_features, linear.in_features)
        bias = None if linear.bias is None else fill(linear.out_features)
        if source is not None:
            rows, columns = source.weight.shape
            for start in range(0, rows * copies, rows):
                weight[start : start + rows, :columns] = source.weight.detach()
                if bias is not None:
                    bias[start : start + rows] = source.bias.detach()
        _set(linear, weight=weight, bias=bias)

    def norm(self, norm: Any, source: Any | None) -> None:
        """Fill a norm, which undoes the root mean square over D and keeps the first copy."""
        weight = torch.ones(self.shape.width, dtype=self.dtype, device=self.device)
        if source is not None:
            weight.zero_()
            weight[: self.shape.small] = source.weight.detach() / 2**self.shape.halvings
        _set(norm, weight=weight)

    def head_norm(self, norm: Any, source: Any | None) -> None:
        size = norm.weight.shape[0]
        _set(norm, weight=torch.ones(size, dtype=self.dtype, device=self.device))
        if source is not None:
            norm.weight.copy_(source.weight.detach())
            norm.variance_epsilon = source.variance_epsilon


def _source_layer(source: Any | None, owner: Any, layer: Any, name: str) -> Any | None:
    if source is None:
        return None
    return getattr(source.self_attn if owner is layer.self_attn else source.mlp, name)
