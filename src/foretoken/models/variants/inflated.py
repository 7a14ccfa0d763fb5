"""An inflated target that appears to drafters as the small model inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from foretoken.models.forward.network import Network
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.layers import LayerPlan
from foretoken.models.variants.inflation import InflatedShape, layer_ends


class InflatedNetwork(Network):
    """Runs the big network; layers, taps and hidden states are counted and shaped like the small one's.

    A layer is a block of the big network that ends with the small model's layer, so that a share of the layers costs
    that share of the target.  Trained drafters use the small model's embedding, vocabulary projection and width.
    """

    def __init__(self, model: Any, *args: Any, small: Any, shape: InflatedShape, **more: Any) -> None:
        super().__init__(model, *args, **more)
        self.embedding, self.shape = small.eval(), shape
        self.num_layers = int(small.config.get_text_config().num_hidden_layers)
        self._ends = layer_ends(self.num_layers, shape.layers)

    @property
    def extra_rows(self) -> Tensor | None:
        rows = super().extra_rows
        return None if rows is None else self.shape.widened(rows)

    def native(self, plan: LayerPlan) -> None:
        """Always ``None``: the big network itself would return hidden states of its own width."""

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        target_taps = {name: self._target_tap(name) for name in calls[0].taps}
        outputs = super().run_all([self._inside(call, tuple(dict.fromkeys(target_taps.values()))) for call in calls])
        narrow = self.shape.small
        return [
            (logits, {name: hidden[target_tap][..., :narrow] for name, target_tap in target_taps.items()})
            for logits, hidden in outputs
        ]

    def _inside(self, call: NetworkCall, taps: Sequence[str]) -> NetworkCall:
        wide = None if call.states is None else self.shape.widened(call.states)
        return replace(call, taps=taps, plan=self._plan(call.plan), states=wide)

    def _target_tap(self, tap: str) -> str:
        kind, _, number = tap.partition(":")
        return f"layer:{self._ends[int(number)]}" if kind == "layer" else tap

    def _plan(self, plan: LayerPlan) -> LayerPlan:
        return replace(
            plan,
            start=self._ends[plan.start],
            stop=None if plan.stop is None else self._ends[plan.stop],
            skip_attention=self._blocks(plan.skip_attention),
            skip_mlp=self._blocks(plan.skip_mlp),
        )

    def _blocks(self, layers: frozenset[int]) -> frozenset[int]:
        return frozenset(i for layer in layers for i in range(self._ends[layer], self._ends[layer + 1]))


class InflatedModel(HuggingFaceModel):
    """The runner of an inflated model (:func:`foretoken.models.variants.inflation.inflate`)."""

    def __init__(self, model: Any, small: Any, shape: InflatedShape, **options: Any) -> None:
        super().__init__(model, network=partial(InflatedNetwork, small=small, shape=shape), **options)
        self.small, self.shape, self.num_parameters = small, shape, _parameters(self.config)

    @property
    def note(self) -> str:
        """Note about this target for every table."""
        return (
            f"inflated to {self.num_parameters / 1e9:.2f}b parameters ({self.shape.layers} layers of width "
            f"{self.shape.width}): the small model's outputs at the big one's cost"
        )


def _parameters(config: Any) -> int:
    """Number of parameters without norms and biases, from the configuration (packed layers hold none)."""
    width, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * width * config.head_dim * heads + 3 * width * config.intermediate_size
    vocabulary = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    return int(layer * config.num_hidden_layers + vocabulary)
