"""The changes of a network that a watch sees, and those of its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of
from torch import nn

from foretoken.models.network.watch import Watch


def test_what_a_watch_sees() -> None:
    network = nn.Sequential(nn.Linear(300, 5), nn.BatchNorm1d(5), nn.Embedding(3, 4))
    with torch.inference_mode():
        network.append(nn.Linear(2, 2))

    def change(edit: Callable[[], Any]) -> bool:
        watch = Watch(network)
        assert not watch.has_changed()
        edit()
        return watch.has_changed()

    first: Any = network[0]
    with torch.no_grad():
        assert change(lambda: first.weight[2, 7].add_(1)), "one number, counted"
        assert change(lambda: first.weight.data.mul_(2)), "uncounted"
        assert change(lambda: setattr(first, "bias", nn.Parameter(first.bias.clone())))
        assert change(lambda: network.append(nn.Linear(2, 2)))
        assert change(lambda: network[1].running_mean.add_(1)), "a buffer that is saved"
        assert change(lambda: setattr(network[1], "running_mean", network[1].running_mean + 1))
        assert change(lambda: network.half())
        assert change(lambda: setattr(network[1], "eps", 0.1))
        assert change(lambda: setattr(network[0], "forward", network[2].forward))
        assert change(lambda: setattr(network[2], "__class__", type("Own", (nn.Embedding,), {})))
        assert not change(lambda: network[2].register_buffer("scratch", torch.ones(2), persistent=False))


class Adapted(nn.Linear):
    """A layer as PEFT makes it of a linear one: what it adds depends on names, a flag and a table of factors."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.updates = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        self.scaling = {"a": 2.0, "b": 2.0}
        self._active_adapter, self._disable_adapters = ["a"], False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = super().forward(x)
        for name in () if self._disable_adapters else self._active_adapter:
            whole = whole + self.updates[name](x) * self.scaling[name]
        return whole


@pytest.mark.parametrize(
    "switch",
    [
        lambda layer: setattr(layer, "_active_adapter", "b"),
        lambda layer: layer._active_adapter.append("b"),
        lambda layer: setattr(layer, "_disable_adapters", True),
        lambda layer: layer.scaling.update(a=1.0),
    ],
)
def test_an_adapter_that_is_switched_is_a_change(switch: Callable[[Any], Any]) -> None:
    network = nn.Sequential(Adapted())
    watch, x = Watch(network), torch.ones(1, 3)
    before = network(x)
    assert not watch.has_changed()
    switch(network[0])
    assert not torch.equal(network(x), before) and watch.has_changed()
    assert not Watch(network).has_changed()


class Counting(nn.Module):
    """It keeps to itself how often it was called, and what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, 2.0
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_buffer("ramp", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self._note(x)
        self.register_buffer("table", self.table + 1, persistent=False)
        return x * self.scale + self.ramp

    def _note(self, x: torch.Tensor) -> None:
        self.seen[0] = x.sum()


def test_what_a_forward_writes_is_no_change() -> None:
    network = Counting()
    watch = Watch(network)
    network(torch.ones(3))
    assert network.calls == 1 and not watch.has_changed()
    network.scale = 3.0
    assert watch.has_changed()
    watch = Watch(network)
    network.ramp.mul_(2)
    assert watch.has_changed()


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_are_no_change(rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    if rope == "longrope":
        parameters |= {"original_max_position_embeddings": 16, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    model = new_model("llama", rope_parameters=parameters, max_position_embeddings=16)
    watch = Watch(model)
    before = model.model.rotary_emb.inv_freq.clone()
    model(torch.tensor([prompt_of(40)]))
    assert not torch.equal(model.model.rotary_emb.inv_freq, before) and not watch.has_changed()
