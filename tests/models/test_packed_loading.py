"""Bfloat16 models that the lean forward does not cover are packed when they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from foretoken.loading import load_model
from foretoken.models.base import Feed
from foretoken.models.packing import PackedLinear, can_pack


def test_loaded_bfloat16_model_is_packed(tmp_path: Path) -> None:
    if not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)):
        pytest.skip("this CPU has no packed bfloat16 products")
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    plain = Gemma2ForCausalLM(config).to(torch.bfloat16).eval()
    plain.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert any(isinstance(m, PackedLinear) for m in model.model.modules())  # type: ignore[attr-defined]
    sequence = model.open()
    got = model.forward([Feed(sequence, [1, 2, 3, 4])])[0].logits.float()
    wanted = plain(torch.tensor([[1, 2, 3, 4]])).logits[0].detach().float()
    assert float((got - wanted).abs().max()) < 0.05 * float(wanted.std())
