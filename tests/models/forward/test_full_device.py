"""Memory that runs out while a cache grows or a graph is captured leaves texts, graphs and streams as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_graphs import FakeStream, fake_cuda_graphs
from foretoken.models.base import Feed
from foretoken.models.cache.fixed import FixedCache
from foretoken.models.forward.fixed_step import OutputMemory
from foretoken.models.forward.graphed import with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from graph_sessions import Pair, graphed
from toys import llama


class FailingAllocator(TorchDispatchMode):
    """Inside the block, the allocation of zeros after the first ``left`` ones of at least ``size`` numbers fails."""

    def __init__(self, left: int, size: int) -> None:
        super().__init__()
        self.left, self.size = left, size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::new_zeros", "aten::index", "aten::clone") and result.numel() >= self.size:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result


def addresses(cache: FixedCache) -> list[int]:
    return [buffer.data_ptr() for store in (cache._keys, cache._values) for buffer in store if buffer is not None]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("left", [0, 1])
def test_a_cache_grows_whole_or_not_at_all(left: int, stacked: bool) -> None:
    """Keys that fit in larger memory and values that do not: graphs hold the addresses of both."""
    cache = FixedCache(2, 4000)
    cache.reserve(2, 10)
    for layer, heads in enumerate((2, 2 if stacked else 1)):
        part = torch.randn(heads, 5, 4)
        cache.load(1, layer, part, part + 1)
    before = (addresses(cache), cache.generation, cache.num_rows, cache.num_slots)
    copies = [[pair[0], pair[1]] for pair in cache.copied(1, 5) if pair is not None]
    sizes = 2 * 2 * 2 * 4 * 1024 if stacked else 2 * 1 * 4 * 1024
    with FailingAllocator(left, sizes), pytest.raises(torch.OutOfMemoryError):
        cache.reserve(2, 1000)
    assert (addresses(cache), cache.generation, cache.num_rows, cache.num_slots) == before
    cache.reserve(2, 1000)
    assert cache.generation == before[1] + 1 and not set(addresses(cache)) & set(before[0])
    for pair, old in zip(cache.copied(1, 5), copies, strict=True):
        assert pair is not None and torch.equal(pair[0], old[0]) and torch.equal(pair[1], old[1])


def test_graphs_go_on_when_their_cache_cannot_grow() -> None:
    pair = Pair(llama(context=1200))
    pair.open([3, 4, 5] * 80)
    pair.forward([(0, [7, 8, 9], [-1, -1, 1], None)])
    pair.commit(0, [1, 2])
    graphed_model, (plain, fixed) = pair.models[1], pair.texts[0]
    larger = graphed_model.cache._parts()[0].numel() + 1
    with FailingAllocator(1, larger), pytest.raises(torch.OutOfMemoryError):
        graphed_model.forward([Feed(fixed, list(range(3, 20)))])
    assert not fixed.scratch_tokens and graphed_model.cache.num_slots == 256 and plain.tokens == fixed.tokens
    pair.forward([(0, [5, 6, 7], None, None)])  # by the graph that is there
    pair.commit(0, [0, 1])
    pair.forward([(0, list(range(3, 20)), None, None)])  # and in more, once there is memory
    pair.check_cache()


def test_an_accepted_path_moves_whole_or_not_at_all() -> None:
    cache = FixedCache(1, 600)
    keys = torch.arange(24.0).view(1, 6, 4)
    cache.load(0, 0, keys, keys + 100)
    cache.keep(0, 1, [1, 3])
    with FailingAllocator(1, 8), pytest.raises(torch.OutOfMemoryError):
        cache.flush()
    assert torch.equal(cache._keys[0][0, :, :6], keys)  # type: ignore[index]
    moved = cache.copied(0, 3)[0]
    assert moved is not None
    assert torch.equal(moved[0], keys[:, [0, 2, 4]]) and torch.equal(moved[1], keys[:, [0, 2, 4]] + 100)


def test_a_cleared_cache_has_nothing_of_before() -> None:
    cache = FixedCache(1, 600)
    cache.load(0, 0, torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    cache.keep(0, 1, [1])
    generation = cache.generation
    cache.clear()
    assert not cache.is_initialized and not cache._parts() and not cache._moves and cache.generation > generation
    cache.load(0, 0, torch.ones(1, 3, 2), torch.ones(1, 3, 2))
    assert [part.shape for part in cache._parts()] == [(1, 1, 1, 256, 2)] * 2


# -- captures ----------------------------------------------------------------------------------------------------------


def test_a_failed_capture_leaves_the_stream_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own context does not: it raises before it puts the stream back."""
    with fake_cuda_graphs():
        model = HuggingFaceModel(copy.deepcopy(llama()).to("cuda"))
        with_graphs(model, True)
        sequence, before = model.open(), FakeStream.current
        model.prefill(sequence, [3, 4])
        run, captured = model.forwards.run_all, []

        def full(calls: Any) -> Any:
            captured.append(FakeStream.current is model.graphs.recorder.stream)
            if len(captured) == 3:  # twice it is run before it is captured
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return run(calls)

        monkeypatch.setattr(model.forwards, "run_all", full)
        model.forward([Feed(sequence, [5])])  # runs eagerly after all
        assert captured == [False, True, True, False]
        assert FakeStream.current is before
        assert model.graphs_off == "CUDA out of memory. Tried to allocate 20.00 MiB."  # what came first


def test_graphs_share_their_output_buffers() -> None:
    model = graphed(copy.deepcopy(llama()))
    taps = ("last",)
    model.graphs.warm_up(batches=(1, 2, 4), rows=(1, 2, 4, 8), taps=taps)
    largest = max(model.graphs.buckets, key=lambda bucket: bucket.batch * bucket.width)
    steps = [step for bucket, step in model.graphs._steps.items() if bucket.taps == taps]
    with torch.inference_mode():
        results = [step.run() for step in steps]
    assert len(steps) == 12
    for place in ([logits for logits, _ in results], [hidden["last"] for _, hidden in results]):
        memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in place}
        widest = place[0].shape[-1] * largest.batch * largest.width * place[0].element_size()
        assert list(memory.values()) == [widest]


def test_what_was_handed_out_survives_the_next_step() -> None:
    model = graphed(copy.deepcopy(llama()))
    sequence = model.open()
    model.prefill(sequence, [3, 4])
    parts: list[tuple[Tensor, Tensor]] = []
    for width in (1, 5, 2, 9, 5, 1):
        rows = model.forward([Feed(sequence, list(range(width)))], ("last",))[0]
        parts += [(part, part.clone()) for part in (rows.logits, rows.taps["last"])]
        model.commit(sequence, ())
    assert all(torch.equal(part, then) for part, then in parts)


def test_a_larger_step_gets_more_room_and_smaller_ones_keep_theirs() -> None:
    outputs, like = OutputMemory(), torch.zeros(1)
    small = outputs.buffer("logits", like, (2, 3))
    large = outputs.buffer("logits", like, (4, 3)).fill_(1.0)
    assert outputs.buffer("logits", like, (2, 3)).data_ptr() == large.data_ptr() != small.data_ptr()
    assert not bool(small.fill_(2.0).eq(1).any()) and bool(large.eq(1).all())
    assert outputs.buffer("logits", like.double(), (2, 3)).dtype == torch.float64
    assert outputs.buffer("layer:1", like, (2, 3)).data_ptr() != large.data_ptr()


def test_numbers_are_overwritten_only_when_the_device_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned buffer is sent while the host goes on: whoever takes this wait away must put an event there."""
    with fake_cuda_graphs():
        device: Any = torch.cuda.synchronize.__self__  # type: ignore[attr-defined]
        model = HuggingFaceModel(copy.deepcopy(llama()).to("cuda"))
        with_graphs(model, True)
        sequence = model.open()
        model.prefill(sequence, [3, 4])
        model.forward([Feed(sequence, [5])])
        step = next(reversed(model.graphs._steps.values()))
        sent: list[int] = []
        fill = step.numbers.fill

        def filled(*args: Any) -> None:
            assert not sent or device.synchronised > sent[-1]
            fill(*args)
            sent.append(device.synchronised)

        monkeypatch.setattr(step.numbers, "fill", filled)
        for _ in range(3):
            model.commit(sequence, [0])
            model.forward([Feed(sequence, [5])])
        assert len(sent) == 3
