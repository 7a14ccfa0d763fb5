"""Folders as they are on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.formats.tiny_nets import LAYERS, SIZE, VOCAB

HEADS, KV_HEADS, DIM = 4, 2, 16


def hub_folder(folder: Path, config: dict[str, Any] | None = None, **inner: Any) -> Path:
    """A random DFlash folder as z-lab writes it: no file of it names our library, and it says ``qwen3``."""
    generator = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)).to(torch.bfloat16)

    tensors = {"fc.weight": weight(SIZE, 2 * SIZE), "hidden_norm.weight": weight(SIZE), "norm.weight": weight(SIZE)}
    for layer in ("layers.0", "layers.1"):
        tensors |= {f"{layer}.{name}_layernorm.weight": weight(SIZE) for name in ("input", "post_attention")}
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": weight(DIM) for name in "qk"}
        rows = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": weight(count, SIZE) for name, count in rows.items()}
        tensors[f"{layer}.self_attn.o_proj.weight"] = weight(SIZE, HEADS * DIM)
        tensors |= {f"{layer}.mlp.{name}_proj.weight": weight(40, SIZE) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = weight(SIZE, 40)
    fields = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "vocab_size": VOCAB, "hidden_act": "silu",
        "attention_bias": False, "num_target_layers": LAYERS, "block_size": 5, "tie_word_embeddings": True,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [0, 2], **inner}, **(config or {}),
    }  # fmt: skip
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return folder
