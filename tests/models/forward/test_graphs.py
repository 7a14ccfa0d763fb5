"""Steps of fixed shapes give what ordinary forwards give, also when everything but their numbers is frozen."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpoints import best_dtype, new_model
from transformers import LlamaForCausalLM

import foretoken as ft
from fake_graphs import Capturing, Eager, Recordings, fake_cuda_graphs
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.cache.fixed import PATH, FixedCache
from foretoken.models.cache.masks import LayerMask, RowPlan, additive_mask, unseen
from foretoken.models.forward import fixed_step
from foretoken.models.forward.capture import Recorder
from foretoken.models.forward.fixed_step import Bucket, Numbers, fixed_mask, size_of
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from foretoken.models.sequential import SequentialModel
from graph_sessions import Pair, any_session, graphed, growing_session
from toys import engine, llama, outputs

RECORDERS: dict[str, Callable[[], Recorder]] = {"eager": Eager, "frozen": Recordings}
ROUNDING = {"chunked": 1e-5}
"""Llama 4 turns queries and keys in float32, whatever the model's dtype."""
MODELS: dict[str, Callable[[], Any]] = {
    "lean": llama,
    "public": lambda: _float64("gpt_neox"),
    "sliding": lambda: _float64("mistral_sliding"),
    "mixed": lambda: _float64("gemma3"),
    "chunked": lambda: _float64("llama4"),
}


def _float64(name: str) -> Any:
    return new_model(name).double()


@pytest.mark.parametrize(("name", "recorder"), [("lean", "eager"), *((name, "frozen") for name in MODELS)])
def test_a_session_of_any_shapes(name: str, recorder: str) -> None:
    pair = Pair(MODELS[name](), RECORDERS[recorder](), ROUNDING.get(name, 1e-9))
    any_session(pair, rounds=18, seed=len(name))
    if recorder == "frozen":
        replays = [recording.replays for recording in pair.models[1].graphs.recorder.recordings]
        assert sum(replays) >= pair.forwards and max(replays) > 1


def test_the_cache_grows_and_graphs_with_it() -> None:
    growing_session(Pair(llama(context=1200)))


def test_what_does_not_fit_runs_as_ever() -> None:
    pair = Pair(llama(context=600))
    pair.open([3, 4])
    pair.forward([(0, [7, 8, 9], [-1, -1, 1], None)])
    pair.commit(0, [1, 2])  # waits to be moved
    pair.forward([(0, [5] * 70, None, 1)])  # wider than the widest step
    assert pair.fixed == 1
    pair.commit(0, range(70))
    for _ in range(3):
        pair.forward([(0, [6] * 64, [-1] * 64, None)])
    assert pair.fixed == 3  # the third has 192 nodes to mask
    pair.commit(0, [7])
    chain = [-1, -1, *range(1, PATH + 4)]
    pair.forward([(0, [4] * len(chain), chain, None)])
    pair.commit(0, range(1, len(chain)))  # more nodes than a step moves
    pair.forward([(0, [4], None, None)])
    pair.check_cache()
    pair.commit(0, [])
    pair.open([1] * 70)
    pair.release(0)  # the last row takes its place
    pair.forward([(0, [4], None, None)])


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "mixtral", "gpt_oss"])
def test_other_families_pass_the_check(name: str) -> None:
    """Learned positions, compressed keys, experts, attention sinks."""
    model = HuggingFaceModel(new_model(name).to(getattr(torch, best_dtype(name))))
    with_graphs(model, "auto", Recordings())
    assert model.graphs_off == "" and len(model.graphs) == 3


def test_a_round_sends_once_and_reads_nothing() -> None:
    """Between a draft and its logits the host sends one tensor and waits twice: before it, and for the result."""
    with fake_cuda_graphs() as graphs:
        device: Any = torch.cuda.synchronize.__self__  # type: ignore[attr-defined]
        model = HuggingFaceModel(copy.deepcopy(llama()).to("cuda"))
        with_graphs(model, True)
        sequence = model.open()
        model.prefill(sequence, [3, 4, 5])
        for again in (False, True):
            replays, waits = sum(graph.recording.replays for graph in graphs), device.synchronised
            with Capturing() if again else nullcontext():  # the first time something is captured
                rows = model.forward([Feed(sequence, [5, 6, 7], [-1, -1, 1])])
                model.commit(sequence, [1, 2])
            assert sum(graph.recording.replays for graph in graphs) == replays + 1
            assert device.synchronised == waits + 2
        with Capturing(), pytest.raises(RuntimeError, match="not permitted"):  # the control: this is what is refused
            rows[0].logits.tolist()


LAYERS = [LayerMask(), LayerMask("sliding", 3), LayerMask("chunked", 4)]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_masks(layer: LayerMask) -> None:
    rng = random.Random(0)
    bucket = Bucket(4, 8, 64)
    numbers = Numbers(bucket, 70, torch.zeros(size_of(bucket), dtype=torch.int32), torch.device("cpu"))
    for _ in range(20):
        rows = []
        for chain in (True, False, False):
            size, committed = rng.randrange(1, 9), rng.randrange(0, 40)
            parents = [i - 1 if chain else rng.randrange(-1, i) for i in range(size)]
            depths: list[int] = []
            for parent in parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            visible = rng.choice([-1, -1, rng.randrange(0, committed + 1)])
            rows.append(RowPlan(committed, parents, depths, rng.randrange(1, size + 1), visible))
        numbers.fill(dict(enumerate(rows)), {i: [1] * row.new for i, row in enumerate(rows)}, {})
        mask = fixed_mask(numbers.tensors(), layer, bucket.slots, torch.float32)
        assert mask.shape == (4, 1, 8, 64)
        expected = additive_mask([*rows, RowPlan(0, (), (), 0)], layer, 8, 64, torch.float32, torch.device("cpu"))
        assert expected is not None
        for i, row in enumerate(rows):
            assert torch.equal(mask[i, 0, : row.new], expected[i, 0, : row.new])
        assert bool((mask.max(-1).values == 0).all())  # padding sees something, too


# -- what the check at load catches ------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _causal(numbers: Any, layer: Any, slots: int, dtype: torch.dtype) -> torch.Tensor:
    keys = torch.arange(slots)
    hidden = keys > numbers["slots"][:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, unseen(dtype))


def _first_slots(self: FixedCache, store: Any, new: torch.Tensor, layer: int) -> torch.Tensor:
    """Writes where Python said that it should when this was recorded."""
    buffer = self._buffer(store, new, layer)
    if self._places is None:
        return super(FixedCache, self)._write(store, new, layer)
    for row, slots in enumerate(self._places[1].tolist()):
        for column, slot in enumerate(slots):
            buffer[row, :, slot] = new[row, :, column]
    return buffer[: self._high, :, : self.used]


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(FixedCache, "move", _nothing), (fixed_step, "fixed_mask", _causal), (FixedCache, "_write", _first_slots)],
)
def test_a_fault_is_caught_at_load(owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fault)
    model = HuggingFaceModel(llama())
    with_graphs(model, "auto", Recordings())
    assert model.graphs is None and "gave different logits" in model.graphs_off
    with pytest.raises(ValueError, match="gave different logits"):
        with_graphs(model, True, Recordings())
    assert not isinstance(model.cache, FixedCache) and not model._sequences


def test_slots_of_the_host_are_right_when_nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: run eagerly, the last of the faults above is none, so that it is the freezing that shows it."""
    monkeypatch.setattr(FixedCache, "_write", _first_slots)
    Pair(llama(), Eager())


class Reader(LlamaForCausalLM):
    """Asks the device for a number in the middle of its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if int(kwargs["position_ids"].max()) < 0:
            raise ValueError("a position below 0")
        return super().forward(*args, **kwargs)


def test_a_forward_that_waits_for_the_device() -> None:
    network = copy.deepcopy(llama())
    network.__class__ = Reader
    model = HuggingFaceModel(network, lean=False)
    with_graphs(model, "auto", Recordings())
    assert model.graphs is None
    reason = r"its forward waits for the device \((item|_local_scalar_dense)\), which cannot be captured"
    assert re.fullmatch(reason, model.graphs_off)
    sequence = model.open()
    assert model.forward([Feed(sequence, [1, 2])])[0].logits.shape == (2, 32)


# -- who gets them -----------------------------------------------------------------------------------------------------


def test_on_a_cpu_there_are_none() -> None:
    message = "graphs=True is not possible: they need a CUDA device, and the model is on cpu; leave graphs at 'auto'"
    with pytest.raises(ValueError) as error:
        ft.load(drafter=None, graphs=True)
    assert str(error.value) == message
    target: Any = ft.load(drafter=None).target
    assert target.graphs is None
    assert target.graphs_off == "they need a CUDA device, and the model is on cpu"
    assert ft.load(drafter=None, graphs=False).target.graphs_off == "not asked for"  # type: ignore[attr-defined]


def test_a_model_that_is_handed_in_stays_as_it_is() -> None:
    with fake_cuda_graphs():
        model = HuggingFaceModel(copy.deepcopy(llama()).to("cuda"))
        cache = model.cache
        assert ft.load(model, None).target is model and model.graphs is None and model.cache is cache
        assert ft.load(model, None, graphs=True).target is model and model.graphs is not None
        graphs = model.graphs
        assert ft.load(model, None, graphs=False).target is model and model.graphs is graphs and model.graphs_off == ""


def test_wrong_choices() -> None:
    with pytest.raises(ValueError, match="graphs must be True, False or 'auto', not 'on'"):
        ft.load(drafter=None, graphs="on")
    with pytest.raises(ValueError, match="graphs=True is not possible: TableModel does not support fixed shapes"):
        with_graphs(TableModel.random(4), True)
    with pytest.raises(ValueError, match="SequentialModel does not support fixed shapes"):
        with_graphs(SequentialModel(new_model("bloom", n_layer=2, n_head=4)), True)
    with pytest.raises(ValueError, match="a context of 16 tokens is too short"):
        with_graphs(HuggingFaceModel(llama(context=16)), True, Eager())
    with fake_cuda_graphs():
        model = SequentialModel(new_model("bloom", n_layer=2, n_head=4).to("cuda"))
        with pytest.raises(CapabilityError, match="SequentialModel does not support fixed shapes"):
            with_graphs(model, True)


# -- what else looks at the model --------------------------------------------------------------------------------------


def test_new_weights_and_new_rows_reach_the_steps() -> None:
    model = graphed(copy.deepcopy(llama()))
    reference = HuggingFaceModel(llama(noise=0.3))
    model.take_weights(llama(noise=0.3))
    rows = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for change in (lambda _: None, lambda target: target.extra_embeddings(rows)):
        logits = []
        for target in (model, reference):
            change(target)
            sequence = target.open()
            target.prefill(sequence, [3, 4])
            ids = [5, 6] if not target.forwards.extra else [5, 32, 33]
            logits.append(target.forward([Feed(sequence, ids)])[0].logits)
            target.release(sequence)
        torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-9)


def test_a_sibling_has_none() -> None:
    model = graphed(llama())
    other = model.sibling()
    assert other.graphs is None and "its own cache" in other.graphs_off and model.graphs is not None
    a, b = model.open(), other.open()
    assert torch.allclose(model.forward([Feed(a, [1, 2])])[0].logits, other.forward([Feed(b, [1, 2])])[0].logits)


def test_a_failure_later_on_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(llama())
    pair.open([3, 4])
    pair.forward([(0, [5, 6], None, None)])
    pair.commit(0, [0])

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr(Recordings, "record", full)
    pair.forward([(0, [5, 6], None, None)])  # this shape is there
    pair.commit(0, [1])
    assert pair.fixed == 2
    pair.forward([(0, [5, 6, 7, 8, 9], [-1, -1, 1, 1, 3], None)])
    pair.commit(0, [1, 3])
    pair.forward([(0, [5, 6], None, None)])
    assert pair.fixed == 2
    assert pair.models[1].graphs_off == "CUDA out of memory. Tried to allocate 20.00 MiB."
    pair.check_cache()


def test_warm_up_captures_the_largest_first() -> None:
    model = graphed(llama())
    recordings = model.graphs.recorder.recordings
    recordings.clear()
    model.graphs.warm_up(batches=(1, 2), rows=(1, 4, 8))
    # Two rows of 8 and of 4 are there since the check, which had them in this order.
    sizes = [bucket.batch * bucket.width for bucket in model.graphs.buckets[-6:]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 16
    before = len(recordings)
    pair_of = model.open()
    model.prefill(pair_of, [3, 4])
    model.forward([Feed(pair_of, [5, 6, 7])])
    assert len(recordings) == before


def test_two_requests_join_and_leave() -> None:
    """On the stand-in for CUDA, a target and a draft model in one pool; of three requests two run at a time."""
    requests = [Request([3 + i, 4, 5, 3 + i], SamplingParams(temperature=i % 2), 3 + 2 * i, seed=i) for i in range(3)]
    plain = outputs(engine(HuggingFaceModel(llama()), max_batch=2), requests)
    with fake_cuda_graphs() as graphs:
        target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=n)).to("cuda")) for n in (0.0, 0.3))
        with_graphs(target, True)
        follow(draft, target)
        assert draft.graphs is not None and draft.graphs.recorder is target.graphs.recorder
        serving = engine(target, ModelDrafter(draft, tree="2x1"), max_batch=2)
        assert outputs(serving, requests) == plain
        assert sum(graph.recording.replays for graph in graphs) > len(graphs) > 8
        for model in (target, draft):
            assert model.graphs_off == "" and {bucket.batch for bucket in model.graphs.buckets} == {1, 2}
