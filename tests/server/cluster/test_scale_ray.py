"""Two replicas under Ray Serve: real processes, real kills.  About a minute; skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
psutil = pytest.importorskip("psutil", reason="the extra 'ray' is not installed")

from running_server import make_llm  # noqa: E402
from test_lifecycle import free_port  # noqa: E402

from foretoken.server.config import ServerSettings  # noqa: E402

FLAGS = ("--dtype", "float32", "--drafter", "ngram", "--controller", "constant", "--replicas", "2")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


class Cluster:
    """``foretoken serve --replicas 2`` and the processes below it."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "foretoken", "serve", "builtin", *FLAGS, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENV)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self.below: list[Any] = []

    def wait_until_ready(self, replicas: int = 2, seconds: float = 150) -> None:
        """Until so many replicas can serve."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.stderr.read() if self.process.stderr else ""
            try:
                answer = self.client.get("/ready")
                if answer.status_code == 200 and answer.json()["replicas"]["ready"] >= replicas:
                    self.below = psutil.Process(self.process.pid).children(recursive=True)
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError("the replicas did not get ready")

    def replica_pids(self) -> list[int]:
        """Processes of replicas that live."""
        pids = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE and "ServeReplica" in "".join(process.cmdline()):
                    pids.append(process.pid)
            except psutil.NoSuchProcess:
                continue
        return pids

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        """A greedy completion."""
        body = {"model": "builtin", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def close(self) -> None:
        """End everything, whatever state it is in."""
        if self.process.poll() is None:
            self.below = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
        self.process.wait(30)
        for process in self.below:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.close()


def test_replicas_write_what_one_model_writes(cluster: Cluster) -> None:
    llm = make_llm(ServerSettings())
    prompts = [f"def f{i}(x):" for i in range(6)]
    expected = [llm.generate(prompt, max_new_tokens=16, temperature=0.0).text for prompt in prompts]
    answers = [cluster.complete(prompt, max_tokens=16) for prompt in prompts]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    assert len({answer.headers["x-replica"] for answer in answers}) == 2, "six sessions, one replica: 1 in 32"


def test_the_second_turn_finds_its_cache(cluster: Cluster) -> None:
    homes = set()
    for number in range(6):
        messages = [{"role": "user", "content": f"Explain in many words what the number {number} means to a baker."}]
        body = {"model": "builtin", "max_tokens": 24, "temperature": 0}
        first = cluster.client.post("/v1/chat/completions", json={**body, "messages": messages})
        content = first.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And to a miller?"}]
        second = cluster.client.post("/v1/chat/completions", json={**body, "messages": messages})
        assert first.headers["x-replica"] == second.headers["x-replica"]
        usage = second.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first.json()["usage"]["prompt_tokens"] - 1 > 8
        homes.add(first.headers["x-replica"])
    assert len(homes) == 2


def test_a_named_session_stays_where_it_is(cluster: Cluster) -> None:
    for session in ("one", "two", "three"):
        answers = [
            cluster.client.post(
                "/v1/completions",
                json={"model": "builtin", "prompt": f"{number} bottles", "max_tokens": 1},
                headers={"X-Session-Id": session},
            )
            for number in range(4)
        ]
        assert len({answer.headers["x-replica"] for answer in answers}) == 1


def test_errors_and_counters_are_the_servers(cluster: Cluster) -> None:
    wrong = cluster.complete("x", max_tokens=-1)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "max_tokens"
    assert cluster.client.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert cluster.client.get("/health").json()["status"] == "ok"
    cluster.complete("count me", max_tokens=5)
    text = cluster.client.get("/metrics").text
    tokens = [line for line in text.splitlines() if line.startswith("foretoken:generation_tokens_total{")]
    assert tokens and all('replica="' in line for line in tokens)
    assert 'foretoken:replicas_ready{model_name="builtin"} 2' in text


def test_a_killed_replica_loses_no_unary_call_and_breaks_streams_loudly(cluster: Cluster) -> None:
    """R11: 0 of 100 calls fail; a stream of the killed replica ends with an error, not as if it were whole."""
    answers: list[httpx.Response] = []
    streams: list[list[str]] = []
    errors: list[Exception] = []
    tickets = iter(range(100))
    lock, begun = threading.Lock(), threading.Barrier(7)

    def call() -> None:
        begun.wait(60)
        while True:
            with lock:
                number = next(tickets, None)
            if number is None:
                return
            try:
                answers.append(cluster.complete(f"call {number}", max_tokens=32, ignore_eos=True))
            except Exception as error:  # counted below
                errors.append(error)

    def read(number: int) -> None:
        body = {"model": "builtin", "prompt": f"stream {number}", "max_tokens": 900, "temperature": 1, "seed": number}
        lines: list[str] = []
        with cluster.client.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "ignore_eos": True}
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    lines.append(line[6:])
                    if len(lines) == 1:
                        begun.wait(60)
        streams.append(lines)

    threads = [threading.Thread(target=call) for _ in range(4)]
    threads += [threading.Thread(target=read, args=(number,)) for number in (0, 1, 2)]
    for thread in threads:
        thread.start()
    while len(answers) < 5:
        time.sleep(0.02)
    before = cluster.replica_pids()
    busiest = max(before, key=lambda pid: psutil.Process(pid).cpu_times().user)
    os.kill(busiest, signal.SIGKILL)
    for thread in threads:
        thread.join(240)
    assert not errors and len(answers) == 100
    assert {answer.status_code for answer in answers} == {200}
    ends = [json.loads(lines[-1])["error"]["code"] if lines[-1] != "[DONE]" else "[DONE]" for lines in streams]
    assert len(ends) == 3 and set(ends) <= {"[DONE]", "replica_lost"}
    for lines, end in zip(streams, ends, strict=True):
        assert ("[DONE]" in lines) == (end == "[DONE]")
    cluster.wait_until_ready(2)
    assert busiest not in cluster.replica_pids()


def test_a_stream_of_a_killed_replica_is_no_whole_answer(cluster: Cluster) -> None:
    cluster.wait_until_ready(2)
    body = {"model": "builtin", "prompt": "long", "max_tokens": 900, "temperature": 1, "seed": 1, "ignore_eos": True}
    lines = []
    with cluster.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                lines.append(line[6:])
                if len(lines) == 5:
                    for pid in cluster.replica_pids():
                        os.kill(pid, signal.SIGKILL)
    assert json.loads(lines[-1])["error"]["code"] == "replica_lost" and "[DONE]" not in lines
    begun = time.monotonic()
    assert cluster.complete("nobody is there yet").status_code == 200, "it waits for a new replica"
    assert time.monotonic() - begun < 120


def test_a_signal_drains_and_leaves_nothing(cluster: Cluster) -> None:
    """R5.  The last test of this cluster."""
    cluster.wait_until_ready(1)
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"model": "builtin", "prompt": "drain", "max_tokens": 300, "temperature": 1, "ignore_eos": True}
        with cluster.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    if reader.is_alive():
        answer = httpx.get(f"http://127.0.0.1:{cluster.port}/ready")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
    reader.join(120)
    assert cluster.process.wait(60) == 0
    assert [line for line in lines if line][-1] == "data: [DONE]"
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("waits_s", [0.0, 4.0])
def test_a_signal_does_not_wait_for_replicas_that_are_starting(waits_s: float) -> None:
    """Whether Ray or the replicas are being started: one line, exit code 0, and nothing is left or started again."""
    starting = Cluster()
    try:
        status = 0
        while status != 503:
            with suppress(httpx.TransportError):
                status = starting.client.get("/ready").status_code
            time.sleep(0.1)
        main = psutil.Process(starting.process.pid)
        while not main.children():  # Ray's first process
            time.sleep(0.1)
        time.sleep(waits_s)
        below = main.children(recursive=True)
        starting.process.send_signal(signal.SIGTERM)
        _, stderr = starting.process.communicate(timeout=20)
        assert starting.process.returncode == 0 and "stopped while the model was loading\n" in stderr
        _, alive = psutil.wait_procs(below, timeout=5)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    finally:
        starting.close()


def refused(*flags: str, code: str = "import sys; from foretoken.cli.main import main; sys.exit(main())") -> str:
    """The last line of a start that fails."""
    command = [sys.executable, "-c", code, "serve", *flags, "--replicas", "2"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=200)
    assert result.returncode == 2, (result.returncode, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith("starting")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_what_cannot_start_says_so_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert "cannot listen" in refused("builtin", "--port", str(sock.getsockname()[1]))
    hidden = "import sys; sys.modules['ray'] = None; from foretoken.cli.main import main; sys.exit(main())"
    assert "pip install 'foretoken[ray]'" in refused("builtin", "--port", str(free_port()), code=hidden)
    assert "no Ray cluster at" in refused("builtin", "--port", str(free_port()), "--ray-address", "auto")
    for address, words in ((f"127.0.0.1:{free_port()}", "refused"), ("somewhere", "HOST:PORT")):
        assert words in refused("builtin", "--port", str(free_port()), "--ray-address", address)
    broken = tmp_path / "broken"
    broken.mkdir()
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    (broken / "config.json").write_text(json.dumps({"model_type": "llama", **small}))
    save_file({"unknown": torch.zeros(1)}, broken / "model.safetensors")  # as sound as can be seen without loading
    line = refused(str(broken), "--port", str(free_port()))
    assert "the replicas cannot be started" in line and "broken" in line
