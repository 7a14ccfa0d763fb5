"""Updates of some rows on the native forward: those of the lean one, and nothing in the other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of
from torch import Tensor

from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.native import library
from foretoken.models.network.taps import decoder_layers
from foretoken.models.variants.gated import GatedModel, LowRankUpdates, linear_shapes

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
WITH_ALL_NORMS = "gemma3_text"  # it norms what a sublayer adds, so that updates do not end in the residual stream


@pytest.fixture(autouse=True)
def native_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid out for our kernels, whatever was measured on this machine."""
    layout = "foretoken.models.linear.packing.fastest_layout"
    monkeypatch.setattr(layout, lambda dtype, *_: "native" if dtype == torch.bfloat16 else "plain")


def view_of(name: str = "llama", kind: str = "", rank: int = 3, names: tuple[str, ...] = ()) -> GatedModel:
    network = new_model(name, **SHAPE).to(torch.bfloat16)
    if kind:
        quantise_linears(network, kind)
    torch.manual_seed(0)
    shapes = {name: shape for name, shape in linear_shapes(network).items() if not names or name.endswith(names)}
    updates = LowRankUpdates(shapes, len(decoder_layers(network)), rank, 1.5)
    with torch.no_grad():
        for weight in updates.parameters():
            weight.normal_(std=0.1)
    view = GatedModel(HuggingFaceModel(network), updates)
    assert (view.forward_name, view.native_off) == ("native", "")
    return view


def drafts(view: GatedModel) -> list[Tensor]:
    """Logits of one text, and of a batch of texts of two lengths and widths."""
    target = view.target
    a, b = target.open(), target.open()
    target.prefill(a, prompt_of(21))
    target.prefill(b, prompt_of(4, seed=1))
    rows = [view.forward([Feed(a, prompt_of(4, seed=2))])[0].logits]
    a.clear_scratch()
    rows += [each.logits for each in view.forward([Feed(a, prompt_of(4, seed=2)), Feed(b, prompt_of(2, seed=3))])]
    for sequence in (a, b):
        sequence.clear_scratch()
    return [each.float() for each in rows]


def on_lean(view: GatedModel) -> list[Tensor]:
    weights: Any = view.weights
    native = weights.forward_of(view.target.forwards)
    weights._forward = native.twin
    rows = drafts(view)
    weights._forward = native
    return rows


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).square().mean(-1).sqrt().max() / expected.std())


@pytest.mark.parametrize("kind", ["", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", WITH_ALL_NORMS])
def test_native_updates_are_the_lean_ones(level: str, name: str, kind: str) -> None:
    """At an odd rank, too, of which a kernel would read half a pair."""
    view = view_of(name, kind)
    for got, expected in zip(drafts(view), on_lean(view), strict=True):
        assert distance(got, expected) < 0.1


@pytest.mark.parametrize("linear", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_every_linear_layer_gets_its_own_update(linear: str) -> None:
    view = view_of(names=(linear,))
    with_updates, lean = drafts(view), on_lean(view)
    with torch.no_grad():
        for weight in view.weights.updates.parameters():  # type: ignore[attr-defined]
            weight.zero_()
    for got, expected, without in zip(with_updates, lean, drafts(view), strict=True):
        change = distance(got[1:], without[1:])
        assert change > 2 * distance(got[1:], expected[1:]) > 0


def test_rows_without_an_update_have_the_targets_own_bits() -> None:
    view = view_of()
    target, text = view.target, prompt_of(9)
    sequence = target.open()
    target.prefill(sequence, text)
    first = view.forward([Feed(sequence, [5, 6, 7])])[0].logits
    sequence.clear_scratch()
    plain = target.forward([Feed(sequence, [5, 6, 7])])[0].logits
    assert torch.equal(first[0], plain[0]) and not torch.allclose(first[1:], plain[1:], atol=1e-2)


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    alone, in_batch, _ = drafts(view_of())
    assert torch.equal(alone, in_batch)


def test_changed_updates_are_read_again() -> None:
    view = view_of()
    before = drafts(view)[0]
    with torch.no_grad():
        view.weights.updates.layers[0].mlp.up_proj.lora_B.mul_(3)  # type: ignore
    after = drafts(view)[0]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1:], after[1:])
