"""Weights in every layout of this machine equal their plain twins: alone, in blocks, in place of a model's layers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of
from forwards import compare, outputs
from hybrids import hybrid
from torch import Tensor, nn

import foretoken as ft
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear import packing, product_costs
from foretoken.models.linear.draft_packing import packed
from foretoken.models.linear.layouts import HalfLayout, halved, usable_layouts
from foretoken.models.linear.packing import (
    Home,
    PackedLinear,
    Packing,
    Projection,
    num_parameters,
    pack_linears,
    unpack_linears,
    weight_bytes,
)
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.native import why_not
from foretoken.models.variants import second_weights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [(layout, dtype) for dtype in DTYPES for layout in usable_layouts(dtype)]
"""The layouts of this machine; ``half`` needs FBGEMM and ``onednn`` oneDNN, which other machines lack."""
PACKED = [case for case in CASES if case[0] != "plain"]


def random_weight(out: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """As trained checkpoints have them: numbers of bfloat16, whatever dtype they are kept in."""
    generator = torch.Generator().manual_seed(out + inner)
    return (torch.randn(out, inner, generator=generator) / inner**0.5).bfloat16().to(dtype)


def inputs(rows: int, width: int, dtype: torch.dtype, seed: int = 2) -> Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(seed)).to(dtype)[:rows]


@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_layout_multiplies(layout: str, dtype: torch.dtype, bias: bool, blocks: bool) -> None:
    weight, offset = random_weight(96, 64, dtype), inputs(1, 96, dtype, 5)[0] if bias else None
    projection = Projection(weight, offset, layout, blocks)
    assert projection.layout.name == layout
    assert torch.equal(projection.weight, weight) and projection.weight.dtype == dtype
    for rows in (1, 2, 3, 5, 6, 7, 8, 13, 33, 64):
        x, residual = inputs(rows, 64, dtype), inputs(rows, 96, dtype, seed=3)
        expected = x.double() @ weight.double().T + (0.0 if offset is None else offset.double())
        output, added = projection(x), projection.plus(x, residual)
        assert output.dtype == added.dtype == dtype
        # One rounding to the dtype, for the sum with the residual one more.
        step = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        assert torch.allclose(output.double(), expected, rtol=step, atol=step)
        assert torch.allclose(added.double(), expected + residual.double(), rtol=2 * step, atol=4 * step)
        assert torch.equal(residual, inputs(rows, 96, dtype, seed=3)), "the residual was written to"
        assert torch.equal(x, inputs(rows, 64, dtype)), "the activations were written to"


SHAPES = [(96, 48), (64, 64), (97, 320), (320, 512), (300, 1024)]


@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_blocks_a_rows_bits_do_not_depend_on_the_other_rows(
    layout: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """A row has the same bits among 1 row or 64, first or last: ``exact="bitwise"`` rests on this."""
    out, inner = shape
    projection = Projection(random_weight(out, inner, dtype), None, layout, blocks=True)
    x, residual = inputs(64, inner, dtype), inputs(64, out, dtype, seed=3)
    alone = torch.cat([projection(row[None]) for row in x])
    sums = torch.cat([projection.plus(row[None], r[None]) for row, r in zip(x, residual, strict=True)])
    for rows in (1, 2, 3, 5, 6, 7, 8, 13, 31, 32, 33, 64):
        assert torch.equal(projection(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(projection(x[64 - rows :]), alone[64 - rows :]), f"the last {rows} rows"
        assert torch.equal(projection.plus(x[:rows], residual[:rows]), sums[:rows])


def test_without_blocks_they_may() -> None:
    """The control: kernels, and the order of their sums, depend on the number of rows."""
    differing = 0
    for layout, dtype in CASES:
        for out, inner in SHAPES:
            x = inputs(64, inner, dtype)
            projection = Projection(random_weight(out, inner, dtype), None, layout)
            alone = torch.cat([projection(row[None]) for row in x])
            differing += int((projection(x) != alone).any(-1).sum())
    assert differing > 0


# -- float16 weights ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif("half" not in usable_layouts(torch.bfloat16), reason="this build of PyTorch has no FBGEMM")
def test_float16_holds_bfloat16_weights_exactly() -> None:
    weight = random_weight(64, 32)
    weight[0, 0], weight[1, 1], weight[2, 2] = 3.0, 2.0**-31, 2.0**-60  # the largest, just held, far too small
    layout = HalfLayout(weight)
    assert len(layout._rounded) == 1 and torch.equal(layout.weight, weight)
    x = torch.eye(32)[:3]
    assert torch.equal(layout(x, None).T, weight[:, :3].float().where(weight[:, :3] != 2.0**-60, 0.0))
    assert layout.num_bytes == weight.nbytes


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.float() * 1.0001,  # more significant bits than float16 has
        lambda w: w.fill_(float("nan")),
        lambda w: w.fill_(float("inf")),
        lambda w: w * 2.0**100,
        lambda w: w * 2.0**-100,
        lambda w: w * torch.logspace(0, -40, w.shape[1], 2).bfloat16(),  # a range that no scale covers
    ],
)
def test_what_float16_does_not_hold_is_laid_out_otherwise(spoil: Any) -> None:
    weight = spoil(random_weight(48, 32))
    assert halved(weight) is None
    for layout in ("auto", "half"):
        projection = Projection(weight, None, layout)
        assert projection.layout.name != "half"
        assert torch.equal(projection.weight, weight) or bool(weight.isnan().any())


def test_a_weight_of_zeros_is_held() -> None:
    weight = halved(torch.zeros(4, 4))
    assert weight is not None and weight.scale == 1.0


# -- in place of a model's layers --------------------------------------------------------------------------------------


@pytest.fixture(params=PACKED, ids=str)
def case(request: Any) -> tuple[str, torch.dtype]:
    layout, dtype = request.param
    return layout, dtype


def half_model(dtype: torch.dtype, name: str = "llama", **changes: Any) -> Any:
    return new_model(name, **changes).bfloat16().to(dtype)


def test_packing_a_model_keeps_its_outputs(case: tuple[str, torch.dtype]) -> None:
    layout, dtype = case
    plain, packed = (half_model(dtype, tie_word_embeddings=True) for _ in range(2))
    names, size = [n for n, _ in packed.named_modules()], weight_bytes(packed)
    assert pack_linears(packed, Packing(layout)) == 3 * 7  # the head shares its weight with the embedding and stays
    assert isinstance(packed.model.layers[0].mlp.down_proj, PackedLinear)
    assert num_parameters(packed) == num_parameters(plain) == sum(p.numel() for p in plain.parameters())
    assert weight_bytes(packed) <= size == weight_bytes(plain)
    ids = torch.tensor([prompt_of(12)])
    with torch.inference_mode():
        expected, got = plain(ids).logits, packed(ids).logits
    assert float((expected - got).square().mean().sqrt() / expected.std()) < 0.05
    assert HuggingFaceModel(packed).forwards.fast is None
    assert unpack_linears(packed) == 21 and [n for n, _ in packed.named_modules()] == names
    for weight, original in zip(packed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, original)


@pytest.mark.parametrize("layout", usable_layouts(torch.bfloat16))
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "qwen2"])
def test_fused_projections_take_the_place_of_layers(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one copy of the weights afterwards, the public forward still runs, and all of it can be undone."""
    monkeypatch.setattr(product_costs, "fastest_layout", lambda *_: layout)
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda *_: layout)
    plain, network = half_model(torch.bfloat16, name), half_model(torch.bfloat16, name)
    before = weight_bytes(network)
    model = HuggingFaceModel(network, in_place=True)
    assert model.is_lean and model.forwards.run_dtype == (torch.float32 if layout == "half" else torch.bfloat16)
    head = network.lm_head.weight.nbytes if network.config.tie_word_embeddings and layout != "plain" else 0
    biases = sum(
        p.nbytes for n, p in plain.named_parameters() if n.endswith("bias")
    )  # which widen with the activations
    assert before <= weight_bytes(network) <= before + head + biases
    reference = HuggingFaceModel(plain, lean=False)
    compare(outputs(model), outputs(reference), 0.1)
    packed_public = HuggingFaceModel(network, lean=False)
    compare(outputs(packed_public), outputs(reference), 0.1)
    model.unpack()
    assert not model.is_lean and not any(isinstance(m, PackedLinear) for m in network.modules())
    for weight, original in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, original)
    assert num_parameters(network) == num_parameters(plain)
    compare(outputs(model), outputs(reference), 1e-6)


@pytest.mark.parametrize("layout", usable_layouts(torch.bfloat16))
def test_memory_counts_copies_of_weights_beside_unchanged_layers(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each: in place there are none, and a plain weight that is multiplied as it is is no copy."""
    monkeypatch.setattr(product_costs, "fastest_layout", lambda *_: layout)
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda *_: layout)
    network = half_model(torch.bfloat16, "qwen2", tie_word_embeddings=False)
    weights = sum(weight.nbytes for weight in network.parameters())
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    copied = [
        parameter.nbytes
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and (layout != "plain" or name.endswith(fused))
        for parameter in module.parameters()
    ]
    llm = ft.load(network, None)
    assert isinstance(llm.target, HuggingFaceModel) and llm.target.is_lean
    biases = sum(p.nbytes for name, p in network.named_parameters() if name.endswith("bias"))
    more = biases if layout == "half" else 0  # they widen with the activations
    assert llm.memory()["weight_bytes"] == weights + sum(copied) + more > 1.5 * weights
    llm.target.unpack()
    assert llm.memory()["weight_bytes"] == weights
    in_place = ft.load(network, None, pack=True)
    joined = biases if layout == "plain" else 0  # of layers that keep their own, but share their weights
    assert in_place.target.copied_bytes == joined and in_place.memory()["weight_bytes"] == weights + more + joined


def test_a_refused_lean_forward_leaves_the_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, network = half_model(torch.bfloat16), half_model(torch.bfloat16)
    real = Packing.projection
    monkeypatch.setattr(Packing, "projection", lambda self, *linears: _scaled(real(self, *linears)))
    monkeypatch.setattr("foretoken.models.forward.public.pack_linears", lambda *_: 0)
    assert not HuggingFaceModel(network, in_place=True).is_lean
    for weight, original in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, original)


def _scaled(projection: Projection) -> Projection:
    projection._product = lambda x: 1.5 * projection.layout(x, projection.bias)  # type: ignore[method-assign]
    projection.least = 10**6  # never the short way
    return projection


def test_the_wrong_rows_are_caught() -> None:
    """The control of :meth:`Home.take_place`: layers that swap their outputs give other logits."""
    plain, network = half_model(torch.bfloat16), half_model(torch.bfloat16)
    mlp = network.model.layers[0].mlp
    projection = Packing("half" if "half" in usable_layouts(torch.bfloat16) else "plain").projection(
        mlp.up_proj, mlp.gate_proj
    )
    Home(network).take_place([mlp.gate_proj, mlp.up_proj], projection)
    ids = torch.tensor([prompt_of(12)])
    with torch.inference_mode():
        expected, got = plain(ids).logits, network(ids).logits
    assert float((expected - got).square().mean().sqrt() / expected.std()) > 0.05


@pytest.mark.parametrize("kind", ["projection", "quantised projection", "draft projection"])
def test_layers_with_and_without_biases_share_a_projection(kind: str) -> None:
    if kind == "draft projection" and why_not() is not None:
        pytest.skip(f"no kernels: {why_not()}")
    torch.manual_seed(0)
    layers = [nn.Linear(32, out, bias=bias) for out, bias in ((48, True), (16, False), (16, True))]
    quantised = second_weights._QuantisedPacking(scheme=second_weights.Scheme("8"))
    product = {"projection": Packing("plain").projection, "quantised projection": quantised.projection}.get(
        kind, packed
    )
    x = torch.randn(3, 32)
    expected = torch.cat([layer(x) for layer in layers], 1)
    assert (product(*layers)(x) - expected).norm() < 0.01 * expected.norm()


def test_a_deeper_model_is_not_walked_through_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk for every layer would be what takes longest when a deep model is loaded."""
    walks: list[int] = []
    real = packing.children_of
    monkeypatch.setattr(packing, "children_of", lambda model: walks.append(1) or real(model))
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda dtype, shapes, names: names[-1])
    counts = []
    for layers in (2, 5):
        walks.clear()
        model = HuggingFaceModel(new_model("llama", num_hidden_layers=layers).bfloat16(), in_place=True)
        assert model.is_lean and any(isinstance(module, PackedLinear) for module in model.model.modules())
        counts.append(len(walks))
    assert counts[0] == counts[1] <= 2


def test_there_is_never_a_second_copy_of_all_weights() -> None:
    """Layers give their weights up one by one while a model is packed."""
    network = half_model(torch.bfloat16)
    alive: list[int] = []
    real = Packing.projection

    def counted(self: Packing, *linears: Any) -> Projection:
        gc.collect()
        alive.append(sum(type(m) is nn.Linear and m.weight.numel() > 0 for m in network.modules()))
        return real(self, *linears)

    Packing.projection = counted  # type: ignore[method-assign]
    try:
        model = HuggingFaceModel(network, in_place=True)
    finally:
        Packing.projection = real  # type: ignore[method-assign]
    assert model.is_lean
    if model.forwards.packing.layout != "plain":
        assert alive == sorted(alive, reverse=True) and alive[-1] == 1 and alive[0] == 22


# -- through the front door --------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A machine on which the last layout of bfloat16 wins by far."""
    layout = usable_layouts(torch.bfloat16)[-1]
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda dtype, shapes, names: names[-1])
    yield layout


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_that_is_handed_in_is_packed_on_request_only(name: str, measured: str) -> None:
    network = half_model(torch.bfloat16, name)
    before = [type(m) for m in network.modules()]
    for pack in ("auto", False):
        ft.load(network, "ngram", pack=pack).generate(prompt_of(5), max_new_tokens=4)
        assert [type(m) for m in network.modules()] == before
    if name == "gpt2":  # Transformers' Conv1D; its head is tied to the embedding
        return
    llm = ft.load(network, "ngram", pack=True)
    packed = any(isinstance(m, PackedLinear) for m in network.modules())
    assert packed == (measured != "plain")
    llm.generate(prompt_of(5), max_new_tokens=4)
    llm.target.unpack()
    assert [type(m) for m in network.modules()] == before
    assert len(llm.generate(prompt_of(5), max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_packed_models_write_the_same_greedy_and_seeded_text(measured: str, tmp_path: Path) -> None:
    half_model(torch.bfloat16).save_pretrained(tmp_path)
    llm = {spec: ft.load(str(tmp_path), spec) for spec in (None, "ngram", "recycling")}
    assert all(m.target.is_lean for m in llm.values())  # type: ignore[attr-defined]
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        texts = [
            m.generate([prompt_of(9), prompt_of(4, 1)], max_new_tokens=24, ignore_eos=True, **options)
            for m in llm.values()
        ]
        assert [o.token_ids for o in texts[0]] == [o.token_ids for o in texts[1]] == [o.token_ids for o in texts[2]]


def test_trained_drafters_find_a_packed_head(measured: str) -> None:
    """A vocabulary projection that was packed still has its weight, for distributions and for gradients."""
    network = half_model(torch.bfloat16, tie_word_embeddings=False)
    plain = network.lm_head.weight.detach().clone()
    expected = TargetParts(HuggingFaceModel(half_model(torch.bfloat16, tie_word_embeddings=False))).fingerprint()
    parts = TargetParts(HuggingFaceModel(network, in_place=True))
    assert parts.fingerprint() == expected
    assert torch.equal(parts.head.weight, plain)
    hidden = torch.randn(3, plain.shape[1], requires_grad=True)
    logits = parts.logits(hidden)
    assert torch.allclose(logits, hidden @ plain.float().T, atol=1e-5)
    logits.sum().backward()
    assert hidden.grad is not None
    drafts = parts.draft_logits(hidden.detach())
    assert drafts.dtype == torch.float32
    assert float((drafts - logits).detach().abs().max()) < 0.05 * float(logits.detach().std())


@pytest.mark.parametrize(
    ("network", "complaint"),
    [
        (lambda: half_model(torch.float64), "float64 weights on cpu cannot be packed"),
        (lambda: nn.Sequential(nn.Embedding(3, 3)), "is not a Transformers model"),
        (lambda: half_model(torch.bfloat16).to("meta"), "has no weights"),
    ],
)
def test_models_that_cannot_be_packed_are_refused_whole(network: Any, complaint: str) -> None:
    model = network()
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=complaint) as caught:
        ft.load(model, None, pack=True)
    assert "\n" not in str(caught.value) and [type(m) for m in model.modules()] == before


def test_other_values_of_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="pack must be 'auto', True or False"):
        ft.load("builtin", None, pack="yes")


def test_new_weights_for_packed_layers_are_refused_until_they_are_unpacked() -> None:
    """With ``strict=False`` they were dropped, and a model of old and new weights served."""
    model = nn.ModuleDict({"up": PackedLinear(Projection(random_weight(8, 16), None))})
    weights = {"up.weight": random_weight(8, 16) * 0.5}
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"^up.weight is packed: call llm.target.unpack\(\) first, or .*pack=False"
        ):
            model.load_state_dict(weights, strict=strict)
    assert model.load_state_dict({"other": torch.zeros(1)}, strict=False).unexpected_keys == ["other"]
    unpack_linears(model)
    model.load_state_dict(weights)
    assert torch.equal(model["up"].weight, weights["up.weight"])


def test_a_model_is_not_unpacked_below_a_running_request() -> None:
    model = HuggingFaceModel(half_model(torch.bfloat16), in_place=True)
    sequence = model.open()
    with pytest.raises(ValueError, match="requests are running"):
        model.unpack()
    model.release(sequence)
    model.unpack()


@pytest.mark.parametrize("name", ["mamba2", "bloom"])
def test_models_without_trees_are_packed_and_unpacked_too(name: str, measured: str) -> None:
    network = half_model(torch.bfloat16, name) if name == "bloom" else hybrid(name, dtype=torch.bfloat16)
    before = [type(m) for m in network.modules()]
    plain = ft.load(network, None).generate(prompt_of(5), max_new_tokens=4, ignore_eos=True)
    assert [type(m) for m in network.modules()] == before
    llm = ft.load(network, "ngram", pack=True)
    assert any(isinstance(m, PackedLinear) for m in network.modules()) == (measured != "plain")
    assert len(llm.generate(prompt_of(5), max_new_tokens=4, ignore_eos=True).token_ids) == len(plain.token_ids)
    llm.target.unpack()
    assert [type(m) for m in network.modules()] == before


def test_new_weights_for_quantised_layers_are_refused() -> None:
    model = new_model("llama")
    weights = model.state_dict()
    quantise_linears(model, "int8")
    with pytest.raises(ValueError, match=r"_proj.weight is quantised: load the model without quantize="):
        model.load_state_dict(weights, strict=False)
