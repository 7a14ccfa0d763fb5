"""Bfloat16 models that the lean forward does not cover are packed when they are loaded, and draft models compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM

from foretoken.loading import draft_models, load_model
from foretoken.loading.draft_models import build_draft_model
from foretoken.models.base import Feed, Rows
from foretoken.models.checks.cache_trial import KEPT, ROWS
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear import packing
from foretoken.models.linear.layouts import usable_layouts
from foretoken.models.linear.packing import PackedLinear


def test_what_has_no_lean_forward_is_packed_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "fastest_layout", lambda dtype, shapes, names: names[-1])
    if len(usable_layouts(torch.bfloat16)) == 1:
        pytest.skip("this machine has the plain layout alone")
    torch.manual_seed(0)
    config = OlmoConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    plain = OlmoForCausalLM(config).to(torch.bfloat16).eval()
    plain.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model, HuggingFaceModel) and not model.is_lean
    assert any(isinstance(m, PackedLinear) for m in model.model.modules())
    sequence = model.open()
    got = model.forward([Feed(sequence, [1, 2, 3, 4])])[0].logits.float()
    expected = plain(torch.tensor([[1, 2, 3, 4]])).logits[0].detach().float()
    assert float((got - expected).abs().max()) < 0.05 * float(expected.std())


@pytest.mark.parametrize(
    ("dtype", "has", "step_s"),
    [("bfloat16", True, 1.0), ("bfloat16", True, 3.0), ("bfloat16", False, 1.0), ("float32", True, 1.0)],
)
def test_products_of_a_packed_draft_model_are_compiled_when_it_is_loaded(
    dtype: str, has: bool, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every number of rows, as oneDNN does it for each: first drafts would else take two to three times as long.

    Where the CPU has no products of bfloat16 of its own, or slower ones, the draft model is a float32 one.
    """
    measured_shapes: list[tuple[int, ...]] = []

    def measured(kind: torch.dtype, shapes: list[tuple[int, ...]]) -> float:
        measured_shapes.extend(shapes)
        return step_s if kind == torch.bfloat16 else 2.0

    monkeypatch.setattr(packing, "has_bfloat16", lambda: has)
    monkeypatch.setattr(draft_models, "step_s", measured)
    if dtype == "bfloat16" and "onednn" not in usable_layouts(torch.bfloat16):
        pytest.skip("this CPU has no packed bfloat16 products")
    target = load_model("builtin", dtype=dtype)
    rows: list[int] = []
    forward = HuggingFaceModel.forward

    def counted(self: HuggingFaceModel, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        rows.append(sum(len(feed.tokens) for feed in feeds))
        return forward(self, feeds, taps)

    monkeypatch.setattr(HuggingFaceModel, "forward", counted)
    draft = build_draft_model(None, target, "builtin", None, None)
    packs = dtype == "bfloat16" and has and step_s < 2.0
    assert ((8192, 192) in measured_shapes) == (dtype == "bfloat16" and has) and all(
        len(shape) == 2 for shape in measured_shapes
    )
    assert set(rows) == (set(range(1, 33)) if packs else {ROWS - KEPT})  # those of the trial
    assert draft.dtype == (torch.bfloat16 if packs else torch.float32)
    fresh = draft.open()
    draft.prefill(fresh, [1, 2, 3])
    assert fresh.tokens == [1, 2, 3] and not fresh.scratch_tokens


@pytest.mark.parametrize(("machine", "expected"), [("x86_64", False), ("AMD64", False), ("aarch64", True)])
def test_only_x86_is_asked_what_it_multiplies(machine: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.platform, "machine", lambda: machine)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    assert packing.has_bfloat16.__wrapped__() == expected
