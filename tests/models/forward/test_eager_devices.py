"""Eager forwards on a device, and their kernels: split models, and attention whose shapes always change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checkpoints import new_model
from torch.nn import functional as F

from fake_cuda import fake_cuda
from fake_graphs import Recordings
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.cache.fixed import FixedCache
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.forward.attention import few_plans
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.placement import is_split
from toys import engine, llama, outputs

REQUESTS = [Request([3, 4, 5], max_new_tokens=12), Request([6], max_new_tokens=9)]


def test_a_model_that_accelerate_has_dispatched_runs_eagerly() -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = outputs(engine(HuggingFaceModel(copy.deepcopy(llama()))), REQUESTS)
    network = accelerate.cpu_offload(copy.deepcopy(llama()), execution_device="cpu")
    model = HuggingFaceModel(network)
    with_graphs(model, "auto", Recordings())
    assert model.graphs is None and model.graphs_off == "its layers are on several devices, and a graph runs on one"
    assert [refusal.path for refusal in model.refused if refusal.path == "CUDA graphs"] == ["CUDA graphs"]
    assert outputs(engine(model), REQUESTS) == expected
    with pytest.raises(ValueError, match="graphs=True is not possible: its layers are on several devices"):
        with_graphs(model, True, Recordings())


def test_layers_on_two_devices_are_seen_without_hooks() -> None:
    with fake_cuda():
        network = copy.deepcopy(llama()).to("cuda")
        assert not is_split(network)
        network.lm_head.to("cpu")
        assert is_split(network)


def test_a_split_draft_model_is_eager_beside_a_graphed_target() -> None:
    accelerate = pytest.importorskip("accelerate")
    target = HuggingFaceModel(copy.deepcopy(llama()))
    with_graphs(target, True, Recordings())
    draft = HuggingFaceModel(accelerate.cpu_offload(copy.deepcopy(llama(noise=0.3)), execution_device="cpu"))
    assert follow(draft, target) is draft and draft.graphs is None and not target.graphs.followers


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether cuDNN may be chosen, at every attention that is computed."""
    seen: list[bool] = []
    attention = F.scaled_dot_product_attention

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("tree", ["", "2x2"])
def test_rounds_on_a_device_make_no_cudnn_plans(allowed: list[bool], lean: bool, tree: str) -> None:
    """Prompts, drafts and their verification, on both forwards; outside the rounds the choice is the user's."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with fake_cuda():
        target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=n)).to("cuda"), lean=lean) for n in (0.0, 0.3))
        allowed.clear()
        outputs(engine(target, ModelDrafter(draft, k=2, tree=tree)), REQUESTS)
    assert len(allowed) > 20 and not any(allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_rounds_on_the_cpu_leave_it_alone(allowed: list[bool]) -> None:
    outputs(engine(HuggingFaceModel(new_model("llama"), lean=False)), REQUESTS)
    assert allowed and all(allowed)


def test_a_round_that_fails_gives_the_choice_back() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="broken"), few_plans(device):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise RuntimeError("broken")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with few_plans(device):
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # who has switched it off finds it so
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_model_that_was_changed_says_that_its_graphs_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    model = HuggingFaceModel(copy.deepcopy(llama()))
    with_graphs(model, True, Recordings())
    assert isinstance(model.cache, FixedCache)
    with torch.no_grad():
        model.model.lm_head.weight.mul_(1.5)
    with caplog.at_level("WARNING", "foretoken"):
        model.follow()
    assert model.graphs is None and model.describe()["graphs_off"] == "the model was changed after it was loaded"
    assert "CUDA graphs" in [refusal.path for refusal in model.refused]
    assert type(model.cache) is TreeCache  # the rectangle was for the graphs
