"""Times of a round wait for a device that works on its own; on the CPU nothing is waited for."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest
import torch

from fake_cuda import FakeCuda, fake_cuda
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import Feed
from foretoken.models.clock import now
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.sequential import SequentialModel
from toys import engine, llama


def test_only_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: called.append("cuda"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: called.append("mps"))
    assert now(None) <= now(torch.device("cpu")) <= now(torch.device("meta"))
    assert called == []
    now(torch.device("cuda", 0))
    now(SimpleNamespace(type="mps"))
    assert called == ["cuda", "mps"]


def started(device: str) -> Engine:
    """An engine with one request, after its prefill and first round."""
    target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to(device)) for noise in (0.0, 0.3))
    serving = engine(target, ModelDrafter(draft, k=2))
    serving.add(Request([1, 2, 3], SamplingParams(), 30))
    serving.step()
    return serving


def test_every_section_of_a_round_ends_with_the_device_done() -> None:
    with fake_cuda() as cuda:
        speculative = started("cuda")
        events: list[str] = []
        wait, forward = cuda.synchronize, speculative.target.forward

        def waited(device: object = None) -> None:
            events.append("wait")
            wait(device)

        def scored(*args: object) -> object:
            events.append("target")
            return forward(*args)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", waited)
            patch.setattr(speculative.target, "forward", scored)
            speculative.step()
    at = events.index("target")
    drafting = events[:at]
    assert drafting[0] == drafting[-1] == "wait" and len(drafting) >= 2 + 2 * 2  # both ends, and two draft forwards
    assert events[at + 1 :].count("wait") >= 2 + 1 + 1  # around the network, then behind the forward and the verifier


def test_the_cpu_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the CPU does its work at once")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.mps, "synchronize", refuse)
    assert started("cpu").requests.running[0].stats.target_s > 0


@pytest.mark.parametrize("kind", [HuggingFaceModel, SequentialModel])
def test_the_time_in_the_network_waits_at_both_ends(kind: type[HuggingFaceModel | SequentialModel]) -> None:
    with fake_cuda() as cuda:
        model = kind(copy.deepcopy(llama()).to("cuda"))
        before = cuda.synchronised
        model.forward([Feed(model.open(), [1, 2, 3])])
        assert cuda.synchronised - before == 2 and model.run_s > 0


def test_no_tensor_of_the_stand_in_outlives_it() -> None:
    """Tests that count live tensors would meet it."""
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if type(thing) is FakeCuda}
    with fake_cuda():
        started("cuda")
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is FakeCuda and id(thing) not in before]
