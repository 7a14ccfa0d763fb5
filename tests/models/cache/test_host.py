"""Keys and values in host memory: a device has those of one layer at a time, and texts are the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fake_cuda import FakeCuda, fake_cuda
from fake_graphs import Recordings
from foretoken.engine.request import Request
from foretoken.methods.drafters.sparse_kv import SparseKvDrafter
from foretoken.models.cache.rectangle import HostCache
from foretoken.models.forward.graphed import with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs

REQUESTS = [
    Request([(7 * i + 3) % 31 for i in range(40)], max_new_tokens=14),
    Request([6, 1, 9], max_new_tokens=9),
    Request([(5 * i + 2) % 31 for i in range(75)], max_new_tokens=11, seed=3),
]


def stored(cache: HostCache) -> Sequence[Tensor]:
    return [buffer for store in (cache.keys, cache.values) for buffer in store if buffer is not None]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("select", ["retrieval", "recent"])
def test_drafts_over_a_cold_cache_change_no_text(lean: bool, select: str) -> None:
    """Texts end one after the other, and rows move, grow, and go to other rectangles meanwhile."""
    expected = outputs(engine(HuggingFaceModel(copy.deepcopy(llama()))), REQUESTS)
    with fake_cuda():
        target = HuggingFaceModel(copy.deepcopy(llama()).to("cuda"), lean=lean)
        drafter = SparseKvDrafter(target, k=3, budget=24, chunk=4, select=select, rebuild=6, offload=True)
        assert outputs(engine(target, drafter), REQUESTS) == expected
        cold, hot = target.cache, drafter.model.cache  # type: ignore[attr-defined]
        assert isinstance(cold, HostCache) and target.kv_peak_bytes > 0
        sequence = target.open()
        target.prefill(sequence, [3, 4, 5])
        assert stored(cold) and not any(isinstance(buffer, FakeCuda) for buffer in stored(cold))
        beside = drafter.model.open_beside(sequence)
        drafter.model.catch_up(beside, [3, 4, 5, 6])
        assert stored(hot) and all(isinstance(buffer, FakeCuda) for buffer in stored(hot))


def test_other_rectangles_are_in_host_memory_too() -> None:
    cache = HostCache(2, 100)
    assert isinstance(cache.fresh(), HostCache) and cache.fresh().max_slots == 100


def test_what_is_taken_over_from_another_text_stays_there() -> None:
    with fake_cuda():
        cache = HostCache(1, 100)
        rows = torch.ones(2, 5, 4, device="cuda")
        cache.load(0, 0, rows.to("cpu"), rows.to("cpu"))
        assert not any(isinstance(buffer, FakeCuda) for buffer in stored(cache))


def test_graphs_end_where_keys_and_values_go_to_host_memory() -> None:
    with fake_cuda():
        target = HuggingFaceModel(copy.deepcopy(llama()).to("cuda"))
        sequence = target.open()
        with pytest.raises(ValueError, match="requests are running: finish or close them before keys and values"):
            target.keep_on_host()
        target.release(sequence)
        target.keep_on_host()
        assert target.graphs_off == "its keys and values are in host memory"


def test_a_target_on_the_cpu_has_nothing_to_offload_from() -> None:
    target = HuggingFaceModel(copy.deepcopy(llama()))
    with_graphs(target, "auto", Recordings())
    with pytest.raises(ValueError, match="offload=true is for a target on a GPU"):
        SparseKvDrafter(target, offload=True)
    assert target.graphs is not None  # and it is as it was
