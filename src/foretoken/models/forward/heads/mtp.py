"""Multi-token prediction modules built from the target's own layer class, as shipped in its checkpoint.

Such a module (DeepSeek-V3, arXiv 2412.19437; Qwen3-Next) consists of two norms, a projection, a decoder layer like the
target's last full-attention layer, and a norm.  It uses the classes of the loaded network, so gated attention, partial
rotary embeddings, zero-centred norms and experts need no code here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.cache.masks import LayerMask
from foretoken.models.forward.attention import FOLDED
from foretoken.models.network.taps import find_decoder
from foretoken.models.network.traits import cache_argument

FEEDS = ("post_norm", "pre_norm")
"""Input of the next step: the state after the module's norm, or before it."""

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TargetLayerModule(nn.Module):
    """One module: embeddings of tokens t + 1 and states of tokens t -> states of tokens t + 1.

    Args:
        network: the target, a Transformers causal LM.
        experts: whether the layer has experts, if the family's configuration does not say; ``None``: like the target's
            own layer.
        feed: one of :data:`FEEDS`.
    """

    def __init__(self, network: nn.Module, experts: bool | None = None, feed: str = "post_norm") -> None:
        super().__init__()
        if feed not in FEEDS:
            raise ValueError(f"a multi-token prediction module needs feed={' or feed='.join(FEEDS)}, not {feed!r}")
        decoder, layers = find_decoder(network)
        config, index = _layer_config(network, experts), _last_full(network)
        self.feed = feed
        self.layer_index = index
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        norm: Any = type(decoder.norm)  # knows whether its weights are centred at zero or at one
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.enorm, self.hnorm, self.norm = norm(size, eps=eps), norm(size, eps=eps), norm(size, eps=eps)
        layer_class: Any = type(layers[index])
        self.layer: nn.Module = layer_class(config, index)
        self._cache_argument = cache_argument(self.layer)
        self.mask = LayerMask()
        self._rotary = [getattr(decoder, "rotary_emb", None)]  # the target's own; in a list, it is not a submodule

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """Embeddings and states [b, n, D], positions [b, n] -> [b, n, D], the input of the next step.

        Args:
            embeddings: embeddings of tokens t + 1.
            features: states of tokens t, after the target's final norm.
            positions: positions t.
            mask: additive, broadcast to [b, 1, n, m].  ``None`` means full attention with ``keep``, causal attention
                without.
            keep: a cache.
        """
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(features)], -1))
        n = x.shape[1]
        if mask is None and keep is None and n > 1:
            mask = torch.full((n, n), -torch.inf, device=x.device).triu(1)
        if mask is not None:
            mask = mask.to(x.dtype).expand(*(1,) * (4 - mask.ndim), *mask.shape)
        rotary, cache = self._rotary[0], None
        if keep is not None:  # the only method of Transformers' caches that an attention layer calls
            cache = SimpleNamespace(update=lambda key, value, *_, **__: keep(key, value))
        result = self.layer(
            x,
            position_embeddings=None if rotary is None else rotary(x, positions),
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_argument: cache},
        )
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return self.norm(output) if self.feed == "post_norm" else output

    def head_state(self, output: Tensor) -> Tensor:
        """Input of the vocabulary projection, from an output [..., D]."""
        return output if self.feed == "post_norm" else self.norm(output)

    @torch.no_grad()
    def start_from(self, network: nn.Module) -> None:
        """Initialise for training: the target's own layer and final norm, and the mean of both inputs."""
        decoder, layers = find_decoder(network)
        source = layers[self.layer_index]
        for name, value in self.layer.state_dict().items():
            module, _, kind = name.rpartition(".")
            value.copy_(getattr(source.get_submodule(module), kind))  # packed layers have a weight but no state_dict
        final_norm: Any = decoder.norm
        self.norm.load_state_dict(final_norm.state_dict())
        half = torch.eye(len(self.eh_proj.weight)) / 2
        self.eh_proj.weight.copy_(torch.cat([half, half], 1))


def target_layer_module(
    network: nn.Module, tensors: Mapping[str, Tensor], feed: str = "post_norm"
) -> TargetLayerModule:
    """A module of the target ``network``, with weights under our names; none may be missing or superfluous.

    Args:
        tensors: ``eh_proj.weight`` [D, 2 D], ``enorm.weight``, ``hnorm.weight``, ``norm.weight`` [D] and ``layer.*``;
            experts may be stored separately.
    """
    experts = any(".experts." in name for name in tensors)
    with torch.device("meta"):
        module = TargetLayerModule(network, experts, feed)
    expected = module.state_dict()
    weights = fused(tensors)
    for name in [*expected, *sorted(weights.keys() - expected.keys())]:
        if name not in weights:
            raise ValueError(f"its multi-token prediction module lacks the tensor {name}: the checkpoint is incomplete")
        if name not in expected:
            kind = type(module.layer).__name__
            raise ValueError(f"its multi-token prediction module holds a tensor {name} that {kind} does not have")
        if expected[name].shape != weights[name].shape:
            raise ValueError(
                f"{name} of its multi-token prediction module is {list(weights[name].shape)} and must be "
                f"{list(expected[name].shape)}"
            )
    floats = {n: t.to(torch.float32) if t.is_floating_point() else t for n, t in weights.items()}
    module.load_state_dict(floats, assign=True)
    return module.requires_grad_(False)


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack separately stored experts into the layout of the classes.

    ``P.experts.E.gate_proj.weight`` and ``up_proj`` [I, D] -> ``P.experts.gate_up_proj`` [E, 2 I, D];
    ``down_proj`` [D, I] -> ``P.experts.down_proj`` [E, D, I].
    """
    stacked: dict[str, Tensor] = {}
    single: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.rpartition(".experts.")
        parts = rest.split(".")
        if layer and len(parts) == 3 and parts[0].isdecimal() and parts[2] == "weight":
            single.setdefault(layer, {}).setdefault(parts[1], {})[int(parts[0])] = tensor
        else:
            stacked[name] = tensor
    for layer, by_projection in single.items():
        count = 1 + max(number for rows in by_projection.values() for number in rows)
        names = ("gate_proj", "up_proj", "down_proj")
        stacks = {name: _stack(layer, name, by_projection.get(name, {}), count) for name in names}
        stacked[f"{layer}.experts.gate_up_proj"] = torch.cat([stacks["gate_proj"], stacks["up_proj"]], 1)
        stacked[f"{layer}.experts.down_proj"] = stacks["down_proj"]
    return stacked


def unfused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`fused`: experts stored one by one."""
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, stack = name.rpartition(".experts.")
        if not layer or stack not in ("gate_up_proj", "down_proj"):
            single[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if stack == "gate_up_proj" else None
            for projection, weight in parts or [(stack, expert)]:
                single[f"{layer}.experts.{number}.{projection}.weight"] = weight.contiguous()
    return single


def _stack(layer: str, name: str, rows: Mapping[int, Tensor], count: int) -> Tensor:
    missing = next((number for number in range(count) if number not in rows), None)
    if missing is not None:
        raise ValueError(f"the checkpoint lacks the tensor {layer}.experts.{missing}.{name}.weight: it is incomplete")
    if len({row.shape for row in rows.values()}) > 1:
        raise ValueError(f"the experts of {layer} have a {name} of different shapes")
    return torch.stack([rows[number] for number in range(count)])


def _layer_config(network: nn.Module, experts: bool | None) -> Any:
    """A copy of the text configuration for one more layer, with our attention function."""
    source: Any = network.config
    config = copy.deepcopy(source.get_text_config())
    config._attn_implementation = FOLDED
    if experts is not None and hasattr(config, "first_k_dense_replace"):
        # Modules have experts even where the target's first layers have none.
        config.first_k_dense_replace = 0 if experts else config.num_hidden_layers
    return config


def _last_full(network: nn.Module) -> int:
    """Index of the last full-attention layer, or of the last layer if there are no layer types."""
    source: Any = network.config
    config = source.get_text_config()
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is None:
        return int(config.num_hidden_layers) - 1
    full = [index for index, kind in enumerate(types) if kind in ("full_attention", "attention", "hybrid")]
    if not full:
        raise ValueError(f"{config.model_type} has no full-attention layer to build its prediction module from")
    return full[-1]


def modules_of(names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
    """The modules in a checkpoint, each as a mapping from our tensor names to the checkpoint's.

    Two layouts are supported and recognised by their names alone: ``mtp.*`` (Qwen, all modules share norms and
    projection) and ``model.layers.{L + i}.*`` after the ``num_layers`` = L layers of the model (DeepSeek, GLM).
    """
    listed = list(names)
    return _qwen(listed) or _nextn(listed, num_layers)


QWEN = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "norm.weight",
}
"""The checkpoint's names of shared tensors -> ours."""
NEXTN = {
    "eh_proj.weight": "eh_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "shared_head.norm.weight": "norm.weight",
}
TARGETS_OWN = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""Name endings of tensors that duplicate the target's."""


def _qwen(names: Sequence[str]) -> list[dict[str, str]]:
    module_names = [name for name in names if name.startswith("mtp.") and not name.endswith(TARGETS_OWN)]
    shared = {QWEN[name]: name for name in module_names if name in QWEN}
    layers: dict[int, dict[str, str]] = {}
    for name in module_names:
        if name in QWEN:
            continue
        parts = name.split(".", 3)
        if parts[1] == "layers" and len(parts) == 4 and parts[2].isdecimal():
            layers.setdefault(int(parts[2]), {})[f"layer.{parts[3]}"] = name
        else:
            shared[name.removeprefix("mtp.")] = name  # reported when the module is filled
    if module_names and not layers:
        layers[0] = {}
    return [{**shared, **layers[index]} for index in sorted(layers)]


def _nextn(names: Sequence[str], num_layers: int) -> list[dict[str, str]]:
    layers: dict[int, dict[str, str]] = {}
    for name in names:
        _, _, rest = name.rpartition("model.layers.")
        number, _, inner = rest.partition(".")
        if not rest or name == rest or not number.isdecimal() or int(number) < num_layers:
            continue
        if not inner.endswith(TARGETS_OWN):
            layers.setdefault(int(number), {})[NEXTN.get(inner, f"layer.{inner}")] = name
    return [layers[index] for index in sorted(layers)]
