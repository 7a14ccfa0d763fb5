"""Block networks in our library: states, logits and candidates are those of the networks, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import new_model
from torch import Tensor, nn

from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net, DynamicConv
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.models.base import Feed, SequenceState
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.native_net import BlockRows, NativeBlockNet
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import library

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

NEAR = 0.03
"""Of a norm: weights in 8 bits."""
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "ffn": 64,
    "rope_theta": 500.0,
    "vocab_size": 97,
    "layers": 2,
    "taps": "1,2",
    "block": 4,
    "mask_token": 7,
}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dflash": (BlockNet, BlockConfig, {}),
    "causal": (BlockNet, BlockConfig, {"causal": "1", "from_anchor": True}),
    "mixed": (BlockNet, BlockConfig, {"causal": "1,0", "reach": "3,0", "own_mask": True}),
    "own head": (BlockNet, BlockConfig, {"draft_vocab": 40, "own_head": True, "input_scale": 2.0}),
    "dflash2": (Dflash2Net, Dflash2Config, {"own_mask": True, "group": 16}),
    "wide dflash2": (Dflash2Net, Dflash2Config, {"conv": 3, "group": 48, "from_anchor": True}),
    "dspark": (DsparkNet, DsparkConfig, {"head": "gated"}),
}
LENGTHS = (9, 3, 6)
SIZES = {"mask_embedding": 1.0, "base_kernel": 0.3, "kernel_projection": 0.04, "": 0.1}
"""Of random weights, by a part of their names."""


def net_of(case: str, seed: int = 0, **changes: Any) -> Any:
    """A network with random weights, which rounding its weights to 8 bits changes little."""
    kind, config, options = CASES[case]
    net = kind(config(**{**SHAPE, **options, **changes}))
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            (size,) = [size for part, size in SIZES.items() if part in name][:1]
            weight.add_(torch.randn(weight.shape, generator=draws) * size)
    return net.float().eval()


def model_of(net: Any, ids: Tensor | None = None, top: int = 0, native: bool = True) -> BlockModel:
    target = HuggingFaceModel(new_model("llama").float())
    parts = TargetParts(target)
    weight = None if net.lm_head is None else net.lm_head.weight.detach()
    model = BlockModel(net, parts, target, DraftHead(parts, ids if net.vocabulary is None else net.vocabulary, weight))
    model.top = top
    assert model.forward_name == "native" and model.native_off == "", model.native_off
    if not native:
        model.native = None
    return model


def states_of(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, 48, generator=torch.Generator().manual_seed(seed))


def texts_of(model: BlockModel, lengths: Any = LENGTHS) -> list[SequenceState]:
    """Texts that were read in two pieces."""
    texts = [model.open() for _ in lengths]
    for first in (True, False):
        pieces = [slice(0, 2) if first else slice(2, length) for length in lengths]
        places = [
            states_of(length, seed)[piece] for seed, (length, piece) in enumerate(zip(lengths, pieces, strict=True))
        ]
        feeds = [Feed(text, [1] * len(x), wanted=0, states=x) for text, x in zip(texts, places, strict=True)]
        model.forward(feeds)
        for text, x in zip(texts, places, strict=True):
            model.commit(text, range(len(x)))
    return texts


def blocks_of(model: BlockModel, lengths: Any = LENGTHS) -> list[BlockRows]:
    """A block behind every text; its last rows guess."""
    texts = texts_of(model, lengths)
    return model.blocks(texts, [5 + i for i in range(len(texts))], 4, range(1, 4))


def off(some: list[BlockRows], others: list[BlockRows]) -> float:
    """The largest distance of states and logits, as a share of their size."""
    pairs = [(a.taps["state"], b.taps["state"]) for a, b in zip(some, others, strict=True)]
    pairs += [(a.logits, b.logits) for a, b in zip(some, others, strict=True)]
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
def test_a_block_says_what_its_network_says(level: str, case: str) -> None:
    net = net_of(case)
    assert 0 < off(blocks_of(model_of(net)), blocks_of(model_of(net, native=False))) < NEAR


@pytest.mark.parametrize("case", CASES)
def test_one_text_says_what_its_network_says(case: str) -> None:
    """No mask is made for it where its rows see everything."""
    net = net_of(case)
    assert 0 < off(blocks_of(model_of(net), (7,)), blocks_of(model_of(net, native=False), (7,))) < NEAR


@pytest.mark.parametrize("case", ["mixed", "dflash2"])
def test_a_row_has_the_same_bits_in_any_company(level: str, case: str) -> None:
    model = model_of(net_of(case))
    texts = texts_of(model)
    together = model.blocks([texts[0], texts[2]], [5, 6], 4, range(1, 4))
    for text, anchor, both in zip((texts[0], texts[2]), (5, 6), together, strict=True):
        (alone,) = model.blocks([text], [anchor], 4, range(1, 4))
        assert torch.equal(alone.logits, both.logits) and torch.equal(alone.taps["state"], both.taps["state"])


@pytest.mark.parametrize("case", ["dflash", "mixed"])
def test_a_window_leaves_out_what_the_twin_leaves_out(case: str) -> None:
    """Layers with a reach keep that."""
    net = net_of(case)
    model, twin = model_of(net), model_of(net, native=False)
    whole = blocks_of(model)
    model.window = twin.window = Window(4, 1)
    bounded = blocks_of(model)
    assert off(bounded, blocks_of(twin)) < NEAR < 2 * NEAR < off(whole, bounded)


@pytest.mark.parametrize("ids", [None, torch.tensor([5, 90, 7, 33, 64, 2])])
@pytest.mark.parametrize("top", [1, 6])
def test_candidates_are_those_of_the_logits(ids: Tensor | None, top: int) -> None:
    for block in blocks_of(model_of(net_of("dflash2"), ids, top)):
        assert block.best is not None
        values, places = block.best
        beliefs = torch.log_softmax(block.logits, -1)
        assert values.shape == places.shape == (3, top) and block.logits.shape[-1] == (97 if ids is None else 6)
        assert torch.allclose(values, beliefs.topk(top).values, atol=1e-4)
        assert torch.allclose(beliefs.gather(-1, places), values, atol=1e-4)


@pytest.mark.parametrize("case", ["dflash", "dflash2"])
@pytest.mark.parametrize("counted", [True, False])
def test_weights_that_change_are_followed(case: str, counted: bool) -> None:
    net = net_of(case)
    model = model_of(net)
    before = blocks_of(model)
    with torch.no_grad():
        for weight in net.parameters():
            (weight if counted else weight.data).mul_(1.3)
    after = blocks_of(model)
    assert isinstance(model.native, NativeBlockNet) and off(after, before) > 2 * NEAR
    assert off(after, blocks_of(model_of(net))) == 0, "what a new one says"


FAULTS = {
    "convolutions see the row itself only": lambda net: [
        each.base_kernel.data[:, 1:].zero_() for each in net.modules() if isinstance(each, DynamicConv)
    ],
    "convolutions do not follow their rows": lambda net: [
        each.kernel_projection.weight.data.zero_() for each in net.modules() if isinstance(each, DynamicConv)
    ],
    "keys have no norm of their own": lambda net: [
        layer.self_attn.k_norm.weight.data.fill_(1.0) for layer in net.layers
    ],
    "queries are keys": lambda net: [
        layer.self_attn.q_norm.weight.data.copy_(layer.self_attn.k_norm.weight) for layer in net.layers
    ],
    "masks are the token's embedding": lambda net: net.mask_embedding.data.zero_(),
    "a layer is another": lambda net: net.layers[1].load_state_dict(net.layers[0].state_dict()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_network_that_is_another_is_seen(fault: str) -> None:
    """The controls of the tests above."""
    other = net_of("dflash2")
    FAULTS[fault](other)
    assert off(blocks_of(model_of(other)), blocks_of(model_of(net_of("dflash2"), native=False))) > NEAR


def test_what_is_not_covered_says_why() -> None:
    target = HuggingFaceModel(new_model("llama").float())
    parts = TargetParts(target)

    def why(net: nn.Module) -> str:
        model = BlockModel(net, parts, target)
        assert model.native is None and model.forward_name == "public"
        return model.native_off

    assert "sinks" in why(net_of("dflash", sinks=True))
    assert "must be a multiple of 16 channels, not 8" in why(net_of("dflash2", group=8))
    assert "head dimension 12" in why(net_of("dflash", head_dim=12, heads=4))
    hooked = net_of("dflash")
    hooked.fc.register_forward_hook(lambda *_: None)
    assert "hooks" in why(hooked)


def test_a_hook_is_called_from_then_on() -> None:
    net = net_of("dflash")
    model = model_of(net)
    before, calls = blocks_of(model), list[int]()
    net.norm.register_forward_hook(lambda *_: calls.append(1))
    model.context([states_of(3), states_of(3, 1)])  # as before every reading
    after = blocks_of(model)
    assert calls and model.native is None and "hooks" in model.native_off and 0 < off(before, after) < NEAR
