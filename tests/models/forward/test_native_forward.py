"""The native forward is the lean one in one call: every family, plan and mask, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import HALF, new_model, prompt_of
from families import model_of, windows
from forwards import agrees, compare, outputs
from torch import Tensor

from foretoken.models.base import Feed
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.native import NativeForward, NotCoveredError
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.native import library
from foretoken.models.network.layers import LayerPlan

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

COVERED = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "granite"]
SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
"""Heads of a size that the attention kernel is made for, a width that is no multiple of a kilobyte."""
TOLERANCE = 0.1


def _always_native(dtype: torch.dtype, *_: Any) -> str:
    return "native" if dtype == torch.bfloat16 else "plain"


@pytest.fixture(autouse=True)
def native_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid out for our kernels, whatever was measured on this machine."""
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", _always_native)


def network(name: str, **changes: Any) -> Any:
    sizes = {**SHAPE, "hidden_size": 128} if name == "phi3" else SHAPE  # whose heads divide the width
    return model_of(name, **{**sizes, **changes}).to(torch.bfloat16)


def both(model: Any) -> tuple[HuggingFaceModel, HuggingFaceModel]:
    """A model on its native forward, and one on the twin of that."""
    fast, twin = HuggingFaceModel(model), HuggingFaceModel(model)
    assert fast.forward_name == "native", fast.forwards.native_off
    assert fast.forwards.native_off == "" and fast.describe()["forward"] == "native"
    twin.forwards.fast = LeanForward(twin.forwards)
    return fast, twin


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COVERED)
def test_native_is_the_lean_forward(level: str, name: str) -> None:
    """Chains, trees, ragged batches, taps, layer windows and skipped sublayers."""
    fast, twin = both(network(name))
    compare(outputs(fast), outputs(twin), TOLERANCE)
    compare(windows(fast), windows(twin), TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_rotary_embeddings_that_follow_the_length_are_covered(level: str, name: str) -> None:
    """OLMo 2's are float32 whatever the dtype of its states."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    fast, twin = both(network(name, rope_parameters=dynamic))
    compare(outputs(fast), outputs(twin), TOLERANCE)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "granite"])
def test_quantised_weights_are_multiplied_in_it(level: str, name: str, kind: str) -> None:
    model = network(name)
    quantise_linears(model, kind)
    fast, twin = both(model)
    compare(outputs(fast), outputs(twin), TOLERANCE)
    compare(windows(fast), windows(twin), TOLERANCE)


def test_layers_of_one_model_may_have_several_kinds_of_weights() -> None:
    """Query and key in 4 bits beside a value in 8, and a head that stays as it is."""
    model, four = network("qwen2"), network("qwen2")
    quantise_linears(model, "int8")
    quantise_linears(four, "int4")
    for layer, other in zip(model.model.layers, four.model.layers, strict=True):
        layer.self_attn.q_proj, layer.mlp.up_proj = other.self_attn.q_proj, other.mlp.up_proj
    fast, twin = both(model)
    compare(outputs(fast), outputs(twin), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"head_dim": 64, "hidden_size": 512}),  # rows a kilobyte apart
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4, "vocab_size": 101}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("gemma2", {**HALF, "attn_logit_softcapping": None, "final_logit_softcapping": 8.0}),
    ],
    ids=str,
)
def test_shapes_and_rotary_embeddings(level: str, name: str, changes: dict[str, Any]) -> None:
    fast, twin = both(network(name, **changes))
    compare(outputs(fast), outputs(twin), TOLERANCE)


@pytest.mark.parametrize("wide", [514, 528, 542])
def test_many_rows_whose_products_read_other_widths(level: str, wide: int) -> None:
    """Rows of 512 numbers lie farther apart than rows of a few more: there is room for either."""
    model = new_model("llama", **{**SHAPE, "hidden_size": 512, "intermediate_size": wide}).to(torch.bfloat16)
    fast, twin = both(model)
    text = prompt_of(180)
    got, expected = (each.forward([Feed(each.open(), text)])[0].logits.float() for each in (fast, twin))
    assert float((got - expected).abs().mean() / expected.std()) < TOLERANCE


# -- bits --------------------------------------------------------------------------------------------------------------


def weights(kind: str) -> Any:
    model = network("qwen3")
    if kind != "bfloat16":
        quantise_linears(model, kind)
    return model


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_a_rows_bits_do_not_depend_on_its_company(level: str, kind: str) -> None:
    model = HuggingFaceModel(weights(kind))
    assert model.forward_name == "native"
    path, other = prompt_of(17, seed=3), prompt_of(40, seed=4)
    a, b, c = (model.open() for _ in range(3))
    model.prefill(a, prompt_of(11))
    model.prefill(b, prompt_of(5))
    model.prefill(b, prompt_of(11)[5:])
    model.prefill(c, other)
    alone: list[Tensor] = []
    for token in path:
        alone.append(model.forward([Feed(a, [token])])[0].logits[0])
        model.commit(a, [0])
    model.rewind(a, 11)
    expected = torch.stack(alone)
    for rows in range(1, 18):
        assert torch.equal(model.forward([Feed(a, path[:rows])])[0].logits, expected[:rows])
        model.commit(a, [])
    tree = [path[0], 5, path[1], 6, path[2], 7, path[3], path[4], 8, path[5]]
    rows = model.forward([Feed(c, other[:6]), Feed(b, tree, [-1, 0, 0, 1, 2, 2, 4, 6, 4, 7]), Feed(a, path[:2])])
    assert torch.equal(rows[1].logits[[0, 2, 4, 6, 7, 9]], expected[:6])
    assert torch.equal(rows[2].logits, expected[:2])


def test_threads_change_no_bits(level: str) -> None:
    model, before = HuggingFaceModel(weights("int4")), torch.get_num_threads()
    logits = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            logits.append(torch.cat([row.logits for row in outputs(model)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_texts_in_several_caches_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of rows has a cache, a mask and lengths of its own; the bits are those of a call alone."""
    model, calls = HuggingFaceModel(network("gemma3_text")), []
    real = NativeForward.run_all
    monkeypatch.setattr(NativeForward, "run_all", lambda self, inputs: calls.append(inputs) or real(self, inputs))
    short, long = model.open(), model.open()
    model.prefill(short, prompt_of(9))
    model.prefill(long, prompt_of(70, seed=1))
    feeds = [Feed(short, [3, 4, 5], [-1, 0, 0]), Feed(long, [6, 7])]
    model.forward(feeds, ["layer:2", "last"])
    first = calls[-1][0]
    sibling = model.sibling()
    other = sibling.open()
    sibling.prefill(other, prompt_of(21, seed=2))
    sibling.forward([Feed(other, [8, 9, 10])], ["layer:2", "last"])
    second = calls[-1][0]
    alone = [model.forwards.fast.run(first), model.forwards.fast.run(second)]
    together = model.forwards.fast.run_all([first, second])
    for (logits, taps), (expected, states) in zip(together, alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(logits, expected, strict=True))
        assert taps.keys() == states.keys() and all(torch.equal(taps[name], states[name]) for name in taps)


def test_a_forward_in_two_windows_has_the_bits_of_a_whole_one() -> None:
    model = HuggingFaceModel(network("llama"))
    a, b = model.open(), model.open()
    for sequence in (a, b):
        model.prefill(sequence, prompt_of(13))
    tree, parents = [5, 6, 7, 8], [-1, 0, 0, 1]
    expected = model.forward([Feed(a, tree, parents)])[0].logits
    model.forward_part([Feed(b, tree[:3], parents[:3])], LayerPlan(stop=2))
    assert torch.equal(model.forward([Feed(b, tree, parents)])[0].logits, expected)


# -- what is not run in it ---------------------------------------------------------------------------------------------

Fault = Callable[[NativeForward], None]


def _wrong(layers: list[int], name: str, value: Any) -> Fault:
    def plant(fast: NativeForward) -> None:
        for layer in layers:
            assert getattr(fast._layers[layer], name) != value
            setattr(fast._layers[layer], name, value)

    return plant


@pytest.mark.parametrize(
    "fault",
    [
        _wrong([0], "mask", 1),
        _wrong([1], "scaling", 0.3),
        _wrong([0, 1, 2, 3], "activation", 0),
        _wrong([1], "added", 0.5),
        _wrong([0], "turn", 1),
    ],
    ids=["mask", "scaling", "activation", "added", "turn"],
)
def test_a_native_forward_with_other_numbers_is_refused(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = HuggingFaceModel(network("gemma3_text"), lean=False).forwards
    fast = NativeForward(LeanForward(owner))
    assert agrees(owner, fast)
    fault(fast)
    assert not agrees(owner, fast)
    real = NativeForward.__init__
    monkeypatch.setattr(NativeForward, "__init__", lambda self, twin: (real(self, twin), fault(self))[0])
    refused = HuggingFaceModel(network("gemma3_text", vocab_size=98))
    assert refused.forward_name == "lean" and [refusal.path for refusal in refused.refused] == ["native forward"]
    assert refused.forwards.native_off == refused.refused[0].why


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: network("gemma2", attn_logit_softcapping=5.0), "soft cap"),
        (lambda: network("llama", head_dim=12), "head dimension 12"),
        (lambda: network("mixtral"), "MLPs are not gated"),
        (lambda: network("llama", hidden_act="relu"), "activation is ReLU"),
        (lambda: network("llama").float(), "states are float32"),
    ],
)
def test_what_it_does_not_cover_stays_on_the_lean_forward(model: Callable[[], Any], reason: str) -> None:
    owner = HuggingFaceModel(model())
    assert owner.forward_name == "lean" and reason in owner.forwards.native_off and owner.refused == ()


def test_products_in_blocks_stay_on_the_lean_forward() -> None:
    owner = HuggingFaceModel(network("llama"), exact="bitwise")
    assert owner.forward_name == "lean" and "in blocks" in owner.forwards.native_off


def test_weights_of_pytorchs_layouts_stay_on_the_lean_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda *_: "plain")
    owner = HuggingFaceModel(network("llama"))
    assert owner.forward_name == "lean" and "laid out" in owner.forwards.native_off
    with pytest.raises(NotCoveredError, match="laid out"):
        NativeForward(LeanForward(owner.forwards))


def test_new_weights_are_taken() -> None:
    model, other = HuggingFaceModel(new_model("llama", **SHAPE).to(torch.bfloat16)), new_model("llama", seed=5, **SHAPE)
    model.take_weights(other.to(torch.bfloat16))
    assert model.forwards.fast.name == "native"
    fresh = HuggingFaceModel(other)
    for rows, expected in zip(outputs(model), outputs(fresh), strict=True):
        assert torch.equal(rows.logits, expected.logits)
