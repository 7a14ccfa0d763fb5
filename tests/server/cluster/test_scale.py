"""Many replicas without a cluster: sessions, a replica called in memory, and a gateway whose replicas die on cue."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import httpx
import pytest
from running_server import make_llm

from foretoken.server.cluster.fleet_metrics import labelled
from foretoken.server.cluster.gateway import Admission, Fleet, ReplicaLost, create_gateway
from foretoken.server.cluster.replica import SPENT, Replica
from foretoken.server.cluster.routing import asked_of, choices_of, order, ranked, session_of
from foretoken.server.config import ServerSettings
from foretoken.server.keys import Caller
from foretoken.server.lifecycle import _drained
from foretoken.server.serving import Serving

NAMES = ["a", "b", "c", "d"]


def body(**fields: Any) -> dict[str, Any]:
    return fields


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_all_turns_of_a_conversation_have_one_session() -> None:
    system = {"role": "system", "content": "be brief"}
    first = session_of({}, body(messages=[system, user("hello")]))
    answer = {"role": "assistant", "content": "hi"}
    assert first == session_of({}, body(messages=[system, user("hello"), answer, user("more")], temperature=1))
    assert first != session_of({}, body(messages=[system, user("another"), answer, user("more")]))
    assert first != session_of({}, body(messages=[system, user("hello")], cache_salt="mine"))


def test_prompts_with_the_same_beginning_have_one_session() -> None:
    text = "x" * 256
    assert session_of({}, body(prompt=text + "one")) == session_of({}, body(prompt=text + "two"))
    assert session_of({}, body(prompt="one")) != session_of({}, body(prompt="two"))
    ids = list(range(64))
    assert session_of({}, body(prompt=[*ids, 1])) == session_of({}, body(prompt=[*ids, 2]))
    assert session_of({}, body(prompt=[[1, 2], [3]])) == session_of({}, body(prompt=[1, 2]))


def test_a_named_session_comes_before_the_text() -> None:
    named = {"x-session-id": "s"}
    assert session_of(named, body(prompt="one")) == session_of(named, body(prompt="two")) != ""
    assert session_of({}, body(prompt="one", prompt_cache_key="s")) == session_of(named, {})


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"prompt": 3}', b'{"messages": []}', b"\xff\xfe"])
def test_what_has_no_beginning_has_no_session(raw: bytes) -> None:
    assert session_of({}, asked_of(raw)) == ""


def test_when_a_replica_leaves_only_its_sessions_move() -> None:
    sessions = [f"session {i}" for i in range(400)]
    before = {session: ranked(session, NAMES)[0] for session in sessions}
    after = {session: ranked(session, NAMES[:-1])[0] for session in sessions}
    assert all(after[session] == home for session, home in before.items() if home != "d")
    shares = Counter(before.values())
    assert set(shares) == set(NAMES)
    assert min(shares.values()) > 60  # 100 expected, standard deviation 9


def test_a_session_stays_until_its_replica_has_far_more_than_its_share() -> None:
    ranking = ranked("s", NAMES)
    loads = dict.fromkeys(NAMES, 0)
    assert order("s", loads) == ranking
    loads[ranking[0]] = 1  # of 2 requests on 4 replicas 1 is the most
    assert order("s", loads) == [*ranking[1:], ranking[0]]
    even = dict.fromkeys(NAMES, 4)
    assert order("s", {**even, ranking[0]: 6})[0] == ranking[0]  # of 19 requests: 7.1
    assert order("s", {**even, ranking[0]: 8}) == [*ranking[1:], ranking[0]]
    assert order("s", {"a": 1, "b": 0})[0] == ranked("s", ["a", "b"])[0], "two at once may share a replica of two"


def test_a_burst_is_shared_out() -> None:
    loads = dict.fromkeys(NAMES, 0)
    for number in range(64):
        loads[order(f"session {number}", loads)[0]] += 1
    assert max(loads.values()) <= 24  # 1.5 times the share
    single_loads = dict.fromkeys(NAMES, 0)
    for _ in range(64):
        single_loads[order("always the same", single_loads)[0]] += 1
    assert max(single_loads.values()) <= 24


def test_without_a_session_the_least_busy_serves() -> None:
    assert order("", {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert {order("", dict.fromkeys(NAMES, 0))[0] for _ in range(200)} == set(NAMES)


# -- counters ----------------------------------------------------------------------------------------------------------


def test_samples_say_whose_they_are() -> None:
    text = '# HELP x what\n# TYPE x counter\nx_total{model="m"} 2.0\n# HELP y other\n# TYPE y gauge\ny 1.0\n'
    assert labelled({"a": text, 'b"': text}) == [
        "# HELP x what",
        "# TYPE x counter",
        'x_total{replica="a",model="m"} 2.0',
        'x_total{replica="b\\"",model="m"} 2.0',
        "# HELP y other",
        "# TYPE y gauge",
        'y{replica="a"} 1.0',
        'y{replica="b\\""} 1.0',
    ]


# -- the gateway -------------------------------------------------------------------------------------------------------


class InMemory:
    """Replicas of this process; ``script`` says what becomes of the next requests."""

    num_wanted = 2

    def __init__(self, settings: ServerSettings, script: list[str] | None = None) -> None:
        self.num_ready = 0
        self.script = script or []
        self.sessions: list[str] = []
        self.cancelled = self.silent = 0
        self._settings = settings
        with mock.patch("foretoken.server.logs.install"):  # for a process of its own: it takes over the log for good
            self._replica = Replica(settings, "one", lambda options: Serving(options, make_llm))

    async def start(self) -> None:
        await self._replica.start()
        self.num_ready = 2

    async def answer(
        self, scope: dict[str, Any], body: bytes, session: str, caller: Caller
    ) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        self.sessions.append(session)
        fate = self.script.pop(0) if self.script else "well"
        if fate == "lost at once":
            raise ReplicaLost("gone")
        if fate == "error":
            raise RuntimeError("nobody expects this")
        if fate == "silent":
            self.silent += 1
            await asyncio.sleep(3600)
        seen = 0
        whole = False
        try:
            async for piece in self._replica.answer(scope, body, caller):
                if not any(message["type"].startswith("http.") for message in piece):
                    yield piece  # a report to the gateway alone
                    continue
                if fate == "lost with its head":
                    yield [message for message in piece if message["type"] == "http.response.start"]
                    raise ReplicaLost("gone")
                yield piece
                seen += 1
                if fate == "lost in the middle" and seen == 3:
                    raise ReplicaLost("gone")
                if fate == "error in the middle" and seen == 3:
                    raise RuntimeError("nobody expects this")
                if fate == "ends in the middle" and seen == 3:
                    return
                if fate == "silent in the middle" and seen == 3:
                    self.silent += 1
                    await asyncio.sleep(3600)
            whole = True
        finally:
            self.cancelled += not whole

    async def is_chat(self) -> bool:
        return self._replica.is_chat

    async def metrics(self) -> Mapping[str, str]:
        return {"one": self._replica.metrics()}

    async def stop(self) -> None:
        await self._replica.stop()


SETTINGS = ServerSettings(dtype="float32", max_running=4, max_queued=2)


@asynccontextmanager
async def gateway(
    settings: ServerSettings = SETTINGS, *script: str
) -> AsyncIterator[tuple[httpx.AsyncClient, InMemory, Fleet]]:
    replicas = InMemory(settings, list(script))
    fleet = Fleet(settings, replicas)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_gateway(fleet), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        await fleet.start()
        assert fleet.failed is None, fleet.failed
        try:
            yield client, replicas, fleet
        finally:
            await replicas.stop()


ASKED = {"model": "builtin", "prompt": "def fib(n):", "max_tokens": 12, "temperature": 0}


def check_error(answer: httpx.Response, status: int, code: str | None) -> None:
    """The error has OpenAI's shape, and a Retry-After header where waiting helps."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    assert (status != 503) or int(answer.headers["retry-after"]) >= 1


@pytest.fixture(scope="module")
def whole() -> Iterator[str]:
    """What the model writes without any server."""
    llm = make_llm(SETTINGS)
    yield llm.generate(ASKED["prompt"], max_new_tokens=12, temperature=0.0).text  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "script", [[], ["lost at once"], ["lost with its head"], ["lost at once", "lost with its head", "lost at once"]]
)
def test_a_unary_call_survives_its_replica(script: list[str], whole: str) -> None:
    async def run() -> None:
        async with gateway(SETTINGS, *script) as (client, replicas, fleet):
            answer = await client.post("/v1/completions", json=ASKED)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == whole
            assert answer.headers["x-replica"] == "one" and answer.headers["x-request-id"]
            assert len(replicas.sessions) == len(script) + 1 and len(set(replicas.sessions)) == 1
            assert fleet.metrics.retried == len(script) and fleet.num_open == 0

    asyncio.run(run())


def test_the_gateway_knows_whether_its_model_chats() -> None:
    async def run() -> None:
        async with gateway() as (_, replicas, fleet):
            assert fleet.is_chat is False
            replicas._replica.serving.llm.tokenizer.chat_template = "{{ messages[0].content }}"
            assert await replicas.is_chat() is True

    asyncio.run(run())


def test_a_stream_is_the_same_as_the_whole(whole: str) -> None:
    async def run() -> None:
        async with gateway(SETTINGS, "lost at once") as (client, _, _):
            answer = await client.post("/v1/completions", json={**ASKED, "stream": True})
            data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert data.pop() == "[DONE]"
            assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in data) == whole

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fate", "code"),
    [
        ("lost in the middle", "replica_lost"),
        ("ends in the middle", "replica_lost"),
        ("error in the middle", "internal_error"),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error(fate: str, code: str) -> None:
    async def run() -> None:
        async with gateway(SETTINGS, fate) as (client, _, fleet):
            request = {**ASKED, "max_tokens": 64, "stream": True, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=request)
            data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert json.loads(data[-1])["error"]["code"] == code and "[DONE]" not in data
            assert json.loads(data[0])["choices"][0]["text"]
            assert fleet.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/v1/responses", 'event: error\ndata: {"message":"the replica of this request is gone'),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
        ("/v1/chat/completions", 'data: {"error":{"message":"the replica of this request is gone'),
    ],
)
def test_a_stream_that_breaks_ends_in_the_format_of_its_route(path: str, start: str) -> None:
    async def run() -> None:
        async with gateway(SETTINGS, "lost in the middle") as (client, _, _):
            messages = [{"role": "user", "content": "Hi"}]
            said = {"input": "Hi"} if path == "/v1/responses" else {"messages": messages, "max_tokens": 64}
            answer = await client.post(path, json={"model": "builtin", "stream": True, **said})
            last = answer.text.strip().split("\n\n")[-1]
            assert last.startswith(start), answer.text[-500:]
            assert path != "/v1/responses" or json.loads(last.partition("data: ")[2])["type"] == "error"

    asyncio.run(run())


@pytest.mark.parametrize("root", ["/x", "/x/"])
def test_probes_below_a_path_of_a_proxy(root: str) -> None:
    async def run() -> None:
        async with gateway(ServerSettings(dtype="float32", root_path=root)) as (client, _, _):
            for path in ("/x/health", "/x/ready", "/health"):
                assert (await client.get(path)).json()["replicas"] == {"ready": 2, "wanted": 2}

    asyncio.run(run())


def test_what_takes_longer_than_the_drain_ends_with_an_error() -> None:
    """R5, for a gateway: what began ends with an error event, what did not is refused, and the server can end."""

    async def run() -> None:
        async with gateway(SETTINGS, "silent in the middle", "silent") as (client, replicas, fleet):
            request = {**ASKED, "max_tokens": 64, "stream": True, "ignore_eos": True}
            begun = asyncio.create_task(client.post("/v1/completions", json=request))
            while not replicas.silent:
                await asyncio.sleep(0.01)
            silent = asyncio.create_task(client.post("/v1/completions", json=ASKED))
            while replicas.silent < 2:
                await asyncio.sleep(0.01)
            await _drained(fleet, 0.05)
            check_error(await asyncio.wait_for(silent, 5), 503, "draining")
            stream = await asyncio.wait_for(begun, 5)
            data = [line[6:] for line in stream.text.splitlines() if line.startswith("data: ")]
            assert json.loads(data[-1])["error"]["code"] == "draining" and "[DONE]" not in data
            assert json.loads(data[0])["choices"][0]["text"]
            assert fleet.num_open == 0 and replicas.cancelled == 1

    asyncio.run(run())


def test_errors_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.cluster.gateway.Gateway.pause_s", 0.001)

    async def run() -> None:
        async with gateway(SETTINGS, *["lost at once"] * 8, "error") as (client, _, fleet):
            check_error(await client.post("/v1/completions", json=ASKED), 503, "replica_lost")
            check_error(await client.post("/v1/completions", json=ASKED), 500, "internal_error")
            check_error(await client.post("/v1/completions", json={**ASKED, "max_tokens": -1}), 400, "invalid_value")
            check_error(await client.get("/nothing"), 404, "unknown_url")
            fleet.num_admitted = fleet.capacity
            check_error(await client.post("/v1/completions", json=ASKED), 503, "queue_full")
            fleet.num_admitted = 0
            fleet.drain()
            check_error(await client.post("/v1/completions", json=ASKED), 503, "draining")
            check_error(await client.get("/ready"), 503, "draining")
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())


STREAM = {**ASKED, "max_tokens": 64, "stream": True, "ignore_eos": True}


@asynccontextmanager
async def open_requests(
    client: httpx.AsyncClient, replicas: InMemory, requests: list[dict[str, Any]]
) -> AsyncIterator[None]:
    """Requests of which the script makes silent ones, inside the block."""
    tasks = [asyncio.create_task(client.post("/v1/completions", json=request)) for request in requests]
    most = replicas.silent + len(tasks)
    while replicas.silent < most:
        assert not any(task.done() for task in tasks), [task.result().text for task in tasks if task.done()]
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def test_requests_take_no_room_before_a_replica_admits_them() -> None:
    """Of twelve open requests three are admitted; the other nine, which may be refused, left no room for one more."""

    async def run() -> None:
        script = ["silent in the middle"] * 3 + ["silent"] * 9
        async with gateway(SETTINGS, *script) as (client, replicas, fleet):
            async with open_requests(client, replicas, [STREAM] * 12):
                assert fleet.num_open == fleet.capacity == 12
                assert (fleet.num_admitted, fleet.num_undecided) == (3, 9)
                assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
                replicas.script[:] = ["silent"] * 3
                async with open_requests(client, replicas, [ASKED] * 3):
                    check_error(await client.post("/v1/completions", json=ASKED), 503, "queue_full")  # twelve wait
            assert (fleet.num_open, fleet.num_admitted, fleet.num_undecided) == (0, 0, 0)

    asyncio.run(run())


def test_a_refused_request_takes_no_room() -> None:
    async def run() -> None:
        async with gateway(SETTINGS) as (_, _, fleet):
            sent = asyncio.Event()

            async def send(message: Any) -> None:
                sent.set()
                await asyncio.sleep(3600)  # a client that does not read

            request = json.dumps({**ASKED, "temperature": -1}).encode()
            messages = asyncio.Queue[Any]()
            messages.put_nowait({"type": "http.request", "body": request, "more_body": False})
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
            asking = asyncio.create_task(create_gateway(fleet)(scope, messages.get, send))
            await asyncio.wait_for(sent.wait(), 60)
            assert (fleet.num_open, fleet.num_admitted, fleet.num_undecided) == (1, 0, 0)
            messages.put_nowait({"type": "http.disconnect"})
            await asyncio.wait_for(asking, 10)

    asyncio.run(run())


def test_choices_count_and_what_needs_no_room_is_answered() -> None:
    async def run() -> None:
        async with gateway(SETTINGS, "lost at once", "silent in the middle") as (client, replicas, fleet):
            replicas.num_ready = 1
            async with open_requests(client, replicas, [{**STREAM, "n": 6, "temperature": 1}]):
                assert (fleet.num_open, fleet.num_admitted, fleet.num_undecided) == (1, 6, 0)
                answer = await client.post("/v1/completions", json=ASKED)
                check_error(answer, 503, "queue_full")
                assert "all replicas are busy" in answer.json()["error"]["message"]
                assert (await client.get("/v1/models")).status_code == 200
            assert fleet.num_admitted == 0

    asyncio.run(run())


def test_a_replica_that_hangs_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.cluster.gateway.Gateway.grace_s", 0.0)

    async def run() -> None:
        settings = ServerSettings(dtype="float32", request_timeout=0.5)
        async with gateway(settings, "silent") as (client, _, fleet):
            check_error(await client.post("/v1/completions", json=ASKED), 504, "deadline_exceeded")
            assert fleet.num_open == 0

    asyncio.run(run())


def test_a_key_cannot_hold_all_places_of_a_replica() -> None:
    """Replicas know no keys, only that there are several: the last place was anybody's."""

    async def run() -> None:
        settings = ServerSettings(dtype="float32", max_running=2, max_queued=1, api_keys=("greedy", "other"))
        async with gateway(settings) as (client, replicas, _):
            serving = replicas._replica.serving
            assert serving.llm.engine.kept_places == 1
            slot = serving.slots.slot(settings.keys.caller({"x-api-key": "greedy"}))
            slot.take(2)
            answer = await client.post("/v1/completions", json=ASKED, headers={"X-Api-Key": "greedy"})
            check_error(answer, 503, "queue_full")
            assert "1 are for keys without open choices" in answer.json()["error"]["message"]
            assert (await client.post("/v1/completions", json=ASKED, headers={"X-Api-Key": "other"})).status_code == 200
            slot.close()
        async with gateway(SETTINGS) as (_, replicas, _):
            assert replicas._replica.serving.slots.reserved == replicas._replica.serving.llm.engine.kept_places == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 6),
        ("/v1/completions", {"prompt": [1, 2]}, 1),
        ("/v1/chat/completions", {"n": 3, "prompt": ["a", "b"]}, 3),
        ("/v1/chat/completions", {"n": True}, 1),
        ("/v1/messages", {"n": 3, "prompt": ["a", "b"]}, 1),
        ("/v1/responses", {"n": 3}, 1),
    ],
)
def test_choices_are_those_that_a_replica_admits(path: str, fields: dict[str, Any], count: int) -> None:
    assert choices_of(path, fields) == count


def test_a_quota_counts_the_one_answer_of_messages_and_responses() -> None:
    """Fields that have no effect there cost nothing."""

    async def run() -> None:
        settings = ServerSettings(dtype="float32", api_keys=("one",), key_running=1, key_queued=0)
        async with gateway(settings) as (client, _, _):
            key = {"X-Api-Key": "one"}
            asked = {"model": "builtin", "n": 2, "max_tokens": 2, "messages": [user("hello")]}
            assert (await client.post("/v1/messages", json=asked, headers=key)).status_code == 200
            asked = {"model": "builtin", "n": 2, "max_output_tokens": 2, "input": "hello"}
            assert (await client.post("/v1/responses", json=asked, headers=key)).status_code == 200
            answer = await client.post("/v1/completions", json={**ASKED, "n": 2}, headers=key)
            check_error(answer, 400, "too_many_choices")

    asyncio.run(run())


def test_keys_are_the_gateways_business() -> None:
    async def run() -> None:
        async with gateway(ServerSettings(dtype="float32", api_keys=("secret",))) as (client, replicas, _):
            check_error(await client.post("/v1/completions", json=ASKED), 401, "invalid_api_key")
            assert not replicas.sessions
            key = {"Authorization": "Bearer secret"}
            assert (await client.post("/v1/completions", json=ASKED, headers=key)).status_code == 200
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(run())


def test_health_readiness_and_counters() -> None:
    async def run() -> None:
        async with gateway(ServerSettings(dtype="float32", metrics_compat="vllm")) as (client, replicas, fleet):
            assert (await client.get("/ready")).json()["replicas"] == {"ready": 2, "wanted": 2}
            await client.post("/v1/completions", json=ASKED)
            lines = (await client.get("/metrics")).text.splitlines()
            assert 'foretoken:replicas_ready{model_name="builtin"} 2' in lines
            for prefix in ("foretoken", "vllm"):
                assert f'{prefix}:generation_tokens_total{{replica="one",model_name="builtin"}} 12.0' in lines
            assert not any("request_failure_total{" in line for line in lines)
            assert (await client.post("/v1/completions", json={**ASKED, "temperature": -1})).status_code == 400
            assert (await client.post("/v1/completions", content=b"x" * 3_000_000)).status_code == 413
            lines = (await client.get("/metrics")).text.splitlines()
            for replica, reason in (("one", "invalid_value"), ("gateway", "invalid_request_error")):
                (line,) = [line for line in lines if f'foretoken:request_failure_total{{replica="{replica}"' in line]
                assert f'reason="{reason}"' in line and float(line.split()[-1]) == 1
            heads = [line for line in lines if line.startswith("# TYPE")]
            assert len(heads) == len(set(heads))
            replicas.num_ready = 0
            check_error(await client.get("/ready"), 503, "loading")
            fleet.failed = ValueError("no room")
            check_health = await client.get("/health")
            assert check_health.status_code == 503 and "no room" in check_health.text

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_request() -> None:
    async def run() -> None:
        async with gateway(SETTINGS) as (_, replicas, fleet):
            app = create_gateway(fleet)
            sent: list[Any] = []
            some, messages = asyncio.Event(), asyncio.Queue[Any]()
            request = {**ASKED, "max_tokens": 900, "stream": True, "ignore_eos": True}
            messages.put_nowait({"type": "http.request", "body": json.dumps(request).encode(), "more_body": False})

            async def send(message: Any) -> None:
                sent.append(message)
                if len(sent) == 3:
                    some.set()

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
            headers = [(b"content-type", b"application/json")]
            asking = asyncio.create_task(app({**scope, "headers": headers}, messages.get, send))
            await asyncio.wait_for(some.wait(), 60)
            messages.put_nowait({"type": "http.disconnect"})
            await asyncio.wait_for(asking, 10)
            assert replicas.cancelled == 1 and fleet.num_open == 0
            for _ in range(100):
                if not replicas._replica.serving.num_open:
                    break
                await asyncio.sleep(0.02)
            assert replicas._replica.serving.num_open == 0

    asyncio.run(run())


def test_replicas_that_cannot_be_started_are_told() -> None:
    class Broken(InMemory):
        async def start(self) -> None:
            raise ValueError("no cluster")

    async def run() -> None:
        fleet = Fleet(SETTINGS, Broken(SETTINGS))  # type: ignore[arg-type]
        await fleet.start()
        assert fleet.trouble == "no cluster" and not fleet.is_loaded

    asyncio.run(run())


QUOTA = replace(SETTINGS, api_keys=("a tokens_per_minute=20",))


@pytest.mark.parametrize("fate", ["lost in the middle", "ends in the middle"])
def test_a_quota_counts_what_was_sent_of_a_stream_that_broke_off(fate: str) -> None:
    async def run() -> None:
        async with gateway(QUOTA, fate) as (client, replicas, _):
            client.headers["Authorization"] = "Bearer a"
            broken = await client.post("/v1/completions", json={**ASKED, "prompt": [5] * 30, "stream": True})
            assert broken.status_code == 200 and "[DONE]" not in broken.text
            check_error(await client.post("/v1/completions", json=ASKED), 429, "key_tokens_exceeded")
            assert len(replicas.sessions) == 1, "a replica knows only what it has spent itself"

    asyncio.run(run())


def test_a_quota_does_not_count_what_a_lost_replica_has_read() -> None:
    fleet = Fleet(QUOTA, mock.Mock())
    slot = fleet.slots.slot(Caller(name="a", tokens_per_minute=20))
    admission = Admission(fleet, slot, True)
    admission.wait()
    assert admission.takes({"type": SPENT, "tokens": 30})
    admission.wait()  # for another replica
    assert admission.takes({"type": SPENT, "tokens": 10}) and slot.spent == 10
    admission.end()
    assert slot.spent == 10


def test_tokens_are_reported_before_an_answer_that_nobody_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.cluster.replica.REPORT_S", 0.01)
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asked = json.dumps({**ASKED, "max_tokens": 600, "ignore_eos": True}).encode()

    async def run() -> None:
        async with gateway() as (_, replicas, _):
            pieces = [piece async for piece in replicas._replica.answer(scope, asked)]
            messages = [message for piece in pieces for message in piece]
            kinds = [message["type"] for message in messages]
            assert kinds.index(SPENT) < kinds.index("http.response.start") - 1, kinds
            usage = json.loads(b"".join(message.get("body", b"") for message in messages))["usage"]
            assert sum(message["tokens"] for message in messages if message["type"] == SPENT) == usage["total_tokens"]

    asyncio.run(run())
