"""A causal language model that adds a state to every token's embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.forward.network import Network
from foretoken.models.forward.public import run_public
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.alone import alone, only_here
from foretoken.models.network.call import NetworkCall, Outputs


class ConditionedNetwork(Network):
    """A network's forward with the same weights, which adds the states of a call to the embedded tokens."""

    def __init__(self, network: Network) -> None:
        vars(self).update(vars(network))

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        if calls[0].states is None:
            return super().run_all(calls)
        if self.fast is None:
            return [self._run_conditioned(call) for call in calls]
        return self.fast.run_all([replace(call, states=self._inputs(call)) for call in calls])

    def _inputs(self, call: NetworkCall) -> Tensor:
        """Input [b, width, D] of the first layer."""
        fast: Any = self.fast
        embedded: Tensor = fast.embedded(call.ids.flatten()).view(*call.ids.shape, -1)
        return embedded if call.states is None else embedded + call.states.to(embedded) * fast.input_scale

    def _run_conditioned(self, call: NetworkCall) -> Outputs:
        with alone(self.model), _adding(self.model, call.states):
            return run_public(self, replace(call, states=None))


class ConditionedModel(HuggingFaceModel):
    """A model with separate sequences, whose feeds may carry ``states`` [n, D] of the token embedding's width."""

    def __init__(self, model: LanguageModel) -> None:
        if not isinstance(model, HuggingFaceModel):
            raise CapabilityError(f"{type(model).__name__} takes tokens only, without hidden states")
        vars(self).update(vars(model))
        self.forwards = ConditionedNetwork(model.forwards)
        self.separate(TreeCache(self.cache.num_layers, self.cache.max_slots))

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        states = [feed.states for feed in feeds if feed.states is not None]
        if not states:
            return super().forward(feeds, taps)
        if [len(state) for state in states] != [len(feed.tokens) for feed in feeds]:
            raise ValueError("every token of a feed needs a state, or none does")
        self._check(feeds, taps)
        return self._whole(feeds, taps, inputs=states)


@contextmanager
def _adding(model: Any, states: Tensor | None) -> Iterator[None]:
    """Add the states [b, n, D] to the token embedding's output inside the block."""

    def after(_: Any, __: Any, output: Tensor) -> Tensor:
        return output if states is None else output + states.to(output)

    handle = model.get_input_embeddings().register_forward_hook(only_here(after))
    try:
        yield
    finally:
        handle.remove()
