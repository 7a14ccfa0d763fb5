"""Drafters written by the ``speculators`` package: our networks compute what its networks computed.

``benchmarks/speculators_fixtures.py`` made the folders, with version 0.9.0 of the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_nets import save_target
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import foretoken
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.peagle import PeagleConfig, PeagleNet
from foretoken.methods.drafters.nets.store import load_weights
from foretoken.training.formats import import_drafter

FIXTURES = Path(__file__).parent / "speculators"
KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3Config, Eagle3Net),
    "peagle": (PeagleConfig, PeagleNet),
    "dflash": (BlockConfig, BlockNet),
    "dflash2": (Dflash2Config, Dflash2Net),
    "dspark": (DsparkConfig, DsparkNet),
}
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the drafters' sizes."""
    return save_target(tmp_path_factory.mktemp("speculators") / "target", **SHAPE)


EAGLE3_1 = ("norm_before_residual", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
CHANGED = {*EAGLE3_1, "norm_before_fc", "head_norms", "num_layers"}


def imported(name: str, target: Path, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Our network with the drafter's weights, and the package's inputs and outputs."""
    read = import_drafter(FIXTURES / name, folder / "ours", target)
    config_class, net_class = KINDS[read["method"]]
    description = json.loads((folder / "ours" / "drafter.json").read_text())
    net = net_class(config_class(**description["config"])).eval()
    load_weights(folder / "ours", net)
    assert foretoken.load(target, read["drafter"], dtype="float32").generate([5, 9, 2], max_new_tokens=8).token_ids
    return net, load_file(FIXTURES / f"{name}.safetensors")


def near(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-4 * float(theirs.std()))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle3", {}),
        ("eagle3_before_residual", {"norm_before_residual": True, "norm_before_fc": True, "head_norms": True}),
        ("eagle3_3.1", dict.fromkeys(EAGLE3_1, True) | {"num_layers": 2}),
    ],
)
@torch.no_grad()
def test_eagle3(name: str, changes: dict[str, Any], small: Path, tmp_path: Path) -> None:
    """Two steps over a text; the second one reads the first one's outputs, and of it every row sees itself only."""
    net, theirs = imported(name, small, tmp_path)
    defaults = Eagle3Config(16, 2, 1, 8, 24, vocab_size=48, layers="1,2,3")
    assert {key for key in changes if getattr(net.config, key) != changes[key]} == set()
    assert all(getattr(net.config, key) == getattr(defaults, key) for key in CHANGED - changes.keys())
    assert (net.config.rope is None) == (name != "eagle3_3.1")
    tokens, features = theirs["tokens"], net.fuse(list(theirs["hidden"].chunk(3, -1)))
    n, cached = tokens.shape[1], dict[int, list[tuple[Tensor, Tensor]]]()
    causal = torch.full((n, n), -torch.inf).triu(1)
    diagonal = torch.full((n, n), -torch.inf).fill_diagonal_(0.0)

    def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cached.setdefault(layer, []).append((key, value))
        keys, values = zip(*cached[layer], strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    for step, mask in enumerate((causal, torch.cat([causal, diagonal], 1))):
        read = torch.cat([tokens[:, step:], tokens.new_zeros(1, step)], 1)
        rows = net.embed_tokens(read)
        stored = keep if net.num_layers > 1 else lambda key, value: keep(0, key, value)
        features = net(rows, features, torch.arange(n)[None] + step, mask[None, None], stored)
        assert near(net.lm_head(net.head_state(features)), theirs["logits"][step])


@torch.no_grad()
def test_peagle(small: Path, tmp_path: Path) -> None:
    net, theirs = imported("peagle", small, tmp_path)
    assert (net.config.places, net.config.mask_token, net.config.num_layers) == (3, 5, 2)
    features = net.fuse(list(theirs["hidden"].chunk(3, -1)))
    masks = net.mask_feature.expand(1, 2, -1)
    tokens = torch.cat([theirs["tokens"], torch.full((1, 2), net.config.mask_token)], 1)
    rows = tokens.shape[1]
    output = net(net.embed_tokens(tokens), torch.cat([features, masks], 1), torch.arange(rows)[None])
    assert near(net.lm_head(net.head_state(output)), theirs["logits"])


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
@torch.no_grad()
def test_blocks(name: str, small: Path, tmp_path: Path) -> None:
    """A block after a text, whose positions are keys and values of every layer."""
    net, theirs = imported(name, small, tmp_path)
    assert (net.config.rope is None) == (name != "dflash")
    context = net.context(theirs["hidden"].chunk(3, -1))
    start, rows = context.shape[1], theirs["embeddings"].shape[0]
    before = [net.keys(context, torch.arange(start)[None], layer) for layer in range(net.config.layers)]

    def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([before[layer][0], key], 2), torch.cat([before[layer][1], value], 2)

    masks = [torch.zeros(1, 1, rows, start + rows)] * net.config.layers
    states = net(theirs["embeddings"][None], start + torch.arange(rows)[None], masks, keep)
    assert near(states, theirs["states"])
    head = theirs["head"] if net.lm_head is None else net.lm_head.weight
    logits = states @ head.T
    assert near(logits, theirs["logits"])
    last = theirs["tokens"][0, start : start + rows]  # the tokens before the rows' predictions
    if name == "dspark":
        query, _ = net.query(last, states[0], None)
        assert near((query @ net.successors.T)[None], theirs["bias"])
        assert near(net.confidences(last, states[0])[None], theirs["confidence"])
    if name == "dflash2":
        last = torch.cat([last[:1], last[:-1]])
        candidates = theirs["candidates"][0]
        query, _ = net.query(last, states[0], None)
        scores = logits[0].gather(1, candidates) + torch.einsum("nr,nkr->nk", query, net.successors[candidates])
        assert near(scores[None], theirs["scores"])


@torch.no_grad()
def test_mtp(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, num_hidden_layers=4, max_position_embeddings=64, eos_token_id=None, bos_token_id=None)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "target")
    read = import_drafter(FIXTURES / "mtp", tmp_path / "ours", tmp_path / "target")
    drafter: Any = foretoken.load(tmp_path / "target", read["drafter"], dtype="float32").drafter
    net, theirs = drafter.model.model, load_file(FIXTURES / "mtp.safetensors")
    states = theirs["hidden"]
    for step, expected in enumerate(theirs["states"]):
        n = expected.shape[1]
        states = net(theirs["embeddings"][None, step + 1 : step + 1 + n], states[:, :n], torch.arange(n)[None])
        assert near(states, expected)
