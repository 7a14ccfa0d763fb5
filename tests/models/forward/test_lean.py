"""The lean forward equals the public one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PLAIN_ROPE, checkpoint, new_model, prompt_of
from forwards import TAPS, compare, outputs
from torch import nn
from torch.nn import functional as F

import foretoken as ft
from foretoken.models.base import Feed
from foretoken.models.forward import lean as lean_module
from foretoken.models.forward.lean import build_lean
from foretoken.models.forward.lean_parts import LeanRmsNorm
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import Packing, Projection

FAMILIES = ["llama", "llama_gqa_tied", "mistral_sliding", "qwen2", "qwen2_sliding", "qwen3"]
TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.1}
"""Root mean square difference of a row in standard deviations; a wrong mask or norm is off by one or more."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FAMILIES)
def test_lean_is_the_public_forward(name: str, dtype: str, tmp_path: Path) -> None:
    loaded = checkpoint(tmp_path, name, dtype)
    assert isinstance(loaded, HuggingFaceModel)
    assert loaded.forwards.fast is not None, "the check against the public forward refused it"
    for exact in ("distribution", "bitwise"):
        lean = HuggingFaceModel(loaded.model, exact=exact)
        plain = HuggingFaceModel(loaded.model, exact=exact, lean=False)
        compare(outputs(lean), outputs(plain), TOLERANCE[dtype])


@pytest.mark.parametrize("lean", [True, False])
def test_siblings_share_weights_and_nothing_else(lean: bool, tmp_path: Path) -> None:
    loaded = checkpoint(tmp_path, "llama", "float32")
    assert isinstance(loaded, HuggingFaceModel)
    alone = outputs(HuggingFaceModel(loaded.model, lean=lean))
    model = HuggingFaceModel(loaded.model, lean=lean)
    sibling = model.sibling()
    a, b = model.open(), model.open()
    for sequence in (a, b):
        model.prefill(sequence, prompt_of(9))
    model.forward([Feed(a, [3])])
    compare(outputs(sibling), alone, 1e-4)
    rows, counted = model.forward([Feed(b, [4])])[0], model.run_rows
    assert sibling.model is model.model and sibling.open().row == 0
    model.release(a)  # a row is freed, and the last one takes its place: in this model alone
    model.commit(b, [0])
    assert b.row == 0 and model.run_rows == counted
    fresh = HuggingFaceModel(loaded.model, lean=lean)
    sequence = fresh.open()
    fresh.prefill(sequence, prompt_of(9))
    compare([rows], fresh.forward([Feed(sequence, [4])]), 1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 8.0}),
        ("gemma2", {"use_bidirectional_attention": True}),
    ],
    ids=str,
)
def test_what_lean_does_not_cover_runs_publicly(name: str, changes: dict[str, Any]) -> None:
    model = HuggingFaceModel(new_model(name, **changes))
    assert model.forwards.fast is None
    compare(outputs(model), outputs(HuggingFaceModel(model.model, lean=False)), 1e-4)


def test_rope_variants_are_covered() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    half = {"partial_rotary_factor": 0.5}
    for rope in (
        {"rope_type": "linear", "factor": 4.0},
        {**llama3, "original_max_position_embeddings": 32},
        yarn,
        half,
        {"rope_type": "dynamic", "factor": 2.0},
    ):
        model = HuggingFaceModel(new_model("llama", rope_parameters={**PLAIN_ROPE, **rope}))
        assert model.forwards.fast is not None
        compare(outputs(model), outputs(HuggingFaceModel(model.model, lean=False)), 1e-4)


def test_large_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_module, "MAX_PARAMETERS", 1000)
    model = HuggingFaceModel(new_model("llama"))
    assert model.forwards.fast is None
    [refused] = model.describe()["refused"]
    assert "its layers must stay as they are" in refused["why"] and "pack=True" in refused["why"]


@pytest.mark.parametrize("fault", ["bias", "norm", "activation"])
def test_a_lean_forward_with_other_numbers_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the check at load time: a model that looks covered, and is not."""
    model = new_model("qwen2")
    layer = model.model.layers[1]
    if fault == "activation":
        layer.mlp.forward = lambda x: layer.mlp.down_proj(F.gelu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
    elif fault == "bias":
        real = Packing.projection
        monkeypatch.setattr(Packing, "projection", lambda *a: without_bias(real(*a)))
    else:
        layer.input_layernorm.forward = lambda x: x
    for dtype in (torch.float32, torch.bfloat16):
        owner = HuggingFaceModel(model.to(dtype), lean=False).forwards
        assert build_lean(owner) is None, dtype


def without_bias(projection: Projection) -> Projection:
    projection.bias = None
    return projection


@pytest.mark.parametrize("names", [("q_proj",), ("lm_head",)])
def test_adapted_linear_layers_are_left_alone(names: tuple[str, ...]) -> None:
    model = new_model("llama")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names:
                setattr(parent, name, Adapted(child))
    assert HuggingFaceModel(model).forwards.fast is None


class Adapted(nn.Linear):
    """A linear layer that does more than it seems to."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(("lean", "rows"), [(True, 33), (False, 60)])
@pytest.mark.parametrize("wanted", [None, 1])
def test_padding_is_left_out(lean: bool, rows: int, wanted: int | None) -> None:
    """Trees of thirty and three nodes: the lean forward runs 33 rows, the public one twice thirty; same outputs."""
    model = HuggingFaceModel(new_model("llama"), lean=lean)
    reference, pairs = HuggingFaceModel(new_model("llama"), lean=lean), []
    for count in (30, 3):
        for owner in (model, reference):
            sequence = owner.open()
            owner.prefill(sequence, prompt_of(5 + count))
            pairs.append((owner, Feed(sequence, prompt_of(count, seed=count), wanted=wanted)))
    before = model.run_rows
    together = model.forward([feed for owner, feed in pairs if owner is model], TAPS)
    assert model.run_rows - before == rows
    alone = [reference.forward([feed], TAPS)[0] for owner, feed in pairs if owner is reference]
    compare(together, alone, 1e-4)


def test_generated_tokens_are_the_same() -> None:
    model = new_model("llama")
    lean, plain = HuggingFaceModel(model), HuggingFaceModel(model, lean=False)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 40, "ignore_eos": True, "temperature": temperature, "seed": 3}
        first, second = (ft.load(m, drafter="ngram").generate(prompt_of(9), **options) for m in (lean, plain))
        assert first.token_ids == second.token_ids


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_is_the_models_own(dtype: torch.dtype) -> None:
    module = nn.RMSNorm(48, eps=1e-5).to(dtype)
    module.variance_epsilon = module.eps  # as Transformers calls it
    module.weight.data = torch.rand(48, generator=torch.Generator().manual_seed(0)).to(dtype)
    own, plain = LeanRmsNorm(module, Packing()), LeanRmsNorm(module, Packing(blocks=True))
    assert own.by_length and not plain.by_length
    for scale in (0.0, 1e-4, 1.0, 1e4):
        x = scale * torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        got, expected = own(x.to(dtype)), plain(x.to(dtype))
        assert got.dtype == dtype and got.shape == x.shape
        exact = x.to(dtype).double()
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight.detach().double()
        # No further from the exact value than PyTorch's own, but for one rounding.
        worst = float((expected.double() - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max())
        assert float((got.double() - exact).abs().max()) <= worst
