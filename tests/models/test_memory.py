"""Ten thousand tokens leave nothing behind but the cache."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch
from checkpoints import checkpoint, prompt_of

import foretoken as ft
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.cache.rectangle import CHUNK
from foretoken.models.huggingface import HuggingFaceModel


def live_tensors() -> tuple[int, int]:
    """How many tensors are alive, and the bytes of their storages."""
    gc.collect()
    storages = {}
    count = 0
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            count += 1
            if type(thing).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                continue  # a stand-in for another device, of another test: what it holds is counted by itself
            if thing.is_mkldnn:  # packed weights, of models that other tests keep: they show no storage
                storages[id(thing)] = thing.numel() * thing.element_size()
                continue
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return count, sum(storages.values())


def test_nothing_grows_over_ten_thousand_tokens(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 1200}
    target, draft = (checkpoint(tmp_path / n, "llama", "float32", **small) for n in ("target", "draft"))
    assert isinstance(target, HuggingFaceModel)
    assert isinstance(draft, HuggingFaceModel)
    llm = ft.load(target, drafter=ModelDrafter(draft, k=8), controller="constant", prefix_cache=False)

    def generate(seed: int) -> weakref.ref[object]:
        output = llm.generate(prompt_of(20, seed=seed), max_new_tokens=1000, ignore_eos=True)
        assert len(output.token_ids) == 1000
        assert output.stats.mean_acceptance_length > 5  # the same weights: nearly everything is accepted
        return weakref.ref(output)

    generate(0)
    peaks = [model.kv_peak_bytes for model in (target, draft)]
    before = live_tensors()
    outputs = [generate(seed) for seed in range(1, 10)]
    after = live_tensors()
    assert [model.kv_peak_bytes for model in (target, draft)] == peaks
    assert [model.kv_bytes for model in (target, draft)] == [0, 0]
    # Keys and values of about 1020 tokens, 4 heads of 4 numbers, 4 bytes each: a buffer grows by a quarter.
    assert target.kv_bytes_per_token == 2 * 4 * 4 * 4
    assert 1020 * target.kv_bytes_per_token <= peaks[0] <= 1.25 * (1020 + 2 * CHUNK) * target.kv_bytes_per_token
    assert after == before
    assert not any(output() for output in outputs)
    assert target._sequences == draft._sequences == []
    assert not llm.engine.busy


def test_the_counter_sees_a_kept_tensor() -> None:
    """The control."""
    count, size = live_tensors()
    kept = torch.zeros(1000)
    assert live_tensors() == (count + 1, size + kept.nbytes)
