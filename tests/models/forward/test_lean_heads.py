"""Trained heads: what their decoder layer gives when it is fused is what the module gives, while it learns too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of
from forwards import InFloat64, compare
from torch import Tensor, nn

from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.hydra import PrefixLayer
from foretoken.methods.drafters.nets.kangaroo import KangarooConfig, KangarooNet
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.models.base import Feed, Rows
from foretoken.models.forward.heads.features import FeatureModel, HeadForward
from foretoken.models.forward.heads.lean import LeanHead
from foretoken.models.forward.heads.mtp import TargetLayerModule
from foretoken.models.forward.lean import SPARED
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import has_bfloat16
from foretoken.models.native import attention as native_attention
from foretoken.models.network.call import NetworkCall

SHAPE = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "ffn": 64, "rope_theta": 500.0}
WIDE = {**SHAPE, "heads": 2, "kv_heads": 1, "head_dim": 32}
"""Heads that the native attention takes."""
VARIANTS = {
    "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "partial_rotary_factor": 0.5},
    **dict.fromkeys(("attention_bias", "mlp_bias", "head_norms", "norm_before_residual", "norm_output"), True),
}
NETS: dict[str, Callable[[Any], nn.Module]] = {
    "eagle": lambda shape: EagleNet(EagleConfig(**shape)),
    "mtp": lambda shape: MtpNet(MtpConfig(**shape)),
    "eagle3": lambda shape: Eagle3Net(Eagle3Config(**shape, vocab_size=97, layers="1,2,3", share_head=True)),
    "eagle3 in variants": lambda shape: Eagle3Net(
        Eagle3Config(**shape, **VARIANTS, vocab_size=97, layers="1,2,3", share_head=True)
    ),
    "kangaroo": lambda shape: KangarooNet(KangarooConfig(**{**shape, "ffn": 0})),
    "hydra": lambda shape: PrefixLayer(LayerConfig(**shape)),
}


def net_of(name: str, seed: int = 0, shape: Any = SHAPE) -> nn.Module:
    """A network with random weights, in float64."""
    torch.manual_seed(seed)
    net, generator = NETS[name](shape).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator).double() * 0.3)
    return net


def head_of(net: nn.Module) -> FeatureModel:
    """The network as a language model in float64."""
    target = HuggingFaceModel(new_model("llama").double())
    parts = TargetParts(target)
    model = FeatureModel(net, parts, target, project=parts.logits)
    model.forwards.dtype = torch.float64
    return model


class PlainForward(HeadForward):
    """The readable twin: the network's own forward over padded rows, with the cache between keys and attention."""

    def run(self, call: NetworkCall) -> tuple[list[Tensor], dict[str, Tensor]]:
        """As :meth:`HeadForward.run`."""
        first, embeddings = call.first, self.parts.embedding(call.ids).float()

        def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return call.cache.update(key, value, 0)

        output = self.model(embeddings, call.states, call.positions, call.masks[""], keep)
        return call.feed_logits(self.project(self.model.head_state(output[:, first:]))), {"state": output}


class PlainHead(FeatureModel):
    """The model of the twin."""

    kind = PlainForward


def plain(model: FeatureModel) -> PlainHead:
    """The twin of a head, with the same network."""
    head = PlainHead(model.model, model.parts, model, project=model.project)
    head.forwards.dtype = model.dtype
    return head


def outputs(model: FeatureModel) -> list[Rows]:
    """A chain, ragged trees, growth of one of them, much padding, one node."""
    rng = random.Random(0)

    def feed(sequence: Any, count: int, old: int = 0, wanted: int | None = None) -> Feed:
        states = torch.randn(count, 48, generator=torch.Generator().manual_seed(count), dtype=model.dtype)
        parents = [rng.randrange(-1, old + i) for i in range(count)]
        return Feed(sequence, prompt_of(count, seed=count), parents, wanted=wanted, states=states)

    a, b = model.open(), model.open()
    rows = []
    for sequence, length in ((a, 9), (b, 3)):
        states = torch.randn(length, 48, generator=torch.Generator().manual_seed(length), dtype=model.dtype)
        rows += model.forward([Feed(sequence, prompt_of(length), states=states, wanted=1)])
        model.commit(sequence, range(length))
    rows += model.forward([feed(a, 5), feed(b, 2)])
    rows += model.forward([feed(b, 3, old=2, wanted=2), feed(a, 1, old=5, wanted=0)])
    for sequence in (a, b):
        model.commit(sequence, ())
    rows += model.forward([feed(a, SPARED + 8), feed(b, 2)])
    model.commit(a, ())
    rows += model.forward([feed(a, 1)])
    for sequence in (b, a):
        model.release(sequence)
    return rows


@pytest.mark.parametrize("name", NETS)
def test_a_head_is_its_own_module(name: str) -> None:
    with InFloat64():
        model = head_of(net_of(name))
        compare(outputs(model), outputs(plain(model)), 1e-9)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("change", ["step", "load", "replace"])
def test_a_head_follows_weights_that_change(name: str, change: str) -> None:
    with InFloat64():
        net = net_of(name)
        model = head_of(net)
        before = outputs(model)
        if change == "step":
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            for weight in net.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        elif change == "load":
            net.load_state_dict(net_of(name, seed=1).state_dict())
        else:
            for weight in net.parameters():
                weight.data = weight.data * 1.5
        after = outputs(model)
        compare(after, outputs(plain(model)), 1e-9)
    assert not torch.allclose(before[0].taps["state"], after[0].taps["state"])


def test_a_layer_that_does_not_follow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    with InFloat64():
        net = net_of("mtp")
        model = head_of(net)
        outputs(model)
        stale = model.forwards.head.layer  # type: ignore[union-attr]
        monkeypatch.setattr(LeanHead, "layer", property(lambda self: stale))
        net.load_state_dict(net_of("mtp", seed=1).state_dict())
        with pytest.raises(AssertionError):
            compare(outputs(model), outputs(plain(model)), 1e-9)


def test_fused_weights_are_made_once() -> None:
    with InFloat64():
        model = head_of(net_of("eagle"))
        outputs(model)
        assert model.forwards.head is not None
        layer = model.forwards.head.layer
        outputs(model)
        assert model.forwards.head.layer is layer


needs_kernels = pytest.mark.skipif(
    not (has_bfloat16() and native_attention.fits(torch.bfloat16, 64)), reason="this CPU has no native bfloat16 kernels"
)


@needs_kernels
@pytest.mark.parametrize("name", NETS)
def test_a_head_in_bfloat16_says_nearly_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer runs in bfloat16 where that is faster; its trained weights stay as they are."""
    target = HuggingFaceModel(new_model("llama").float())
    parts, outputs_of, net = TargetParts(target), dict[bool, list[Rows]](), net_of(name, shape=WIDE).float()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(0.3 if weight.ndim == 2 else 1.0)  # scores of ordinary size
    for narrow in (False, True):
        monkeypatch.setattr(LeanHead, "_gains", lambda self, narrow=narrow: narrow)
        model = FeatureModel(net, parts, target)
        model.native = None
        outputs_of[narrow] = outputs(model)
        assert model.forwards.head is not None and model.forwards.head.dtype == (
            torch.bfloat16 if narrow else torch.float32
        )
        assert all(weight.dtype == torch.float32 for weight in model.model.parameters())
    for wide_rows, narrow_rows in zip(outputs_of[False], outputs_of[True], strict=True):
        exact, near = wide_rows.taps["state"], narrow_rows.taps["state"]
        assert near.dtype == torch.float32 and not torch.equal(exact, near)
        assert (exact - near).norm() < 0.01 * exact.norm()


def test_small_layers_stay_in_float32() -> None:
    """What bfloat16 saves there is less than the casts cost."""
    assert LeanHead.of(net_of("eagle").float()).dtype == torch.float32  # type: ignore[union-attr]


def test_a_layer_of_the_targets_runs_through_its_own_module() -> None:
    """Native modules hold a Transformers layer, which is not one of ours."""
    network = new_model("llama")
    target = HuggingFaceModel(network)
    model = FeatureModel(TargetLayerModule(network), TargetParts(target), target)
    assert model.forwards.head is None
    rows = model.forward([Feed(model.open(), [1, 2], states=torch.zeros(2, 48))])[0]
    assert rows.logits.shape == (2, target.vocab_size) and rows.taps["state"].shape == (2, 48)
