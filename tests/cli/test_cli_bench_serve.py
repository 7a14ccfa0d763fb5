"""``foretoken bench serve``: its lines, its table, its report, its errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")
pytest.importorskip("httpx", reason="the extra 'bench' is not installed")

sys.path.append(str(Path(__file__).parents[1] / "lab" / "bench"))
from load_servers import Scripted, running

CELL = {
    "load", "level", "burst", "arm", "category", "temperature", "batch", "requests", "completed", "errors", "seconds",
    "requests_per_s", "tokens_per_s", "new_tokens", "prompt_tokens", "ttft_ms", "tpot_ms", "e2e_ms", "acceptance_rate",
    "mean_acceptance_length", "draft_tokens", "ratios", "identical", "lag_ms",
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scripted, str]]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    scripted = Scripted()
    with running(scripted.app) as url:
        yield scripted, url


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"category": c, "prompt": p}) + "\n" for c, p in (("a", "x"), ("b", "full"))))
    return str(file)


def bench(run: Any, *arguments: str) -> Any:
    return run("bench", "serve", *arguments, "--requests", "4", "--warmup", "2", "--timeout", "10")


def test_the_file_the_table_and_the_page(run: Any, server: Any, prompts: str, tmp_path: Path) -> None:
    out, page = tmp_path / "run.jsonl", tmp_path / "report.html"
    result = bench(
        run, server[1], "--compare", "--concurrency", "1,2", "--rate", "50", "--prompts", prompts, "--out", str(out)
    )
    assert result.code == 0, result.err
    *cells, summary = map(json.loads, out.read_text().splitlines())
    assert len(cells) == 3 * 2 == summary["cells"] and all(set(cell) == CELL for cell in cells)
    assert [(c["load"], c["level"], c["arm"]) for c in cells[::2]] == [
        ("concurrency", 1, "plain"), ("concurrency", 2, "plain"), ("rate", 50.0, "plain")
    ]  # fmt: skip
    assert all(c["requests"] == 8 and c["errors"] == {"http_503": 4} for c in cells)  # two passes
    assert cells[1]["ratios"]["tokens_per_s"] > 0 and cells[1]["identical"] is True
    for words in ("c=2", "50/s", "speculative", "4 http_503", "texts are equal, 4 of 4", "no room", str(out)):
        assert words in result.out, words
    reported = run("bench", "report", str(out), "--out", str(page), "--plots", str(tmp_path / "plots"))
    assert reported.code == 0, reported.err
    text = page.read_text()
    for words in ("Load test of a server", "Throughput", "Distribution of latencies", "4 http_503", "All 12 compared"):
        assert words in text, words
    names = {file.name for file in (tmp_path / "plots").iterdir()}
    assert {"latency_rate.png", "throughput_concurrency.png", "distribution_concurrency_2.png"} <= names


@pytest.mark.parametrize(
    ("likely", "words"),
    [({}, "2 of 2 texts differ, ties unknown for 2;"), ({"token_id:9": -0.6}, "2 of 2 texts differ, 0 of them by")],
)
def test_ties_that_nobody_examined_are_unknown(
    run: Any, server: Any, tmp_path: Path, likely: dict[str, float], words: str
) -> None:
    server[0].skew, server[0].logprobs = "!", likely
    result = run(
        "bench", "serve", server[1], "--compare", "--concurrency", "1", "--requests", "1", "--warmup", "1",
        "--out", str(tmp_path / "run.jsonl"),
    )  # fmt: skip
    assert result.code == 0 and words in " ".join(result.out.split())


def test_json_is_the_last_line_and_all_of_stdout(run: Any, server: Any) -> None:
    result = bench(run, server[1], "--concurrency", "2", "--json", "--seed", "1")
    *cells, summary = map(json.loads, result.out.splitlines())
    assert result.code == 0 and len(cells) == 1 and summary["summary"] and summary["kind"] == "load"
    assert summary["settings"]["seed"] == 1 and summary["arms"] == ["server"] and not summary["interrupted"]


def test_two_servers_are_compared(run: Any, server: Any) -> None:
    result = bench(run, f"one={server[1]}", f"two={server[1]}/v1", "--concurrency", "1", "--json")
    cells = list(map(json.loads, result.out.splitlines()))[:-1]
    assert [(cell["arm"], cell["requests"], cell["identical"]) for cell in cells] == [
        ("one", 8, None),
        ("two", 8, True),
    ]


def test_a_key_of_the_environment_and_one_of_the_command(
    run: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server[0].key = "secret"
    refused = bench(run, server[1])
    assert refused.code == 2 and "--api-key" in refused.err and refused.err.count("\n") == 1
    assert bench(run, server[1], "--api-key", "secret", "--concurrency", "1").code == 0
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    result = bench(run, server[1], "--concurrency", "1", "--json")
    assert result.code == 0 and "secret" not in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "two"], "--concurrency takes whole numbers joined by commas, not 'two'"),
        (["--concurrency", "0"], "--concurrency must be above 0"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--rate", "inf"], "--rate must be above 0"),
        (["--burst", "2"], "give --rate too"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["--extra-body", "{"], "--extra-body must be a JSON object"),
        (["--category", "nosuch"], "no prompts of category 'nosuch'"),
        (["--format", "text"], "give --prompts too"),
        (["--prompts", "/no/such/file"], "No such file"),
        (["--out", "/no/such/folder/run.jsonl"], "the folder /no/such/folder of --out does not exist"),
        (["--out", os.sep], "is a folder: give the name of a file"),
        (["--model", "a", "--model", "b"], "--model was given 2 times for 1 servers"),
        (["http://127.0.0.1:9", "--compare"], "give one URL"),
        (["--temperature", "3"], "--temperature"),
    ],
)
def test_bad_input_is_one_line(run: Any, options: list[str], words: str) -> None:
    result = bench(run, "http://127.0.0.1:9", *options)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    assert words in result.err, result.err


def test_nobody_there_and_nothing_answered(run: Any, server: Any, prompts: str) -> None:
    assert "nothing answers at http://127.0.0.1:9" in bench(run, "http://127.0.0.1:9").err
    result = bench(run, server[1], "--prompts", prompts, "--category", "b")
    assert result.code == 2 and "answers no request (http_503): no room" in result.err


@pytest.mark.skipif(os.name == "nt", reason="signals are caught on Unix only")
@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_tells_what_was_measured(
    run: Any, server: Any, tmp_path: Path, number: int, code: int, line: str
) -> None:
    scripted, url = server
    scripted.pause_s = 0.03
    out = tmp_path / "run.jsonl"

    def interrupt() -> None:
        end = time.monotonic() + 20
        while len(scripted.seen) < 2 + 6 and time.monotonic() < end:  # behind the warm-up
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = run("bench", "serve", url, "--concurrency", "2", "--requests", "500", "--warmup", "2", "--out", str(out))
    thread.join()
    assert result.code == code and "interrupted" in result.out and result.err.endswith(f"{line}\n")
    cell, summary = map(json.loads, out.read_text().splitlines())
    assert 1 <= cell["completed"] == cell["requests"] < 500 and cell["errors"] == {} and summary["interrupted"]
    page = tmp_path / "report.html"
    assert run("bench", "report", str(out), "--out", str(page)).code == 0
    assert "This test was interrupted" in page.read_text()
    time.sleep(0.2)
    assert scripted.open == 0  # requests that ran were closed, not left running


@pytest.fixture
def interrupted(run: Any, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``foretoken bench serve --out FILE`` that Ctrl-C ends, and that file: whole, from a run before."""
    from foretoken.lab.bench.load import run as load_run

    out, run_load = tmp_path / "run.jsonl", load_run.run_load
    command = ["bench", "serve", server[1], "--concurrency", "1", "--requests", "1", "--warmup", "1", "--out", str(out)]
    assert run(*command).code == 0

    def stopped(*arguments: Any) -> Any:
        result = run_load(*arguments)
        return load_run.LoadResult(result.cells, {**result.summary, "interrupted": True}, signal.SIGINT)

    monkeypatch.setattr(load_run, "run_load", stopped)
    return lambda *more: run(*command, *more), out


def test_an_interrupted_test_leaves_an_earlier_one_alone(interrupted: Any) -> None:
    again, out = interrupted
    before, beside = out.read_text(), out.with_name("run.interrupted.jsonl")
    result = again()
    assert result.code == 130 and out.read_text() == before
    assert f"{out} is kept, because this run was interrupted" in result.err and f"written to {beside}" in result.out
    assert json.loads(beside.read_text().splitlines()[-1])["interrupted"] is True
    out.unlink()
    beside.replace(out)
    result = again("--json")  # replaces an interrupted one
    assert result.code == 130 and out.read_text() == result.out and not beside.exists()


def test_results_are_printed_before_they_are_written(interrupted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.lab.bench.load.run import LoadResult

    def full(self: LoadResult, file: Path) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(LoadResult, "write", full)
    result = interrupted[0]()
    assert result.code == 2 and "No space left" in result.err and "tok/s" in result.out


def test_help_needs_neither_pytorch_nor_httpx() -> None:
    import subprocess

    code = (
        "import sys; from foretoken.cli.main import main; main(['bench', 'serve', '--help']);"
        "print(sorted({'torch', 'httpx', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stderr.splitlines()[-1] == "[]"
    assert "--compare" in result.stdout and "--rate" in result.stdout
