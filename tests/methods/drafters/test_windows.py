"""Drafters that read the end of a long text: which slots, how many, and the text stays the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from block_toys import PROMPT, drafter_of, random_net, started
from block_toys import target as block_target
from test_features import network, new_drafter
from test_hydra import heads
from test_kangaroo import net_for
from torch import Tensor

from foretoken.core import Budget
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.eagle3 import Eagle3Drafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.kangaroo import KangarooDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.models.base import Feed
from foretoken.models.cache.masks import LayerMask, RowPlan, additive_mask, unseen
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, llamas, outputs

LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
Make = Callable[..., Any]


def eagle3(target: Any, **options: Any) -> Any:
    parts = TargetParts(target)
    shape = Eagle3Config(**asdict(LayerConfig.of_target(target.config)), vocab_size=parts.vocab_size, layers="1,2",
                         share_head=True)  # fmt: skip
    net = Eagle3Net(shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return Eagle3Drafter.of(net.eval(), parts, target, **options)


MAKE: dict[str, Make] = {
    "eagle": lambda target, **options: new_drafter((EagleDrafter, EagleNet, EagleConfig), target, **options),
    "mtp": lambda target, **options: new_drafter((MtpDrafter, MtpNet, MtpConfig), target, **options),
    "eagle3": eagle3,
    "dflash": lambda target, **options: drafter_of(DflashDrafter, target, random_net(DflashDrafter, target), **options),
    "dspark": lambda target, **options: drafter_of(DsparkDrafter, target, random_net(DsparkDrafter, target), **options),
}


def trees(drafter: Any, target: Any, texts: list[list[int]]) -> list[tuple[Any, Any]]:
    """The trees that are drafted for texts together."""
    contexts = [started(drafter, target, text) for text in texts]
    proposals = drafter.propose_batch(contexts, [Budget(4, 8)] * len(texts))
    for context in contexts:
        drafter.finish(context)
    return [(tree.tokens, tree.parents) for tree in proposals]


@pytest.mark.parametrize("name", MAKE)
def test_only_the_window_is_read(name: str) -> None:
    """The slots of the window matter, and the others do not, even if they hold NaN."""
    target = block_target()
    drafter = MAKE[name](target, window=6, sink=2)
    expected = logits_behind(drafter, target, None)
    assert torch.isfinite(expected).all()
    assert torch.equal(logits_behind(drafter, target, slice(2, len(LONG) - 1 - 6 - 4), torch.nan), expected)
    for inside in (slice(0, 2), slice(len(LONG) - 4, len(LONG) - 2)):
        assert not torch.allclose(logits_behind(drafter, target, inside, 9.0), expected, atol=1e-3)


@torch.inference_mode()
def logits_behind(drafter: Any, target: Any, slots: slice | None, value: float = 0.0) -> Tensor:
    """Logits of the first draft, or of the block, when slots of the drafter's cache hold something else."""
    context = started(drafter, target, LONG)
    drafter.follow([context])
    sequence, model = context.state[drafter], drafter.model
    if slots is not None:
        for stored in (*sequence.cache.keys, *sequence.cache.values):
            stored[sequence.row, :, slots] = value
    if isinstance(drafter, DflashDrafter | DsparkDrafter):
        return model.blocks([sequence], [context.root], drafter.net.config.block)[0].taps["state"]
    state = torch.ones(1, TargetParts(target).hidden_size)
    logits: Tensor = model.forward([Feed(sequence, [5], states=state)])[0].logits
    return logits


@pytest.mark.parametrize("name", MAKE)
def test_the_text_is_the_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled and in a batch; and however long the text is, no more slots are handed out than the window's."""
    target, sizes, update = block_target(), list[int](), TreeCache.update
    drafter = MAKE[name](target, window=5, sink=1)

    def measured(self: TreeCache, *args: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, *args)
        if any(self is cache for cache in drafter.model.pool.caches):
            sizes.append(keys.shape[2] - len(self.sequences[0].scratch_tokens))
        return keys, values

    requests = [
        Request(LONG, max_new_tokens=20),
        Request(PROMPT, max_new_tokens=12, params=SamplingParams(temperature=0.8), seed=3),
        Request(LONG[::-1], max_new_tokens=9),
    ]
    plain = outputs(engine(target, None), requests)
    for together in (True, False):
        groups = [requests] if together else [[request] for request in requests]
        assert [ids for group in groups for ids in outputs(engine(target, drafter), group)] == plain
    monkeypatch.setattr(TreeCache, "update", measured)
    outputs(engine(target, drafter), requests[:1])
    assert max(sizes) == 5 + 1  # beside the nodes that are being drafted, of which a row sees its ancestors


@pytest.mark.parametrize("name", MAKE)
def test_company_changes_no_draft(name: str) -> None:
    """Texts of different lengths share a call, and each has its own window."""
    target = block_target()
    drafter = MAKE[name](target, window=4)
    texts = [LONG, LONG[:11], LONG[:3], LONG[5:]]
    assert trees(drafter, target, texts) == [trees(drafter, target, [text])[0] for text in texts]


@pytest.mark.parametrize("name", MAKE)
def test_short_texts_are_read_whole(name: str) -> None:
    target = block_target()
    whole, usual, near = (MAKE[name](target, **options) for options in ({"window": 0}, {}, {"window": 2 * len(LONG)}))
    assert usual.model.window == Window(USUAL) and USUAL == 4096
    assert trees(whole, target, [LONG]) == trees(usual, target, [LONG]) == trees(near, target, [LONG])
    for wrong, words in (({"window": -1}, "at least 0"), ({"window": 0, "sink": 4}, "leave sink out")):
        with pytest.raises(ValueError, match=words):
            MAKE[name](target, **wrong)


def test_a_trained_window_is_kept() -> None:
    target = block_target()
    drafter = drafter_of(DflashDrafter, target, random_net(DflashDrafter, target, reach="3,0"), window=6)
    free = drafter_of(DflashDrafter, target, random_net(DflashDrafter, target, reach="3,0"), window=0)
    same = drafter_of(DflashDrafter, target, random_net(DflashDrafter, target, reach="3"), window=6)
    trained = drafter_of(DflashDrafter, target, random_net(DflashDrafter, target, reach="3"), window=0)
    assert torch.equal(logits_behind(same, target, None), logits_behind(trained, target, None))
    assert not torch.allclose(logits_behind(drafter, target, None), logits_behind(free, target, None))
    sliding = network(MtpNet, MtpConfig, target)
    sliding.mask = LayerMask("sliding", 3)
    logits = [
        logits_behind(MtpDrafter(FeatureModel(sliding, TargetParts(target), target), window=size), target, None)
        for size in (1, 0)
    ]
    assert torch.equal(*logits)


def two_rows(start: int) -> RowPlan:
    """Two new rows, one behind the other, behind so many places."""
    return RowPlan(start, (-1, 0), (0, 1), 2)


@pytest.mark.parametrize("sink", [0, 2])
def test_masks_against_the_definition(sink: int) -> None:
    """A row looks at the window before its own place; a network that makes its own masks, at that before its block."""
    starts, size, used = [12, 5, 9], 4, 15
    rows, window = [two_rows(start) for start in starts], Window(size, sink)
    cut = window.cut(rows)
    assert cut is not None
    slots = [*range(sink), *range(cut.low, used)]
    assert cut.slots(torch.arange(used).view(1, 1, used, 1)).flatten().tolist() == slots
    mask = torch.zeros(3, 1, 2, used)
    mask[1, 0, 1, 6] = -1.0
    hidden = cut.hidden(mask)
    own = cut.mask(additive_mask(rows, window.within(LayerMask()), 2, used, torch.float32, torch.device("cpu")))
    assert own is not None and cut.mask(None) is None
    for text, start in enumerate(starts):
        for column, slot in enumerate(slots):
            read = slot >= start - size or slot < sink
            expected = mask[text, 0, :, slot] if read else torch.full((2,), unseen(torch.float32))
            assert torch.equal(hidden[text, 0, :, column], expected)
            for row in range(2):
                place = start + row
                read = slot <= place and (slot >= place - size or slot < sink)
                assert float(own[text, 0, row, column]) == (0.0 if read else unseen(torch.float32))
    assert window.cut([two_rows(size + sink - 1)]) is None and Window().cut([two_rows(1000)]) is None


def hydra(target: Any, **options: Any) -> Any:
    parts = TargetParts(target)
    return HydraDrafter(heads(parts, prefix=True), parts, nodes=4, target=target, **options)


def kangaroo(target: Any, **options: Any) -> Any:
    adapter = FeatureModel(net_for(target, 1), TargetParts(target), target)
    return KangarooDrafter(target, adapter, k=3, eta=0.0, **options)


def draft_model(target: Any, window: int, sink: int) -> Any:
    model = HuggingFaceModel(llama(noise=0.3)).windowed(Window(window, sink))
    return ModelDrafter(model, k=3, target=target)


READERS: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "hydra": (hydra, lambda drafter: drafter.reader.model),
    "kangaroo": (kangaroo, lambda drafter: drafter.adapter),
    "model": (draft_model, lambda drafter: drafter.model),
}


@pytest.mark.parametrize("name", READERS)
def test_others_that_read_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes, update = block_target(), list[int](), TreeCache.update
    make, reader = READERS[name]
    drafter = make(target, window=5, sink=1)
    own = reader(drafter)

    def measured(self: TreeCache, *args: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, *args)
        if any(self is cache for cache in own.pool.caches):
            sizes.append(keys.shape[2] - len(self.sequences[0].scratch_tokens))
        return keys, values

    requests = [Request(LONG, max_new_tokens=20), Request(PROMPT, max_new_tokens=12, seed=3)]
    assert outputs(engine(target, drafter), requests) == outputs(engine(target, None), requests)
    monkeypatch.setattr(TreeCache, "update", measured)
    outputs(engine(target, drafter), requests[:1])
    assert max(sizes) == 5 + 1  # beside the nodes that are being drafted


def test_draft_models_get_a_window_by_their_spec() -> None:
    target = load_model("builtin")
    drafter = build_drafter("model,k=2,window=8,sink=2", target)
    assert isinstance(drafter, ModelDrafter) and drafter.model.window == Window(8, 2)
    for spec in ("cascade,k=2,window=8", "model,k=2"):
        other: Any = build_drafter(spec, target)
        assert other.model.window == Window(8 if "window" in spec else 0)
    with pytest.raises(ValueError, match="leave sink out"):
        build_drafter("model,sink=2", target)


def test_heads_that_read_no_text_take_no_window() -> None:
    target = llamas()[0]
    with pytest.raises(ValueError, match="leave window and sink out"):
        HydraDrafter(heads(TargetParts(target)), TargetParts(target), window=8)
