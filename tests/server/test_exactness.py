"""The server's promise of equal texts, the start's report on the model, and the cases in which it does not start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import served
from test_lifecycle import refused

from foretoken.llm import Llm
from foretoken.models.base import Refusal
from foretoken.models.other.table import TableModel
from foretoken.server.config import ServerSettings, settings_from
from foretoken.server.serving import Serving

REFUSALS = (
    Refusal("lean forward", "it is off by 5 %", "a token takes twice as long"),
    Refusal("int4 kernel", "this CPU lacks AVX2", "weights are read as bfloat16"),
)


def told_model(exactness: str) -> Llm:
    """A model that says of itself what this test wants it to."""
    target = TableModel.random(6, seed=1)
    target.exactness, target.exactness_why, target.refused = exactness, "this test says so", REFUSALS
    return Llm(target, None, None, None, None)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the server logs; its logger may have been kept from the root by another test."""
    logger = logging.getLogger("foretoken")
    before = logger.propagate, logger.level
    logger.propagate = True
    with caplog.at_level(logging.INFO, "foretoken"):
        yield caplog
    logger.propagate, logger.level = before


def started(exactness: str, **settings: Any) -> Serving:
    serving = Serving(ServerSettings(**settings), lambda _: told_model(exactness))

    async def run() -> None:
        await serving.start()
        await serving.stop(0.0)

    asyncio.run(run())
    return serving


def test_a_model_that_is_exact_up_to_rounding_is_not_served_as_bitwise() -> None:
    failed = started("rounding", exact="bitwise").failed
    assert isinstance(failed, ValueError) and "\n" not in str(failed)
    assert "cannot be served with --exact bitwise: this test says so; leave --exact out" in str(failed)


@pytest.mark.parametrize(("exactness", "exact"), [("bitwise", "bitwise"), ("rounding", "distribution")])
def test_a_model_that_keeps_what_was_asked_for_is_served(exactness: str, exact: str) -> None:
    assert started(exactness, exact=exact).failed is None


def test_the_start_names_how_the_model_runs_and_what_it_was_refused(log: pytest.LogCaptureFixture) -> None:
    started("rounding")
    record = next(line for line in log.records if line.getMessage().startswith("loaded builtin: table forward"))
    assert record.getMessage().endswith("exact up to rounding (this test says so), drafter none")
    assert {"forward", "weights", "exactness", "exactness_why", "threads", "refused"} <= set(vars(record)["fields"])
    warnings = [line.getMessage() for line in log.records if line.levelno == logging.WARNING]
    assert warnings == [str(refusal) for refusal in REFUSALS]


def test_the_speculation_route_names_it_too() -> None:
    with served(lambda _: told_model("bitwise"), exact="bitwise") as running:
        spec = running.client.get("/v1/spec").json()
    assert (spec["forward"], spec["exactness"], spec["exactness_why"]) == ("table", "bitwise", "this test says so")
    assert [refusal["path"] for refusal in spec["refused"]] == ["lean forward", "int4 kernel"]
    assert spec["threads"] >= 1


def test_llama_cpp_cannot_be_bitwise_and_the_start_says_so(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    how = "--backend", "llama.cpp", "--exact", "bitwise", "--port", "0"
    assert "takes no exact=bitwise" in refused(str(file), *how)


def test_the_setting_comes_from_flag_environment_and_file(tmp_path: Path) -> None:
    assert settings_from({"exact": "bitwise"}, None, {}).exact == "bitwise"
    assert settings_from({}, None, {"FORETOKEN_EXACT": "bitwise"}).exact == "bitwise"
    file = tmp_path / "serve.yaml"
    file.write_text("exact: bitwise\n")
    assert settings_from({}, file, {}).exact == "bitwise"
    with pytest.raises(ValueError, match="exact must be distribution or bitwise, not 'always'"):
        settings_from({"exact": "always"}, None, {})


def test_the_setting_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.server import serving

    options: dict[str, Any] = {}
    monkeypatch.setattr(serving, "load", lambda *_, **more: options.update(more))
    serving.load_llm(ServerSettings(exact="bitwise"))
    assert options["exact"] == "bitwise"


def test_the_log_says_how_many_threads_a_busy_machine_leaves(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled before the engine takes its first request."""
    monkeypatch.setattr("foretoken.server.serving.settle_threads", lambda target: "one thread is used")
    assert started("bitwise").failed is None
    warnings = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert warnings.index("one thread is used") == 0
