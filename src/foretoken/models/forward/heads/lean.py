"""The decoder layer of a trained head in few tensor calls, using the lean forward's layers.

A head's network is called as usual, with flat rows [n, D] instead of [b, n, D] and a :class:`HeadRun` instead of a
cache, to which its decoder layer delegates.  Training uses the module itself.

Weights are float32, because a head may be learning.  The layer runs in a bfloat16 copy if that is faster: a draft need
not be exact.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.forward.lean_families import Family
from foretoken.models.forward.lean_layers import CacheRows, ForwardPass, Heads, LeanLayer, Rotary, RowLayout
from foretoken.models.linear.packing import Packing, has_bfloat16
from foretoken.models.linear.product_costs import step_s
from foretoken.models.native import attention as native_attention
from foretoken.models.network.call import NetworkCall
from foretoken.models.network.frequencies import rotary_frequencies
from foretoken.models.network.watch import num_writes


class LeanHead:
    """The only attention or decoder layer of a head (a module with a ``LayerConfig``), fused; it follows the
    weights."""

    def __init__(self, module: Any) -> None:
        self.module = module
        config = module.config
        self.size = Heads(config.heads, config.kv_heads, config.head_dim)
        if hasattr(module, "down_proj"):  # a decoder layer that is its own attention and MLP module
            self.family = Family(attention="", mlp="", activation=None)
        else:  # attention only: norm and residual belong to the caller
            self.family = Family(attention="", mlp=None, norm_attention=None, norm_mlp=None)
        self.weights = list(module.parameters())
        device = self.weights[0].device
        self.dtype = torch.bfloat16 if self._gains() else self.weights[0].dtype
        self.rotary = Rotary(
            *rotary_frequencies(config.head_dim, config.rope_theta, config.rope, device), dtype=self.dtype
        )
        self._layer: LeanLayer | None = None
        self._state: tuple[int, ...] = ()

    def _gains(self) -> bool:
        """Whether bfloat16 is faster on this machine, by the measured product times."""
        weight = self.weights[0]
        narrows = weight.dtype == torch.float32 and weight.device.type == "cpu" and has_bfloat16()
        if not narrows or not native_attention.fits(torch.bfloat16, self.size.dim):
            return False
        shapes = [tuple(w.shape) for w in self.weights if w.ndim == 2]
        casts_s = 4e-5  # casts of the states both ways; small layers stay in the cache anyway
        return step_s(torch.bfloat16, shapes) + casts_s < step_s(torch.float32, shapes)

    @classmethod
    def of(cls, net: nn.Module) -> LeanHead | None:
        """The layer of a head's network; ``None`` if it has no such layer, or several."""
        layers = [m for m in net.modules() if hasattr(m, "q_proj") and hasattr(getattr(m, "config", None), "kv_heads")]
        return cls(layers[0]) if len(layers) == 1 else None

    @property
    def layer(self) -> LeanLayer:
        """Fused weights, rebuilt after the module's weights changed (it may be learning)."""
        state = (self.weights[0].untyped_storage()._cdata, *map(num_writes, self.weights))
        if self._layer is None or state != self._state:
            narrow = self.dtype != self.weights[0].dtype
            module = copy.deepcopy(self.module).to(self.dtype) if narrow else self.module
            self._layer = LeanLayer(
                module,
                self.family,
                self.size,
                kind="",
                rope="",
                packing=Packing(),
                dtype=self.dtype if narrow else None,
            )
            self._state = state
        return self._layer


class HeadRun:
    """One call of a head, with padded rows and ``states``."""

    def __init__(self, head: LeanHead, call: NetworkCall) -> None:
        (b, width), mask = call.ids.shape, call.masks[""]
        self.layer = head.layer
        self.layout = RowLayout(b, width, call.counts, call.ids.device)
        self.positions = self.layout.flat(call.positions)
        groups = head.size.heads // head.size.kv_heads
        self.dtype = head.dtype
        if mask is not None and self.dtype == torch.bfloat16:
            mask = mask.to(self.dtype)
        folded = mask if mask is None or width == 1 or self.layer.native else mask.repeat(1, 1, groups, 1)
        rows = slice(0, len(self.positions))
        self.cache = call.cache
        self.run = ForwardPass(
            [CacheRows(rows, self.layout, {"": folded}, call.cache)], {"": head.rotary(self.positions)}
        )

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [b, H, n, d] and return all of them, like any cache of a head."""
        return self.cache.update(key, value, 0)

    def mixed(self, inputs: Tensor) -> Tensor:
        """Attention output [n, D] of normalised inputs [n, width]."""
        return self.layer.mixed(0, inputs.to(self.dtype), None, self.run).to(inputs.dtype)

    def decoded(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """The whole layer, x [n, D] -> [n, D]; ``beside`` [n, 2 D] is the attention input of a wide layer."""
        dtype, x = x.dtype, x.to(self.dtype)
        if beside is None:
            x = self.layer.attend(0, x, self.run)
        else:
            x = self.layer.mixed(0, beside.to(self.dtype), x, self.run)
        return self.layer.feed(x, x).to(dtype)
