"""Low-rank updates of a network: they are those of merged weights, their rows alone go through them, graphs do not."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import LayerPlan
from foretoken.models.network.low_rank import merged
from foretoken.models.network.taps import decoder_layers
from foretoken.models.network.traits import cache_argument
from foretoken.models.variants import gated
from foretoken.models.variants.gated import GatedModel, LowRankUpdates, linear_shapes, updated
from models.checkpoints import new_model, prompt_of


def random_updates(network: Any, rank: int = 3, scale: float = 1.5) -> LowRankUpdates:
    torch.manual_seed(0)
    updates = LowRankUpdates(linear_shapes(network), len(decoder_layers(network)), rank, scale)
    with torch.no_grad():
        for weight in updates.parameters():
            weight.normal_(std=0.2)
    return updates


def with_merged_weights(network: Any, updates: LowRankUpdates) -> Any:
    other = copy.deepcopy(network)
    with torch.no_grad():
        for i, layer in enumerate(decoder_layers(other)):
            for name in updates.shapes:
                linear, factors = layer.get_submodule(name), updates.factors(i, name)
                assert factors is not None
                linear.weight.copy_(merged(linear.weight, *factors, updates.scale))
    return other


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "opt"])
def test_updates_of_all_rows_are_merged_weights(name: str) -> None:
    network = new_model(name).double()
    updates, ids = random_updates(network), torch.tensor([prompt_of(7), prompt_of(7, seed=1)])
    with torch.no_grad():
        plain = network(input_ids=ids).logits
        with updated(network, updates):
            logits = network(input_ids=ids).logits
        again = network(input_ids=ids).logits
        expected = with_merged_weights(network, updates)(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert torch.equal(plain, again) and not torch.allclose(plain, logits, atol=1e-2)


@pytest.mark.parametrize("lean", [True, False])
def test_rows_behind_the_first_read_its_own_keys_and_go_through_merged_weights(lean: bool) -> None:
    """One layer: a row behind the first is the merged network's, but for keys and values of the first one."""
    network = new_model("llama", num_hidden_layers=1).double()
    updates = random_updates(network)
    target, text = HuggingFaceModel(network, lean=lean), prompt_of(5)
    view, sequence = GatedModel(target, updates), target.open()
    logits = view.forward([Feed(sequence, text)])[0].logits
    with torch.no_grad():
        first = network(input_ids=torch.tensor([text[:1]]), use_cache=True)
        merged_network = with_merged_weights(network, updates)
        cache = {cache_argument(network): first.past_key_values}
        rest = merged_network(input_ids=torch.tensor([text[1:]]), **cache).logits[0]
    torch.testing.assert_close(logits[0], first.logits[0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1:], rest, rtol=0, atol=1e-4)


def test_recorded_graphs_run_the_targets_own_weights_alone() -> None:
    target = HuggingFaceModel(new_model("llama").double())
    view, sequence = GatedModel(target, random_updates(target.model)), target.open()
    target.prefill(sequence, prompt_of(6))
    expected = view.forward([Feed(sequence, [3, 4])])[0].logits
    sequence.clear_scratch()

    class Graphs:
        owner = target

        def score(self, *_: Any) -> Any:
            raise AssertionError("a graph of the target's weights")

    target.graphs = Graphs()
    assert torch.equal(view.forward([Feed(sequence, [3, 4])])[0].logits, expected)
    sequence.clear_scratch()
    with pytest.raises(AssertionError, match="a graph of the target's weights"):
        target.forward([Feed(sequence, [3, 4])])


def test_the_view_keeps_to_the_targets_sequences() -> None:
    target = HuggingFaceModel(new_model("llama"))
    view = GatedModel(target, random_updates(target.model))
    with pytest.raises(CapabilityError, match="a draft with updates grows on the target's own cache"):
        view.open_beside(None)
    sequence = target.open()
    assert view.open_beside(sequence) is sequence
    view.forward([Feed(sequence, [1, 2])])
    with pytest.raises(ValueError, match="nodes of a draft with updates cannot be committed: run the target on them"):
        view.commit(sequence, [0])
    with pytest.raises(ValueError, match="run all before committing"):
        target.commit(sequence, [0])


def test_routers_and_experts_are_left_alone() -> None:
    assert set(linear_shapes(new_model("qwen3_moe"))) == {f"self_attn.{name}_proj" for name in "qkvo"}
    assert "mlp.down_proj" in linear_shapes(new_model("llama"))


@pytest.mark.parametrize("lean", [True, False])
def test_updates_leave_with_their_last_user(lean: bool) -> None:
    target = HuggingFaceModel(new_model("llama").double(), lean=lean)
    updates = random_updates(target.model)
    views, sequence = [GatedModel(target, updates) for _ in range(2)], target.open()
    logits = [view.forward([Feed(sequence, prompt_of(5))])[0].logits for view in views[:1]]
    weights = weakref.ref(views[0].weights)
    del views[0]
    gc.collect()
    assert weights() is views[0].weights
    name = views.pop().plan.weights
    gc.collect()
    assert weights() is None
    with pytest.raises(ValueError, match="no second weights"):
        target.forward_part([Feed(sequence, [1])], LayerPlan(weights=name))
    sequence.clear_scratch()
    assert torch.equal(GatedModel(target, updates).forward([Feed(sequence, prompt_of(5))])[0].logits, logits[0])


@pytest.mark.parametrize(("native", "factors"), [(True, torch.bfloat16), (False, torch.float32)])
def test_updates_are_multiplied_in_float32_where_bfloat16_is_emulated(
    monkeypatch: pytest.MonkeyPatch, native: bool, factors: torch.dtype
) -> None:
    monkeypatch.setattr(gated, "has_bfloat16", lambda: native)
    assert gated._product_dtype(torch.bfloat16, torch.device("cpu")) == factors
    assert gated._product_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert gated._product_dtype(torch.float64, torch.device("cpu")) == torch.float64
