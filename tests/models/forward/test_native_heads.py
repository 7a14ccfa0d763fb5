"""Heads in one native call: what their networks say, whatever is beside them, and with the weights of the moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of
from forwards import InFloat64
from test_lean_heads import NETS, VARIANTS, WIDE, net_of, outputs
from torch import Tensor, nn

from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.models.base import Feed
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.mtp import TargetLayerModule
from foretoken.models.forward.heads.native import HeadRows, NativeHead
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import attention, library

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

NEAR = 0.03
"""Of a norm: weights in 8 bits, on networks of 48 numbers a state."""


def network(name: str, seed: int = 0) -> nn.Module:
    """One with random weights in float32, whose scores are of ordinary size."""
    net = net_of(name, seed, WIDE).float()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(0.3 if weight.ndim == 2 else 1.0)
    return net


def head_of(net: nn.Module, ids: Tensor | None = None, top: int = 0) -> FeatureModel:
    """The network as the library runs it."""
    target = HuggingFaceModel(new_model("llama").float())
    parts = TargetParts(target)
    model = FeatureModel(net, parts, target, DraftHead(parts, ids))
    assert model.native is not None, model.native_off
    assert model.forward_name == "native" and model.native_off == ""
    model.top = top
    return model


def twin_of(model: FeatureModel, net: nn.Module | None = None) -> FeatureModel:
    """What ``test_lean_heads`` compares with the network's own forward."""
    head = DraftHead(model.parts, model.project.ids)
    twin = FeatureModel(model.model if net is None else net, model.parts, model, head)
    twin.native, twin.window = None, model.window
    return twin


def whole(row: Any) -> Tensor:
    return row.whole() if isinstance(row, HeadRows) else row.logits


def off(x: Tensor, y: Tensor) -> float:
    """The distance of two tensors as a share of their size."""
    return float((x.float() - y.float()).norm() / y.float().norm())


def distance(some: Any, others: Any) -> float:
    """The largest distance of states and logits."""
    pairs = [(a.taps["state"], b.taps["state"]) for a, b in zip(some, others, strict=True)]
    pairs += [(whole(a), b.logits) for a, b in zip(some, others, strict=True) if len(b.logits)]
    return max(off(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", NETS)
def test_a_head_says_what_its_network_says(level: str, name: str) -> None:
    """Chains, ragged trees, growth of one of them, much padding, one node."""
    model = head_of(network(name))
    twin = twin_of(model)
    if name == "hydra":  # nothing is projected behind its layer
        for head in (model, twin):
            forward = head.forward
            head.forward = lambda feeds, run=forward: run([dataclasses.replace(f, wanted=0) for f in feeds])  # type: ignore[method-assign]
    rows = outputs(model)
    assert all(isinstance(row, HeadRows) for row in rows)
    assert 0 < distance(rows, outputs(twin)) < NEAR


@pytest.mark.parametrize("changes", [{}, VARIANTS, {"own_embedding": True}])
def test_a_head_of_several_layers_runs_all_of_them(level: str, changes: dict[str, Any]) -> None:
    """Its twin is the module, which the lean forward leaves as it is."""
    shape = Eagle3Config(**WIDE, **changes, vocab_size=97, layers="1,2,3", share_head=True, num_layers=3)
    torch.manual_seed(0)
    net = Eagle3Net(shape)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.add_(torch.randn(weight.shape) * (1.0 if "embed" in name else 0.1))
    model = head_of(net)
    twin = twin_of(model)
    assert twin.forwards.head is None and twin.forwards.depth == 3
    rows, expected = outputs(model), outputs(twin)
    assert 0 < distance(rows, expected) < NEAR
    net.layers[1].o_proj.weight.data.zero_()  # the last layer counts
    assert distance(outputs(twin), expected) > NEAR
    assert distance(outputs(model), outputs(twin)) < NEAR


@pytest.mark.parametrize("ids", [None, torch.tensor([5, 90, 7, 33, 64, 2])])
@pytest.mark.parametrize("top", [1, 3, 6])
def test_best_tokens_are_those_of_the_logits(level: str, ids: Tensor | None, top: int) -> None:
    model = head_of(network("mtp"), ids, top)
    checked = 0
    for row in outputs(model):
        beliefs = torch.log_softmax(row.whole(), -1)  # type: ignore[attr-defined]
        assert len(row.tokens) == len(row.values) == len(beliefs)  # type: ignore[attr-defined]
        for tokens, values, belief in zip(row.tokens, row.values, beliefs, strict=True):  # type: ignore[attr-defined]
            best = belief.topk(top).values
            assert torch.allclose(torch.tensor(values), best, atol=1e-4)
            places = tokens if ids is None else [ids.tolist().index(token) for token in tokens]
            assert len(set(places)) == top
            assert torch.allclose(belief[torch.tensor(places)], best, atol=1e-4)
            checked += 1
    assert checked > 10


def test_the_first_of_equal_tokens_wins(level: str) -> None:
    """And more tokens than there are, are not told."""
    model = head_of(network("eagle"), torch.arange(40))
    packed = model.project.native()
    packed.packed.fill_(128)  # zero weights: all logits are equal
    model.top = 64
    row = model.forward([Feed(model.open(), [1], states=torch.ones(1, 48))])[0]
    assert row.tokens == [list(range(40))]  # type: ignore[attr-defined]
    assert torch.allclose(torch.tensor(row.values), torch.tensor(1 / 40).log().expand(1, 40), atol=1e-5)  # type: ignore[attr-defined]


def test_a_draft_vocabulary_smaller_than_the_tree_is_wide() -> None:
    model = head_of(network("eagle"), torch.tensor([9, 4]), top=5)
    row = model.forward([Feed(model.open(), [1], states=torch.ones(1, 48))])[0]
    assert sorted(row.tokens[0]) == [4, 9]  # type: ignore[attr-defined]


def test_a_row_has_the_same_bits_in_any_company(level: str) -> None:
    """Alone, beside other nodes and beside other texts, of which one does not take part."""
    model = head_of(network("eagle3"))
    states = torch.randn(9, 48, generator=torch.Generator().manual_seed(3))
    texts = [model.open() for _ in range(3)]
    for text, length in zip(texts, (5, 9, 3), strict=True):
        model.forward([Feed(text, prompt_of(length), wanted=0, states=states[:length])])
        model.commit(text, range(length))
    trees = [[-1, 0, 0, 1], [-1, -1, 1, 2]]
    feeds = [
        Feed(text, prompt_of(4, seed=i), parents, states=states[i : i + 4])
        for i, (text, parents) in enumerate(zip((texts[0], texts[2]), trees, strict=True))
    ]
    together = model.forward(feeds)
    for text in texts:
        model.commit(text, ())
    for feed, both in zip(feeds, together, strict=True):
        (alone,) = model.forward([feed])
        model.commit(feed.sequence, ())
        assert torch.equal(alone.taps["state"], both.taps["state"]) and torch.equal(alone.logits, both.logits)


def test_a_window_leaves_out_what_the_twin_leaves_out() -> None:
    model = head_of(network("mtp"))
    model.window = Window(4, 2)
    bounded = outputs(model)
    assert distance(bounded, outputs(twin_of(model))) < NEAR
    model.window = Window()
    assert distance(outputs(model), bounded) > 2 * NEAR


@pytest.mark.parametrize("pieces", [[100], [1] * 100, [64, 36], [33, 3, 64]])
def test_what_is_guessed_does_not_depend_on_the_pieces_in_which_a_text_was_read(pieces: list[int]) -> None:
    model = head_of(network("eagle"))
    states = torch.randn(101, 48, generator=torch.Generator().manual_seed(1))
    text, read = model.open(), 0
    for size in pieces:
        (row,) = model.forward(
            [Feed(text, prompt_of(100)[read : read + size], wanted=0, states=states[read : read + size])]
        )
        model.commit(text, range(size))
        read += size
        assert isinstance(row, HeadRows)
    (last,) = model.forward([Feed(text, [4], states=states[100:])])
    assert torch.equal(last.logits, _read_at_once().logits)


@cache
def _read_at_once() -> HeadRows:
    model = head_of(network("eagle"))
    states = torch.randn(101, 48, generator=torch.Generator().manual_seed(1))
    text = model.open()
    model.forward([Feed(text, prompt_of(100), wanted=0, states=states[:100])])
    model.commit(text, range(100))
    (last,) = model.forward([Feed(text, [4], states=states[100:])])
    assert isinstance(last, HeadRows)
    return last


# -- weights that change -----------------------------------------------------------------------------------------------


def step(net: nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.03)
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def load(net: nn.Module) -> None:
    net.load_state_dict(network("mtp", seed=1).state_dict())


def replace(net: nn.Module) -> None:
    net.eh_proj.weight = nn.Parameter(net.eh_proj.weight.detach() * 1.5)  # type: ignore[operator]


def give_data(net: nn.Module) -> None:
    net.layer.o_proj.weight.data = net.layer.o_proj.weight.data * -2  # type: ignore[operator]


def write_data(net: nn.Module) -> None:
    """Not counted by PyTorch."""
    for weight in net.parameters():
        weight.data.mul_(1.3)


CHANGES = [step, load, replace, give_data, write_data]


@pytest.mark.parametrize("change", CHANGES)
def test_a_head_follows_weights_that_change(change: Callable[[nn.Module], None]) -> None:
    net = network("mtp")
    model = head_of(net)
    before = outputs(model)
    change(net)
    after = outputs(model)
    assert model.native is not None
    assert distance(after, outputs(twin_of(model, net))) < NEAR
    assert distance(after, before) > 2 * NEAR


@pytest.mark.parametrize("change", CHANGES)
def test_a_head_that_does_not_follow_is_seen(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    net = network("mtp")
    model = head_of(net)
    monkeypatch.setattr(NativeHead, "renew", lambda self: None)
    change(net)
    assert distance(outputs(model), outputs(twin_of(model, net))) > 2 * NEAR


def test_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, described = head_of(network("eagle")), []
    monkeypatch.setattr(NativeHead, "describe", lambda self: described.append(self))
    outputs(model)
    assert not described


# -- what is not covered -----------------------------------------------------------------------------------------------


def test_a_hook_is_called_from_then_on() -> None:
    net = network("eagle")
    model = head_of(net)
    outputs(model)
    calls: list[int] = []
    net.fc.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[operator]
    rows = outputs(model)
    assert calls and not any(isinstance(row, HeadRows) for row in rows)
    assert model.forward_name == "lean" and "hooks" in model.native_off


def test_what_is_not_covered_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceModel(new_model("llama").float())
    parts = TargetParts(target)

    def why(net: nn.Module, project: Any = None) -> str:
        model = FeatureModel(net, parts, target, project)
        assert model.native is None and model.forward_name == ("public" if model.forwards.head is None else "lean")
        return model.native_off

    assert "head dimension 12" in why(net_of("eagle").float())
    assert "of an unsupported kind" in why(TargetLayerModule(target.model))
    assert "projection is of an unsupported kind" in why(network("eagle"), parts.logits)
    with InFloat64():
        assert "float64" in why(net_of("mtp", shape=WIDE))
    monkeypatch.setattr("foretoken.models.forward.heads.native.why_not", lambda: "no compiler")
    assert why(network("eagle")) == "no compiler"


def test_logits_of_a_layer_without_guesses_are_the_twins() -> None:
    model = head_of(network("hydra"))
    states = torch.ones(2, 48)
    (rows,) = model.forward([Feed(model.open(), [1, 2], states=states)])
    assert not isinstance(rows, HeadRows) and rows.logits.shape == (2, 97)


def test_logits_that_are_capped_are_handed_out() -> None:
    """The library's best tokens know a scale only."""
    model = head_of(network("eagle"), top=3)
    model.parts._cap = 5.0
    model.project = DraftHead(model.parts)
    model.native = NativeHead(model.model, model.forwards.embedded, model.project)
    rows = outputs(model)
    assert all(not row.tokens for row in rows) and distance(rows, outputs(twin_of(model))) < NEAR  # type: ignore[attr-defined]
    assert max(float(row.logits.abs().max()) for row in rows if len(row.logits)) <= 5.0


def test_the_kernels_take_the_heads_of_this_file() -> None:
    assert attention.fits(torch.bfloat16, WIDE["head_dim"])
