"""Captured graphs on a GPU give what ordinary forwards give, whatever joins, leaves, grows, and in which order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import new_model

import foretoken as ft
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import Feed
from foretoken.models.forward.capture import CudaGraphs
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from graph_sessions import Pair, any_session, growing_session
from toys import engine, llama, outputs

MODELS: dict[str, tuple[Callable[[], Any], float]] = {
    "lean": (lambda: copy.deepcopy(llama()), 1e-9),
    "public": (lambda: new_model("gpt_neox").double(), 1e-9),
    "sliding": (lambda: new_model("mistral_sliding").double(), 1e-9),
    "mixed": (lambda: new_model("gemma3").double(), 1e-9),
    "chunked": (lambda: new_model("llama4").double(), 1e-5),  # queries and keys are turned in float32
}


def pair_of(model: Any, atol: float = 1e-9) -> Pair:
    """Both ways to run a model on the GPU."""
    return Pair(model.to("cuda"), CudaGraphs(torch.device("cuda", 0)), atol)


@pytest.mark.parametrize("name", MODELS)
def test_a_session_of_any_shapes(name: str) -> None:
    build, atol = MODELS[name]
    any_session(pair_of(build(), atol), rounds=60, seed=1)


def test_the_cache_grows_and_graphs_with_it() -> None:
    growing_session(pair_of(copy.deepcopy(llama(context=1200))))


def test_every_bucket_is_replayed_with_new_numbers() -> None:
    """All row buckets, captured largest first, replayed from the smallest to the largest and back."""
    pair = pair_of(copy.deepcopy(llama(context=600)))
    pair.models[1].graphs.warm_up(batches=(1, 2), rows=(1, 2, 4, 8, 16, 32, 64))
    captured = pair.models[1].graphs.buckets
    for prompt in ([3, 4, 5], [6]):
        pair.open(prompt)
    sizes = [1, 2, 3, 7, 12, 30, 64]
    for number, size in enumerate(sizes + sizes[::-1]):
        parents = [-1, *((i * 7 + number) % (i + 1) - 1 for i in range(1, size))]
        tokens = [(i * 5 + number) % 32 for i in range(size)]
        pair.forward([(0, tokens, parents, None)])
        pair.forward([(1, tokens[:3], None, 1)])
        for index in (0, 1):
            node, path = len(pair.texts[index][0].scratch_tokens) - 1, []
            while node >= 0:
                path.append(node)
                node = pair.texts[index][0].scratch_parents[node]
            pair.commit(index, path[::-1][:6])
    pair.check_cache()
    assert pair.fixed == pair.forwards and set(captured) <= set(pair.models[1].graphs.buckets)


def test_what_one_graph_left_survives_the_next() -> None:
    """Target and draft model share a pool: logits that were handed out must not change when another graph runs."""
    target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to("cuda")) for noise in (0.0, 0.3))
    follow(draft, with_graphs(target, True))
    assert draft.graphs is not None and draft.graphs.recorder is target.graphs.recorder
    held = []
    sequences = [(model, model.open()) for model in (target, draft)]
    for model, sequence in sequences:
        model.prefill(sequence, [3, 4])
    for width in (1, 5, 2, 9, 5):
        for model, sequence in sequences:
            rows = model.forward([Feed(sequence, list(range(width)))], ("last",))[0]
            held.append((rows.logits, rows.logits.cpu(), rows.taps["last"], rows.taps["last"].cpu()))
            model.commit(sequence, ())
    for logits, then, states, states_then in held:
        assert torch.equal(logits.cpu(), then) and torch.equal(states.cpu(), states_then)


def test_two_requests_join_and_leave() -> None:
    requests = [
        Request([3 + i % 8, 4, 5, 3 + i % 8], SamplingParams(temperature=i % 2), 4 + 5 * (i % 4), seed=i)
        for i in range(9)
    ]
    plain = outputs(engine(HuggingFaceModel(copy.deepcopy(llama()).to("cuda")), max_batch=2), requests)
    target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to("cuda")) for noise in (0.0, 0.3))
    follow(draft, with_graphs(target, True))
    assert outputs(engine(target, ModelDrafter(draft, tree="2x2x1"), max_batch=2), requests) == plain
    assert target.graphs_off == "" and {bucket.batch for bucket in target.graphs.buckets} == {1, 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_turns_them_on_for_the_built_in_model(dtype: str) -> None:
    """The check at load passes with the attention kernels that these dtypes get, and text comes out."""
    llm = ft.load(drafter="model,k=4", device="cuda", dtype=dtype)
    target: Any = llm.target
    assert target.graphs is not None, target.graphs_off
    out = llm.generate("def read(path):", max_new_tokens=24, ignore_eos=True)
    assert len(out.token_ids) == 24
    if dtype == "float32":
        off = ft.load(drafter=None, device="cuda", dtype=dtype, graphs=False)
        assert off.generate("def read(path):", max_new_tokens=24, ignore_eos=True).token_ids == out.token_ids
