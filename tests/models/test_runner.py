"""A runner over a forward of a few lines: it asks for rows of trees, and knows nothing else of what computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
import torch

from foretoken.models.base import Capabilities, CapabilityError, Feed
from foretoken.models.cache.masks import LayerMask
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.layers import LayerPlan
from foretoken.models.runner import TreeRunner
from toys import llama

V = 11


class Counting:
    """Predicts ``token + p`` after a token at position p, and hands out how many slots its row sees."""

    model = None
    name, context_why, rotary, spared = "counting", "", None, None
    capabilities, eos_token_ids = Capabilities(), frozenset[int]()
    vocab_size, context_length, num_layers = V, 40, 1
    device, dtype, run_dtype = torch.device("cpu"), torch.float32, torch.float32
    layer_masks: Mapping[str, LayerMask] = MappingProxyType({"": LayerMask()})

    def check(self, plan: LayerPlan) -> None:
        raise CapabilityError("it has no parts")

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        return [self.run(call) for call in calls]

    def run(self, call: NetworkCall) -> Outputs:
        b, width = call.ids.shape
        call.cache.update(*[torch.ones(b, 1, width, 1)] * 2, 0)
        logits = torch.nn.functional.one_hot((call.ids + call.positions) % V, V).float()
        mask = call.masks[""]
        seen = (mask == 0).sum(-1)[:, 0, :, None].float() if mask is not None else torch.zeros(b, width, 1)
        return call.feed_logits(logits[:, call.first :]), {"last": seen}


def runner() -> TreeRunner:
    return TreeRunner(Counting(), TreeCache(1, 64))


def test_rows_are_those_of_the_tree() -> None:
    model = runner()
    text, second_text = model.open(), model.open()
    model.prefill(text, [3, 1, 4])
    first, second = model.forward([Feed(text, [5, 9, 2], [-1, 0, 0]), Feed(second_text, [6, 5], wanted=1)], ["last"])
    assert first.logits.argmax(-1).tolist() == [(5 + 3) % V, (9 + 4) % V, (2 + 4) % V]  # siblings share a position
    assert second.logits.argmax(-1).tolist() == [(5 + 1) % V]
    assert first.taps["last"].flatten().tolist() == [4, 5, 5]  # the text, the path above, itself
    model.commit(text, [0, 2])
    assert text.tokens == [3, 1, 4, 5, 2] and not text.scratch_tokens
    assert model.forward([Feed(text, [7])])[0].logits.argmax(-1).tolist() == [(7 + 5) % V]


def test_it_says_what_the_forward_says() -> None:
    model = runner()
    assert model.describe()["forward"] == "counting" and model.vocab_size == V and model.run_rows == 0
    with pytest.raises(CapabilityError, match="no parts"):
        model.forward_part([Feed(model.open(), [3])], LayerPlan(stop=1))


def test_a_forward_that_fails_leaves_the_tree_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = runner()
    text = model.open()
    model.forward([Feed(text, [3, 4], [-1, -1])])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Counting, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        model.forward([Feed(text, [5], [1])])
    assert (text.scratch_tokens, text.scratch_parents) == ([3, 4], [-1, -1])


def test_runners_share_a_network_and_nothing_else() -> None:
    model = HuggingFaceModel(llama())
    other = TreeRunner(model.forwards, TreeCache(model.cache.num_layers, 64))
    logits = []
    for each in (model, other):
        text = each.open()
        each.prefill(text, [3, 1, 4])
        logits.append(each.forward([Feed(text, [5, 9, 2], [-1, 0, 0])])[0].logits)
    assert torch.equal(*logits)
    assert len(model._sequences) == len(other._sequences) == 1 and other.run_rows == 6


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([3], [(1, 3)]),
        ([3] * 9, [(4, 3), (4, 3), (1, 3)]),  # as many as fit into a chunk of twelve
        ([4, 6, 2, 2, 1], [(2, 6), (3, 2)]),
        ([6, 6, 1, 1, 1], [(2, 6), (3, 1)]),
        ([9, 1, 1, 1, 1], [(1, 9), (4, 1)]),  # padding would take longer
        ([30, 0, 4, 4], [(1, 12), (1, 12), (1, 6), (2, 4)]),  # a long text in chunks, an empty one not at all
    ],
)
def test_texts_are_read_together_where_that_is_no_longer(
    lengths: list[int], calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    run = Counting.run
    monkeypatch.setattr(Counting, "run", lambda self, call: (shapes.append(tuple(call.ids.shape)), run(self, call))[1])
    monkeypatch.setattr(TreeRunner, "prefill_chunk", 12)
    model = runner()
    texts = [(model.open(), [(i + j) % V for j in range(length)]) for i, length in enumerate(lengths)]
    taps = model.prefill_batch(texts, ["last"])
    assert shapes == calls
    for (sequence, tokens), own in zip(texts, taps, strict=True):
        assert sequence.tokens == tokens and not sequence.scratch_tokens
        assert own.get("last", torch.zeros(0, 1)).flatten().tolist() == [*range(1, len(tokens) + 1)]
