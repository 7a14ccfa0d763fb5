"""A server captures its graphs before the first request, and says where and why there are none."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from running_server import served

import foretoken as ft
from fake_graphs import Recordings
from foretoken.llm import Llm
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.server.config import ServerSettings
from foretoken.server.serving import Serving


def graphed_llm(settings: ServerSettings) -> Llm:
    """The built-in target, which drafts for itself, with recorded steps in place of CUDA's graphs."""
    target, draft = (ft.load(drafter=None, dtype="float32").target for _ in range(2))
    with_graphs(target, True, Recordings())
    return ft.load(target, ModelDrafter(follow(draft, target), k=3, target=target), controller="constant")


def recorded(llm: Llm) -> int:
    target: Any = llm.target
    return len(target.graphs.recorder.recordings)


def test_the_ladder_is_captured_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    llms: list[Llm] = []

    def make(settings: ServerSettings) -> Llm:
        llms.append(graphed_llm(settings))
        return llms[-1]

    with caplog.at_level(logging.INFO, "foretoken.server"), served(make, max_running=4) as running:
        graphs: Any = llms[0].target.graphs  # type: ignore[attr-defined]
        (draft,) = graphs.followers
        for ladder, widths in ((graphs, (1, 2, 4)), (draft, (1, 2, 4, 8, 16, 32))):
            assert {(b.batch, b.width) for b in ladder.buckets} >= {(b, w) for b in (1, 2, 4) for w in widths}
        before = recorded(llms[0])
        bodies = [{"prompt": prompt} for prompt in ("def fib(n):", "class A:", "import os")]
        for body in bodies:
            running.complete(**body)
        assert running.post("/v1/completions", prompt=["a =", "b =", "c ="], max_tokens=6).status_code == 200
        assert recorded(llms[0]) == before  # nobody has waited for a capture
        text = running.client.get("/metrics").text
        spec = running.client.get("/v1/spec").json()
    assert 'foretoken:cuda_graphs{model_name="builtin"} 1.0' in text and spec["graphs_off"] == ""
    message = f"captured {len(graphs) + len(draft)} CUDA graphs in "
    assert any(line.getMessage().startswith(message) for line in caplog.records)


def test_a_server_without_graphs_says_why() -> None:
    with served() as running:
        assert running.client.get("/v1/spec").json()["graphs_off"].startswith("they need a CUDA device")
        assert 'foretoken:cuda_graphs{model_name="builtin"} 0.0' in running.client.get("/metrics").text


def test_a_ladder_that_does_not_fit_turns_graphs_off_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = graphed_llm(ServerSettings())
    target: Any = llm.target

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 21.00 MiB.")

    monkeypatch.setattr(Recordings, "record", full)

    async def run() -> None:
        serving = Serving(ServerSettings(max_running=2), lambda _: llm)
        await serving.start()
        assert serving.failed is None
        await serving.stop(0.0)

    with caplog.at_level(logging.WARNING, "foretoken"):
        asyncio.run(run())
    assert target.graphs_off == "CUDA out of memory. Tried to allocate 21.00 MiB."
    assert [refusal.path for refusal in target.refused] == ["CUDA graphs"]
    warnings = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert any(
        line.startswith("CUDA graphs: refused, CUDA out of memory. Tried to allocate 21.00 MiB.;") for line in warnings
    )
