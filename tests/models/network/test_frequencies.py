"""Rotary frequencies of our own layers: those of Transformers' module for the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from foretoken.methods.drafters.nets.decoder import LayerConfig, rotary, turned
from foretoken.models.network.frequencies import rotary_frequencies

DIM, THETA, LENGTH = 16, 500.0, 64
LISTS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8}
SHORT = {"original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
    "yarn": {"factor": 4.0, **SHORT},
    "yarn with factors": {
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        **SHORT,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {**LISTS, **SHORT},
}


def ours(rope: dict[str, Any], positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    config = LayerConfig(32, 2, 2, DIM, 8, THETA, rope=rope)
    return turned(x, *rotary(positions, config, x))


@pytest.mark.parametrize("name", ROPES)
def test_heads_are_turned_as_transformers_turns_them(name: str) -> None:
    """Within the length of the first training, after which two of the types change their frequencies."""
    parameters = {"rope_type": name.split()[0], **ROPES[name]}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={**parameters, "rope_theta": THETA},
    )
    positions = torch.arange(12)[None]
    x = torch.randn(1, 2, 12, DIM, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(config)(x, positions))
    assert torch.allclose(ours({**parameters, "max_position_embeddings": LENGTH}, positions, x), expected, atol=1e-6)
    plain, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(LlamaConfig(
        hidden_size=32, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": THETA}
    ))(x, positions))  # fmt: skip
    assert torch.allclose(plain, expected, atol=1e-6) == (name in ("default", "dynamic"))


def test_a_part_of_a_head_is_turned() -> None:
    """As in StableLM, whose heads turn their first numbers."""
    config = PreTrainedConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=LENGTH)
    config.rope_parameters = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25}
    positions, x = torch.arange(12)[None], torch.randn(1, 2, 12, DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = StableLmRotaryEmbedding(config)(x, positions)
    first, _ = apply_rotary_pos_emb(x[..., :4], x[..., :4], cos, sin)
    got = ours({"partial_rotary_factor": 0.25}, positions, x)
    assert torch.allclose(got[..., :4], first, atol=1e-6) and torch.equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "spiral"}, "of the type 'spiral', which is not supported: it can be default, .*llama3"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' cannot have these parameters: .*low_freq_factor"),
        ({"rope_type": "linear", "factor": "many"}, "'linear' cannot have these parameters"),
        (
            {"rope_type": "longrope", **SHORT, **LISTS, "short_factor": [1.0, 2.0]},
            "'longrope' cannot have these parameters",
        ),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01 rotates 0 of 16 numbers"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor = 2 rotates 32 of 16 numbers"),
    ],
)
def test_parameters_that_make_no_embedding(rope: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LayerConfig(32, 2, 2, DIM, 8, THETA, rope=rope)


def test_frequencies_are_not_inference_tensors() -> None:
    """A network that learns may read them after one that drafts."""
    with torch.inference_mode():
        frequencies, _ = rotary_frequencies(DIM, 123.0)
    assert not frequencies.is_inference()
    with torch.device("meta"):
        assert rotary_frequencies(DIM, 124.0)[0].device.type == "cpu"
