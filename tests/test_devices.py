"""Which device is chosen, what is said of one that is not there, and where draft models go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foretoken as ft
from fake_cuda import fake_cuda
from foretoken.loading import load_model, parse_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Pretends that a machine has this many CUDA devices, and MPS or not."""

    def pretend(cuda: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"), [(2, True, "cuda:0"), (1, False, "cuda:0"), (0, True, "mps"), (0, False, "cpu")]
)
def test_auto_takes_the_first_there_is(machine, cuda: int, mps: bool, chosen: str) -> None:  # type: ignore[no-untyped-def]
    machine(cuda, mps)
    assert parse_device("auto") == torch.device(chosen)
    assert parse_device(None) is None


@pytest.mark.parametrize(
    ("cuda", "asked", "told"),
    [
        (0, "cuda", "device 'cuda' is not on this machine: choose one of auto, cpu"),
        (2, "cuda:2", "device 'cuda:2' is not on this machine: choose one of auto, cuda:0, cuda:1, cpu"),
    ],
)
def test_a_device_that_is_not_there(machine, cuda: int, asked: str, told: str) -> None:  # type: ignore[no-untyped-def]
    machine(cuda)
    for ask in (lambda: parse_device(asked), lambda: load_model("builtin", device=asked)):
        with pytest.raises(ValueError) as error:
            ask()
        assert str(error.value) == told
    with pytest.raises(ValueError) as error:
        ft.load(device=asked, drafter=None)
    assert str(error.value) == told


@pytest.mark.parametrize("drafter", ["model", "ngram|model", "cascade", "shared_vocab", "medusa", "eagle3"])
def test_drafts_run_where_the_target_runs(drafter: str) -> None:
    spec: str | list[str] = drafter.split("|") if "|" in drafter else drafter
    wanted = ft.load(drafter=spec, dtype="float32").generate("def f(x):", max_new_tokens=6).token_ids
    with fake_cuda():
        llm = ft.load(drafter=spec, dtype="float32", device="auto")
        assert llm.target.device == torch.device("cuda", 0)  # type: ignore[attr-defined]
        assert llm.generate("def f(x):", max_new_tokens=6).token_ids == wanted


def test_a_draft_model_stays_where_it_was_asked_for(tmp_path: Path) -> None:
    with fake_cuda():
        near, own = (ft.load(device="cuda", drafter=None).target, load_model("builtin"))
        assert [m.device.type for m in (near, own)] == ["cuda", "cpu"]  # type: ignore[attr-defined]
        from foretoken.loading import build_draft_model

        found = [build_draft_model(None, near, "builtin", None, device) for device in (None, "cpu")]
        assert [m.device.type for m in found] == ["cuda", "cpu"]  # type: ignore[attr-defined]
        assert build_draft_model(None, own, "builtin", None, None).device.type == "cpu"  # type: ignore[attr-defined]
