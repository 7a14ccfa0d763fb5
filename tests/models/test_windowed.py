"""Models that read a window of a text: the slots outside do not matter, on every forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import model_of
from torch import Tensor

from foretoken.loading.draft_models import windowed
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.cache.window import Window
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import library
from toys import llama, tables

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
TREE = Feed(None, [5, 6, 7], [-1, 0, 0])  # type: ignore[arg-type]
FORWARDS = ["public", "lean", "native"]


def model(forward: str, monkeypatch: pytest.MonkeyPatch) -> HuggingFaceModel:
    if forward == "native":
        if library.why_not() is not None:
            pytest.skip(str(library.why_not()))
        monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda *_: "native")
        target = HuggingFaceModel(model_of("llama", hidden_size=96, intermediate_size=160, head_dim=32).bfloat16())
    else:
        target = HuggingFaceModel(llama(32), lean=forward == "lean")
    assert target.forward_name == forward, target.native_off
    return target


@torch.inference_mode()
def scored(target: Any, nodes: Feed = TREE, slots: slice | None = None, value: float = 0.0) -> Tensor:
    """Logits of some nodes behind a text that was read token by token, when slots of the cache hold something else."""
    sequence = target.open()
    for token in TEXT:
        target.prefill(sequence, [token])
    if slots is not None:
        for stored in (*sequence.cache.keys, *sequence.cache.values):
            stored[sequence.row, :, slots] = value
    feed = Feed(sequence, nodes.tokens, nodes.parents)
    logits: Tensor = target.forward([feed])[0].logits
    target.release(sequence)
    return logits


@pytest.mark.parametrize("nodes", [TREE, Feed(None, [5])], ids=["tree", "one"])  # type: ignore[arg-type]
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("forward", FORWARDS)
def test_only_the_window_is_read(forward: str, sink: int, nodes: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(forward, monkeypatch)
    near = whole.windowed(Window(6, sink))
    expected = scored(near, nodes)
    assert torch.isfinite(expected).all()
    assert torch.equal(scored(near, nodes, slice(sink, len(TEXT) - 6), 9.0), expected)
    assert not torch.allclose(scored(whole, nodes), expected, atol=1e-3)  # it matters
    for inside in (slice(len(TEXT) - 6, len(TEXT) - 5), *([slice(0, 1)] if sink else [])):
        assert not torch.equal(scored(near, nodes, inside, 9.0), expected)


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_window_as_long_as_the_text_changes_nothing(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(forward, monkeypatch)
    expected = scored(whole)
    assert torch.equal(scored(whole.windowed(Window(len(TEXT) + 1))), expected)
    assert whole.window == Window()  # the model itself stays as it is
    near = scored(whole.windowed(Window(len(TEXT))))  # the second level's rows are one place further on
    assert torch.equal(near[0], expected[0]) and not torch.equal(near[1:], expected[1:])


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_row_does_not_depend_on_what_is_read_together(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near = model(forward, monkeypatch).windowed(Window(5, 1))

    def behind(pieces: list[int]) -> Tensor:
        sequence, text = near.open(), list(TEXT)
        for size in pieces:
            near.prefill(sequence, [text.pop(0) for _ in range(size)])
        logits: Tensor = near.forward([Feed(sequence, [5])])[0].logits
        near.release(sequence)
        return logits

    expected = behind([1] * len(TEXT))
    for pieces in ([len(TEXT)], [7, 17], [20, 1, 3]):
        torch.testing.assert_close(behind(pieces), expected, atol=2e-2 if forward == "native" else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("forward", FORWARDS)
def test_texts_of_one_call_have_windows_of_their_own(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near = model(forward, monkeypatch).windowed(Window(4, 1))
    texts = [TEXT, TEXT[:9], TEXT[:3]]

    def logits(chosen: list[list[int]]) -> list[Tensor]:
        opened = [near.open() for _ in chosen]
        for sequence, text in zip(opened, chosen, strict=True):
            for token in text:
                near.prefill(sequence, [token])
        outputs = near.forward([Feed(sequence, [5, 6], [-1, -1]) for sequence in opened])
        for sequence in opened:
            near.release(sequence)
        return [rows.logits for rows in outputs]

    together = logits(texts)
    for text, row in zip(texts, together, strict=True):
        torch.testing.assert_close(row, logits([text])[0], atol=2e-2 if forward == "native" else 1e-5, rtol=1e-3)


def test_no_more_slots_are_handed_out_than_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, update = list[int](), TreeCache.update

    def measured(self: TreeCache, *args: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, *args)
        sizes.append(keys.shape[2])
        return keys, values

    near = model("lean", monkeypatch).windowed(Window(5, 1))
    assert not near.forwards.skips_masked  # float32: attention of PyTorch's
    monkeypatch.setattr(TreeCache, "update", measured)
    scored(near)
    assert max(sizes) == 5 + 1 + 3


def test_models_that_read_the_whole_text() -> None:
    with pytest.raises(CapabilityError, match="leave window out"):
        windowed(tables()[0], Window(4))
