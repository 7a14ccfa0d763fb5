"""Which device is chosen, what is said of one that is not there, and where draft models go."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foretoken as ft
from fake_cuda import fake_cuda
from foretoken.loading import LoadError, load_model, parse_device
from foretoken.loading.draft_models import build_draft_model


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
    ("cuda", "device", "message"),
    [
        (0, "cuda", "device 'cuda' is not on this machine: choose one of auto, cpu"),
        (2, "cuda:2", "device 'cuda:2' is not on this machine: choose one of auto, cuda:0, cuda:1, cpu"),
    ],
)
def test_a_device_that_is_not_there(machine, cuda: int, device: str, message: str) -> None:  # type: ignore[no-untyped-def]
    machine(cuda)
    for ask in (lambda: parse_device(device), lambda: load_model("builtin", device=device)):
        with pytest.raises(ValueError) as error:
            ask()
        assert str(error.value) == message
    with pytest.raises(ValueError) as error:
        ft.load(device=device, drafter=None)
    assert str(error.value) == message


@pytest.mark.parametrize("drafter", ["model", "ngram|model", "cascade", "shared_vocab", "medusa", "eagle3"])
def test_drafts_run_where_the_target_runs(drafter: str) -> None:
    spec: str | list[str] = drafter.split("|") if "|" in drafter else drafter
    expected = ft.load(drafter=spec, dtype="float32").generate("def f(x):", max_new_tokens=6).token_ids
    with fake_cuda():
        llm = ft.load(drafter=spec, dtype="float32", device="auto")
        assert llm.target.device == torch.device("cuda", 0)  # type: ignore[attr-defined]
        assert llm.generate("def f(x):", max_new_tokens=6).token_ids == expected


def test_a_draft_model_stays_where_it_was_asked_for(tmp_path: Path) -> None:
    with fake_cuda():
        near, own = (ft.load(device="cuda", drafter=None).target, load_model("builtin"))
        assert [m.device.type for m in (near, own)] == ["cuda", "cpu"]  # type: ignore[attr-defined]
        from foretoken.loading import build_draft_model

        drafts = [build_draft_model(None, near, "builtin", None, device) for device in (None, "cpu")]
        assert [m.device.type for m in drafts] == ["cuda", "cpu"]  # type: ignore[attr-defined]
        assert build_draft_model(None, own, "builtin", None, None).device.type == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_gguf_draft_stays_on_the_cpu(device: str | None) -> None:
    """A target's device is nothing that the caller gave for the draft model, so it is not blamed."""
    target: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    words = (
        r"the draft model d\.gguf is a GGUF file, which runs on the cpu, and the target is on cuda:0: give the draft"
    )
    with pytest.raises(LoadError, match=words):
        build_draft_model("d.gguf", target, "folder", None, device)


def test_a_device_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights are there when the rest does not fit: one line, and they are gone again."""
    networks: list[torch.nn.Module] = []
    real = torch.nn.Module.to
    report = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB\nand more"

    def full(self: torch.nn.Module, device: object) -> torch.nn.Module:
        if str(device) == "meta":
            return real(self, "meta")
        networks.append(self)
        self.model.layers.cuda()
        raise torch.OutOfMemoryError(report)

    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * 2**20, 2**30), raising=False)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.nn.Module, "to", full)
        with pytest.raises(LoadError) as error:
            ft.load(device="cuda", drafter=None)
        message = r".*zoo/target needs \d\d MiB on cuda, and 5 MiB are free there: choose dtype=bfloat16, .*"
        assert re.fullmatch(message, str(error.value))
        assert {weight.device.type for weight in networks[0].parameters()} == {"meta"}
        monkeypatch.setattr(torch.nn.Module, "to", real)

        def later(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError(report)

        monkeypatch.setattr("foretoken.llm.with_graphs", later)
        with pytest.raises(LoadError) as error:
            ft.load(device="cuda", drafter=None)
        assert str(error.value) == (
            "loading needs another 20.00 MiB on cuda:0, and 5 MiB are free there: "
            "choose dtype=bfloat16, a smaller model, another device, or device=cpu"
        )
        with pytest.raises(ValueError, match=r"needs 0\.\d GiB and 0\.0 GiB are free"):
            ft.load(device="cuda", drafter=None, inflate="100m")
