"""A server's process: starting, failing early, draining, dying; and requests whose client goes away."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import Running, served

from foretoken.server.app import create_app

QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def process(*flags: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``foretoken serve builtin`` in a process of its own, ready."""
    port = free_port()
    command = [sys.executable, "-m", "foretoken", "serve", "builtin", "--dtype", "float32", "--port", str(port), *flags]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**QUIET, **(env or {})})
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            time.sleep(0.1)
        else:
            pytest.fail(f"not ready after 240 s: {command}")
        yield child, url
    finally:
        child.kill()
        child.wait(30)


def test_a_signal_drains() -> None:
    """R5: not ready at once, what runs is finished, exit code 0, nothing left behind."""
    with process("--drafter", "ngram", env={"FORETOKEN_SERVED_NAME": "mine"}) as (running, url):
        lines: list[str] = []
        begun = threading.Event()

        def read() -> None:
            body = {
                "model": "mine",
                "prompt": "def f(x):",
                "max_tokens": 300,
                "temperature": 1,
                "seed": 2,
                "ignore_eos": True,
            }
            with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        running.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        if running.poll() is None and reader.is_alive():
            answer = httpx.get(f"{url}/ready")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
            refused = httpx.post(f"{url}/v1/completions", json={"model": "mine", "prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
        reader.join(120)
        assert running.wait(30) == 0
        data = [line[6:] for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
        logged = [json.loads(line) for line in (running.stderr or []) if line.startswith("{")]
        assert any(entry.get("route") == "/v1/completions" and entry["status"] == 200 for entry in logged)


def test_what_takes_longer_than_the_drain_ends_with_an_error() -> None:
    """R5: a stream that is cut says so: it has no ``[DONE]`` and does not break off in the middle."""
    with process("--drafter", "none", "--shutdown-timeout", "0.2") as (running, url):
        body = {"model": "builtin", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if not lines:
                    running.send_signal(signal.SIGTERM)
                lines += [line] if line else []
        assert "data: [DONE]" not in lines
        assert json.loads(lines[-1][6:])["error"]["code"] == "draining"
        assert running.wait(60) == 0


SLOW_LOADING = """
import sys, time
from foretoken.server import app, lifecycle, logs, serving
from foretoken.server.config import ServerSettings

settings = ServerSettings(port=int(sys.argv[1]))
state = serving.Serving(settings, make=lambda settings: time.sleep(3600))
sock = lifecycle.listener(settings)
logs.install()
sys.exit(lifecycle.run_app(app.create_app(settings, state), state, sock))
"""


def test_a_signal_does_not_wait_for_a_model_that_is_loading() -> None:
    """A large one takes minutes, and there is nothing to finish: one line, exit code 0, no traceback."""
    port = free_port()
    command = [sys.executable, "-c", SLOW_LOADING, str(port)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=QUIET)
    try:
        status = 0
        while status != 503:
            with suppress(httpx.TransportError):
                status = httpx.get(f"http://127.0.0.1:{port}/ready").status_code
            assert running.poll() is None, running.stderr.read() if running.stderr else ""
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        _, stderr = running.communicate(timeout=60)
        assert running.returncode == 0 and stderr == "stopped while the model was loading\n"
    finally:
        running.kill()
        running.wait(30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_does_not_wait_for_what_is_imported(number: signal.Signals) -> None:
    """Seconds pass between the first line and the event loop: a signal then ends the process in the same way."""
    command = [sys.executable, "-m", "foretoken", "serve", "builtin", "--port", str(free_port())]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=QUIET)
    try:
        assert running.stderr is not None and running.stderr.readline() == "loading builtin ...\n"
        running.send_signal(number)
        _, stderr = running.communicate(timeout=60)
        assert running.returncode == 0 and stderr == "stopped while the model was loading\n"
    finally:
        running.kill()
        running.wait(30)


@pytest.mark.parametrize(
    ("command", "code", "line"), [("serve", 0, "stopped while the model was loading\n"), ("plan", -signal.SIGTERM, "")]
)
def test_a_signal_before_the_command_line_is_read_ends_a_server_as_later(
    command: str, code: int, line: str, tmp_path: Path
) -> None:
    """Half a second passes until the command runs: here the first package that it imports is told to stop."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "foretoken", command, "builtin"],
        stderr=subprocess.PIPE,
        text=True,
        env={**QUIET, "PYTHONPATH": paths},
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, line)


def test_a_signal_does_not_wait_for_ray_that_is_imported(tmp_path: Path) -> None:
    """To see whether it is there takes an import of seconds: here of a package that is told to stop meanwhile."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    command = [sys.executable, "-m", "foretoken", "serve", "builtin", "--replicas", "2", "--port", str(free_port())]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, env={**QUIET, "PYTHONPATH": paths}, timeout=60, check=False
    )
    assert ended.returncode == 0 and ended.stderr == "stopped while the model was loading\n"


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """The pipe of stderr is full after 64 KiB: the server goes on answering, and leaves when it is told to."""
    with process("--drafter", "none") as (running, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(600):
                assert client.get("/" + "nothing" * 20).status_code == 404
            body = {"model": "builtin", "prompt": "x", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def test_a_second_signal_ends_at_once() -> None:
    with process("--drafter", "none") as (running, url):
        body = {"model": "builtin", "prompt": "x", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
        asking = threading.Thread(target=lambda: _ignored(f"{url}/v1/completions", body))
        asking.start()
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        assert running.wait(5) is not None
        asking.join(30)


def _ignored(url: str, body: dict[str, Any]) -> None:
    with suppress(httpx.TransportError):
        httpx.post(url, json=body, timeout=60)


def refused(*flags: str) -> str:
    """The one line that a start with these flags ends with."""
    result = subprocess.run(
        [sys.executable, "-m", "foretoken", "serve", *flags], capture_output=True, text=True, env=QUIET, timeout=120
    )
    assert result.returncode == 2, (result.returncode, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith("loading")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_what_cannot_start_says_so_in_one_line(tmp_path: Path) -> None:
    """R14."""
    assert "/nowhere/at/all is not a folder with a model" in refused("/nowhere/at/all")
    assert "can be reached by others" in refused("builtin", "--host", "0.0.0.0")
    assert "not a size" in refused("builtin", "--kv-memory", "many")
    config = tmp_path / "serve.yaml"
    config.write_text("max_runing: 3\n")
    assert "max_runing" in refused("builtin", "--config", str(config))
    config.write_text("port: 80\n x: [\n")
    assert "line 2" in refused("builtin", "--config", str(config))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert "cannot listen" in refused("builtin", "--port", str(sock.getsockname()[1]))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert "error" in refused(str(broken), "--port", str(free_port())).lower()


def test_a_variable_below_a_flag_is_not_read() -> None:
    """Kubernetes sets FORETOKEN_PORT to an address beside a Service named foretoken."""
    from foretoken.server.config import settings_from

    environ = {"FORETOKEN_PORT": "tcp://10.0.0.1:80"}
    assert settings_from({"port": 8080}, None, environ).port == 8080
    with pytest.raises(ValueError, match="FORETOKEN_PORT: port must be a whole number"):
        settings_from({"port": None}, None, environ)


def test_settings_come_from_flags_then_environment_then_file(tmp_path: Path) -> None:
    from foretoken.server.config import settings_from

    file = tmp_path / "serve.yaml"
    file.write_text("max-running: 3\nmax_queued: 4\nport: 5\napi_keys: [a, b]\n")
    settings = settings_from(
        {"max_running": 1, "port": None}, file, {"FORETOKEN_MAX_QUEUED": "2", "FORETOKEN_ONLINE": "yes"}
    )
    assert (settings.max_running, settings.max_queued, settings.port, settings.api_keys, settings.online) == (
        1,
        2,
        5,
        ("a", "b"),
        True,
    )
    for environ in ({"FORETOKEN_PORT": "x"}, {"FORETOKEN_PREFIX_CACHE": "maybe"}, {"FORETOKEN_KV_MEMORY": "-1"}):
        with pytest.raises(ValueError, match=r"PORT|PREFIX_CACHE|size"):
            settings_from({}, None, environ)


def test_every_option_of_the_command_is_a_line_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.cli import serve
    from foretoken.server.config import settings_from

    file, keys = tmp_path / "serve.yaml", tmp_path / "keys"
    keys.write_text("c running=1\n\nd\n")
    file.write_text(f"target: builtin\napi_keys: [a]\napi-key-file: {keys}\nreplicas: 3\nray_address: auto\n")
    settings = settings_from({}, file, {})
    assert (settings.model, settings.api_keys) == ("builtin", ("a", "c running=1", "d"))
    assert settings_from({"model": "x"}, file, {"FORETOKEN_API_KEYS": "e"}).api_keys == ("e",)
    started: list[tuple[int, str]] = []
    monkeypatch.setattr(serve, "_run", lambda settings, *how: started.append(how) or 0)
    options = dict.fromkeys(inspect.signature(serve.serve_command).parameters)
    for flags in ({}, {"replicas": 2, "ray_address": "10.0.0.5:6379"}):
        serve.serve_command(**{**options, "config": file, **flags})
    assert started == [(3, "auto"), (2, "10.0.0.5:6379")]
    for wrong in ("replicas: 0", "replicas: many", "model: a\ntarget: b", "api_key_file: /nowhere/at/all"):
        file.write_text(wrong + "\n")
        with pytest.raises(ValueError, match=r"at least 1|whole number|give one of them|cannot read"):
            serve.serve_command(**{**options, "config": file})


@pytest.mark.parametrize("value", ["3.7", "true", ".inf", ".nan", "null", "[3]", "3x"])
def test_a_number_of_a_file_that_is_not_whole_is_refused(tmp_path: Path, value: str) -> None:
    """3.7 was cut to 3."""
    from foretoken.server.config import settings_from

    file = tmp_path / "serve.yaml"
    file.write_text(f"max_running: {value}\n")
    with pytest.raises(ValueError, match=r"serve\.yaml: max_running must be a whole number, not "):
        settings_from({}, file, {})
    file.write_text("max_running: 3.0\nprefill_time: 1\n")
    assert (settings_from({}, file, {}).max_running, settings_from({}, file, {}).prefill_time) == (3, 1.0)


def test_the_example_file_is_what_the_defaults_are() -> None:
    from foretoken.server.config import ServerSettings, settings_from

    example = Path(__file__).parents[2] / "examples" / "serve.yaml"
    assert settings_from({}, example, {}) == ServerSettings()


def idle(running: Running) -> bool:
    engine = running.serving.llm.engine
    return not engine.busy and engine.target.kv_bytes == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(server: Running, stream: bool) -> None:
    """R4: within one round."""
    body = {
        "model": "builtin",
        "prompt": "x",
        "max_tokens": 1000,
        "temperature": 1,
        "ignore_eos": True,
        "stream": stream,
    }
    before = server.serving.llm.engine.rounds
    with httpx.Client(timeout=0.7) as client, pytest.raises(httpx.TransportError):
        if stream:
            with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    raise httpx.ReadError("enough")
        client.post(f"{server.url}/v1/completions", json=body)
    end = time.monotonic() + 20
    while not idle(server) and time.monotonic() < end:
        time.sleep(0.01)
    assert idle(server)
    assert server.serving.llm.engine.rounds - before < 900
    assert server.complete(max_tokens=2)


def test_a_client_that_goes_away_before_the_head_ends_the_request(server: Running) -> None:
    """The events have not begun then, so they cannot end anything."""
    app = create_app(server.serving.settings, server.serving)
    body = {"model": "builtin", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    body["speculative"] = {"enabled": False}  # a round for each token
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}

    async def run() -> None:
        sends = asyncio.Event()

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sends.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
        await sends.wait()
        while server.serving.llm.engine.rounds == before:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = server.serving.llm.engine.rounds
    asyncio.run(run())
    end = time.monotonic() + 20
    while not idle(server) and time.monotonic() < end:
        time.sleep(0.01)
    assert idle(server) and server.serving.llm.engine.rounds - before < 900


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_leaves_a_stream_is_noticed_within_the_round(
    server: Running, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4: no token comes after the client has gone, so that no failed send tells the server."""
    engine, go = server.serving.llm.engine, threading.Event()
    step, first = engine.step, engine.rounds

    def held() -> Any:
        if engine.rounds >= first + 2:
            go.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", held)
    data = json.dumps({"model": "builtin", "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.serving.settings.port), timeout=60) as sock:
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        reply = b""
        while reply.count(b"data: ") < 2:
            reply += sock.recv(65536)
    # All of it was read: the client's system sends an end and no reset.
    try:
        end = time.monotonic() + 20
        while server.serving.slots.open and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.serving.slots.open and engine.rounds == first + 2
    finally:
        go.set()
    end = time.monotonic() + 20
    while not idle(server) and time.monotonic() < end:
        time.sleep(0.01)
    assert idle(server)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_is_noticed() -> None:
    """R6: health says so, and listeners get an error, not an end."""
    with served() as running:
        engine = running.serving.llm.engine
        step, rounds = engine.step, iter(range(100))

        def dying() -> Any:
            if next(rounds) == 3:
                raise SystemExit("the device is lost")
            return step()

        engine.step = dying  # type: ignore[method-assign]
        body = {
            "model": "builtin",
            "prompt": "x",
            "max_tokens": 500,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        text = running.client.post("/v1/completions", json=body).text
        assert "[DONE]" not in text
        last = json.loads([line[6:] for line in text.splitlines() if line.startswith("data: ")][-1])
        assert last["error"]["code"] == "engine_dead"
        answer = running.client.get("/health")
        assert answer.status_code == 503 and "device is lost" in answer.json()["error"]["message"]
        assert running.client.get("/ready").status_code == 503
        assert running.post("/v1/completions", prompt="x").status_code == 503


def test_one_poisoned_request_leaves_the_others_alone(server: Running) -> None:
    """R2, through HTTP: the others' texts are those of a run without it."""
    prompts = [f"def f{i}(x):" for i in range(7)]
    clean = [
        server.complete(prompt, max_tokens=12, seed=i, temperature=1)["choices"][0]["text"]
        for i, prompt in enumerate(prompts)
    ]
    engine = server.serving.llm.engine
    propose = engine.drafter.propose_batch  # type: ignore[union-attr]

    def poisoned(contexts: Any, budgets: Any) -> Any:
        if any(context.tokens[:2] == [7, 7] for context in contexts):
            raise RuntimeError("poison")
        return propose(contexts, budgets)

    engine.drafter.propose_batch = poisoned  # type: ignore[union-attr, method-assign]
    answers: dict[int, httpx.Response] = {}

    def ask(index: int) -> None:
        prompt: Any = prompts[index] if index < 7 else [7, 7]
        body = {"model": "builtin", "prompt": prompt, "max_tokens": 12, "seed": index, "temperature": 1}
        answers[index] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    try:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        engine.drafter.propose_batch = propose  # type: ignore[union-attr, method-assign]
    assert answers[7].status_code == 500 and answers[7].json()["error"]["code"] == "internal_error"
    assert "poison" not in answers[7].text
    assert [answers[i].json()["choices"][0]["text"] for i in range(7)] == clean
    assert server.complete([7, 7], max_tokens=2)


def test_out_of_memory_is_a_503_and_the_next_request_is_served(server: Running) -> None:
    """R7."""
    target = server.serving.llm.target
    forward = target.forward

    def full(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    target.forward = full  # type: ignore[method-assign]
    try:
        answer = server.post("/v1/completions", prompt="x", max_tokens=2)
    finally:
        target.forward = forward  # type: ignore[method-assign]
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"
    assert server.complete(max_tokens=2) and idle(server)
