"""Random drafters of every trained method for a tiny target on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import foretoken
from foretoken.loading import load_model
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.peagle import PeagleConfig, PeagleNet
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.methods.drafters.nets.uno import UnoConfig, UnoNet
from foretoken.models.forward.parts import TargetParts

VOCAB, SIZE, LAYERS, HEADS, KV_HEADS, FFN = 96, 32, 4, 4, 2, 48
PROMPT = [5, 9, 2, 7, 5, 9, 2]
BLOCKS: dict[str, tuple[Any, Any]] = {
    "dflash": (BlockConfig, BlockNet),
    "dflash2": (Dflash2Config, Dflash2Net),
    "dspark": (DsparkConfig, DsparkNet),
}
DRAFT_TOKENS = torch.arange(3, 93, 3)


def save_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of four layers."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    return folder


def randomised(net: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return net


def save_net(method: str, folder: Path, target: Path, **config: Any) -> Path:
    """A drafter of the method, as training would leave it."""
    parts = TargetParts(load_model(target, dtype="float32"))
    layer = asdict(LayerConfig.of_target(parts.config))
    measured = {}
    if method == "medusa":
        shape: Any = MedusaConfig(**{"hidden_size": SIZE, "vocab_size": VOCAB, "heads": 3, **config})
        net: nn.Module = MedusaHeads(shape)
        if shape.draft_vocab_size:
            net.get_buffer("vocabulary").copy_(DRAFT_TOKENS.flip(0)[: shape.draft_vocab_size])
        measured = {"accuracies": [[0.5, 0.3, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]]}
    elif method == "eagle":
        shape = EagleConfig(**{**layer, **config})
        net = EagleNet(shape)
    elif method == "uno":
        updated = {"self_attn.q_proj": [SIZE, SIZE], "mlp.down_proj": [SIZE, FFN]}
        noise = {"places": 3, "noise": "mask", "mask_token": 7}
        shape = UnoConfig(VOCAB, LAYERS, updated, **{"rank": 3, "alpha": 6.0, **noise, **config})
        net = UnoNet(shape)
    elif method in BLOCKS:
        kind, net_class = BLOCKS[method]
        block = {"vocab_size": VOCAB, "layers": 2, "taps": "2,3", "block": 4, "mask_token": 7, "head_dim": 16}
        shape = kind(**{**layer, **block, **config})
        net = net_class(shape)
        if shape.draft_vocab:
            rows = DRAFT_TOKENS[: shape.draft_vocab]
            net.get_buffer("d2t").copy_(rows - torch.arange(len(rows)))
            net.get_buffer("t2d").zero_()[rows] = True
    else:
        base = {**layer, "vocab_size": VOCAB, "draft_vocab": 30, "layers": "1,2,4"}
        if method == "peagle":
            shape = PeagleConfig(**{**base, "num_layers": 3, "mask_token": 7, "places": 8, **config})
            net = PeagleNet(shape)
        else:
            shape = Eagle3Config(**{**base, **config})
            net = Eagle3Net(shape)
        if shape.draft_vocab:
            net.choose(DRAFT_TOKENS[: shape.draft_vocab])
    save_drafter(folder, method, asdict(shape), randomised(net), parts.fingerprint(), measured)
    return folder


def shapes(file: Path) -> dict[str, list[int]]:
    """Names and shapes in a safetensors file."""
    return {name: list(value.shape) for name, value in load_file(file).items()}


def drafts(target: Path, spec: str) -> tuple[list[int], list[tuple[Sequence[int], Sequence[int]]]]:
    """New tokens, and every tree (tokens and parents) that was drafted for them."""
    llm = foretoken.load(target, spec, controller="constant", dtype="float32")
    drafter: Any = llm.drafter
    seen, propose = [], drafter.propose_batch

    def recorded(*args: Any) -> Any:
        trees = propose(*args)
        seen.extend((tree.tokens, tree.parents) for tree in trees)
        return trees

    drafter.propose_batch = recorded
    return llm.generate(PROMPT, max_new_tokens=24).token_ids, seen


def same_drafter(first: Path, second: Path) -> bool:
    """Bit for bit."""
    left, right = (load_file(folder / "model.safetensors") for folder in (first, second))
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
