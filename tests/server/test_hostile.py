"""R1: what the OpenAPI document allows, and what it forbids, never ends in a 5xx or in a status that it does not name.

``benchmarks/hostile.py`` sends thousands; here are some hundreds.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from running_server import Running

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

attack = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "hostile.py"))["attack"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("paths", "phases", "least"),
    [("^/(?!v1/c)", "coverage,fuzzing", 250), ("^/v1/(completions|chat)", "fuzzing", 40)],
    ids=["small routes", "completions and chat"],
)
def test_hostile_requests(server: Running, paths: str, phases: str, least: int) -> None:
    report = attack(server.url, least, seed=1, minutes=5, phases=phases, paths=paths)
    assert report["passed"], report["failures"]
    assert report["requests"] >= least and report["server_errors"] == 0
    assert {"200", "400"} <= set(report["statuses"])


def test_every_status_is_declared(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            required = {"200", "400", "401", "404", "405", "408", "413", "429", "500", "503", "504"}
            assert required <= set(operation["responses"]), path
    assert set(document["paths"]) == {
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/spec",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
    }
