"""A target that holds its next token in one layer's output alone, and a drafter that reads it there; none is trained.

The text is a cycle: every token has one that follows it.  Hidden states have two halves of V places each.  The first
holds the token itself, which the vocabulary projection reads; the second holds the token that follows behind layer 2,
and nothing behind the others.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.tiny_tokenizer import tokenizer
from foretoken.loading import load_model
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.forward.parts import TargetParts

TELLING, LAYERS = 2, 4
STRENGTH = 4.0


def follower() -> Tensor:
    """[V] the token that follows each."""
    order = torch.randperm(len(tokenizer()), generator=torch.Generator().manual_seed(1))
    return torch.empty_like(order).scatter_(0, order, order.roll(-1))


def successions() -> Tensor:
    """[V, V] one-hot tokens to those that follow them."""
    return torch.eye(len(tokenizer()))[follower()].T


@torch.no_grad()
def save_telling_target(folder: Path) -> Path:
    """Layers whose attention does nothing; MLPs write the second half behind layer 2 and clear it behind layer 3."""
    size = len(tokenizer())
    config = LlamaConfig(
        vocab_size=size, hidden_size=2 * size, intermediate_size=size, num_hidden_layers=LAYERS, head_dim=8,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    network, identity = LlamaForCausalLM(config), torch.eye(size)
    nothing = torch.zeros(size, size)
    network.model.embed_tokens.weight.copy_(torch.cat([identity, nothing], 1))
    network.lm_head.weight.copy_(torch.cat([STRENGTH * successions(), nothing], 1))
    for depth, layer in enumerate(network.model.layers, 1):
        layer.self_attn.o_proj.weight.zero_()
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            part.weight.copy_(torch.cat([identity, nothing], 1))
        # Behind its norm a token alone has the length sqrt(2 V), and sqrt(V) beside another one of length 1.
        length = torch.tensor((2.0 if depth == TELLING else 1.0) * size).sqrt()
        sign = {TELLING: 1.0, TELLING + 1: -1.0}.get(depth, 0.0)
        written = sign * successions() / (torch.nn.functional.silu(length) * length)
        layer.mlp.down_proj.weight.copy_(torch.cat([nothing, written], 0))
    network.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def save_telling_drafter(folder: Path, target: Path, depth: int = TELLING) -> Path:
    """One draft a round: of the last place that was read, two before it, the second half's token and what follows."""
    size = len(tokenizer())
    parts = TargetParts(load_model(target, dtype="float32"))
    shape = {
        "hidden_size": 2 * size, "heads": 1, "kv_heads": 1, "head_dim": size + size % 2, "ffn": 2, "rope_theta": 1e4,
        "eps": 1e-6, "vocab_size": size, "layers": 1, "taps": str(depth), "block": 2, "own_mask": True, "reach": "2",
    }  # fmt: skip
    net = BlockNet(BlockConfig(**shape))
    for weight in net.parameters():
        weight.zero_()
    for norm in (net.hidden_norm, net.norm, net.layers[0].input_layernorm):
        norm.weight.fill_(1.0)
    net.fc.weight.copy_(torch.eye(2 * size))
    attention = net.layers[0].self_attn
    attention.v_proj.weight[:size, size:] = torch.eye(size)
    attention.o_proj.weight[:size, :size] = torch.eye(size)
    save_drafter(folder, "dflash", shape, net, parts.fingerprint())
    return folder
