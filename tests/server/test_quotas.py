"""Keys keep their owners apart, on one machine and behind replicas, and nobody takes more than their key may."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import httpx
import pytest
from running_server import Running, make_llm, served
from test_scale import ASKED, gateway

import foretoken as ft
from foretoken.engine.request import Request
from foretoken.llm import Llm
from foretoken.server.config import ServerSettings
from foretoken.server.keys import Caller, Keys, parsed
from foretoken.server.slots import AdmissionSlots

TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return " * 2


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def error(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    details: dict[str, Any] = answer.json()["error"]
    assert details["code"] == code
    return details


def test_a_gateway_keeps_texts_of_two_keys_apart() -> None:
    """One prompt with two keys: the second finds nothing, and each finds its own again."""

    async def run() -> None:
        async with gateway(ServerSettings(dtype="float32", api_keys=("one", "two"))) as (client, replicas, _):

            async def ask(key: str, **more: Any) -> int:
                body = {**ASKED, "prompt": TEXT, "max_tokens": 4, **more}
                return cached(await client.post("/v1/completions", json=body, headers=bearer(key)))

            assert await ask("one") == 0
            assert await ask("two") == 0
            assert await ask("one") > 20 and await ask("two") > 20
            assert await ask("one", cache_salt="s") == 0
            assert await ask("two", cache_salt="s") == 0
            assert len(set(replicas.sessions[:2])) == 2, "texts of two keys need no replica in common"

    asyncio.run(run())


def learns(settings: ServerSettings) -> Llm:
    return ft.load("builtin", "ngram_cache", dtype="float32", controller="constant", known=True)


def test_a_gateway_keeps_what_drafters_learn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned from a key's answer drafts for that key, and not for another."""
    monkeypatch.setattr("test_scale.make_llm", learns)

    async def run() -> None:
        async with gateway(ServerSettings(dtype="float32", api_keys=("one", "two"), prefix_cache=False)) as (
            client,
            _,
            _,
        ):

            async def drafted(key: str) -> int:
                body = {**ASKED, "prompt": "def fib(n):", "max_tokens": 24, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, headers=bearer(key))
                assert answer.status_code == 200, answer.text
                return int(answer.json()["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])

            first = await drafted("one")
            assert await drafted("two") == first
            assert await drafted("one") > first

    asyncio.run(run())


def test_a_client_cannot_say_who_it_is() -> None:
    """Headers of clients are not what a gateway tells its replicas."""

    async def run() -> None:
        async with gateway(ServerSettings(dtype="float32", api_keys=("one", "two"))) as (client, _, _):
            for key in ("one", "two"):
                headers = {**bearer(key), "caller": "x", "x-caller": "x", "state": "x"}
                answer = await client.post("/v1/completions", json={**ASKED, "prompt": TEXT}, headers=headers)
                assert cached(answer) == 0

    asyncio.run(run())


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_entries_of_keys() -> None:
    key, caller = parsed("k name=a running=4 queued=0 tokens_per_minute=60 priority", 1, Caller())
    assert (key, caller) == ("k", Caller("", "a", 4, 0, 60, True)) and caller.most_open == 4
    assert parsed("k", 3, Caller(running=2))[1] == Caller(name="key-3", running=2)
    assert not parsed("k priority=false", 1, Caller(priority=True))[1].priority


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["same", "other", "same running=1"], "API key 3 is given twice"),
        (["a name=x", "b name=x"], "two API keys have the name 'x'"),
        (["secret speed=3"], "API key 1 has an unknown option"),
        (["secret running"], "API key 1 has an unknown option"),
        (["secret running=0"], "running must be a whole number of at least 1"),
        (["secret queued=-1 running=1"], "queued must be a whole number of at least 0"),
        (["secret queued=3"], "give running too"),
        (["secret priority=maybe"], "priority must be true or false"),
        (["secret name="], "name must be 1 to 64"),
        (["running=3"], "write options after their key"),
    ],
)
def test_wrong_entries_are_refused_without_the_key(entries: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        ServerSettings(api_keys=tuple(entries))
    assert "secret" not in str(refused.value) and "same" not in str(refused.value)


def test_quotas_need_keys() -> None:
    with pytest.raises(ValueError, match="need keys"):
        ServerSettings(key_running=1)
    with pytest.raises(ValueError, match="key_queued needs key_running"):
        ServerSettings(api_keys=("a",), key_queued=1)
    with pytest.raises(ValueError, match="FORETOKEN_API_KEY is set and empty"):
        from foretoken.server.config import settings_from

        settings_from({}, environ={"FORETOKEN_API_KEY": " "})


def test_an_anthropic_clients_header_is_a_key() -> None:
    keys = Keys(("one name=a", "two name=b"), Caller())
    assert keys.caller({"x-api-key": "two"}) is not None
    assert keys.caller({"x-api-key": "three"}) is None and keys.caller({}) is None


def test_tokens_come_back_evenly() -> None:
    now = [0.0]
    places = AdmissionSlots(None, clock=lambda: now[0])
    caller = Caller(name="a", tokens_per_minute=60)

    def refused() -> str | None:
        place = places.slot(caller)
        try:
            place.take(1)
        except Exception as error:
            return str(getattr(error, "headers", {}).get("Retry-After"))
        finally:
            place.close()
        return None

    assert refused() is None
    places.slot(caller).spend(90)
    assert refused() == "30"
    now[0] = 29.0
    assert refused() == "1"
    now[0] = 30.0
    assert refused() is None
    now[0] = 1000.0  # not more than a minute's are saved up
    places.slot(caller).spend(61)
    assert refused() == "1"


def test_tokens_of_a_key_are_counted_and_refused() -> None:
    keys = ("a tokens_per_minute=10 name=slow", "b")
    with served(api_keys=keys) as running:

        def ask(key: str) -> httpx.Response:
            body = {"model": "builtin", "prompt": "def fib(n):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            return running.client.post("/v1/completions", json=body, headers=bearer(key))

        assert ask("a").status_code == 200
        refused = ask("a")
        assert "10 tokens a minute" in error(refused, 429, "key_tokens_exceeded")["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask("b").status_code == 200
        text = running.client.get("/metrics", headers=bearer("b")).text
        assert 'admission_rejections_total{model_name="builtin",reason="key_tokens_exceeded"} 1.0' in text


def test_a_gateway_counts_tokens_of_a_key_for_all_replicas() -> None:
    async def run() -> None:
        settings = ServerSettings(dtype="float32", api_keys=("a tokens_per_minute=10", "b running=1 queued=1"))
        async with gateway(settings) as (client, _, _):

            async def ask(key: str, **more: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={**ASKED, **more}, headers=bearer(key))

            assert (await ask("a")).status_code == 200
            error(await ask("a"), 429, "key_tokens_exceeded")
            many = {"prompt": ["x", "y", "z"]}
            error(await ask("b", **many), 400, "too_many_choices")
            assert (await ask("b", prompt=["x", "y"])).status_code == 200

    asyncio.run(run())


def test_refusals_of_a_gateway_are_counted_as_a_servers() -> None:
    """In the family that the dashboard shows, and not as requests that were answered with an error."""

    async def run() -> None:
        keys = ("a tokens_per_minute=10", "b running=1 queued=0")
        async with gateway(ServerSettings(dtype="float32", api_keys=keys, max_running=1, max_queued=1)) as (
            client,
            _,
            fleet,
        ):

            async def ask(key: str, **more: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={**ASKED, **more}, headers=bearer(key))

            assert (await ask("a")).status_code == 200
            error(await ask("a"), 429, "key_tokens_exceeded")
            error(await ask("b", prompt=["x", "y"]), 400, "too_many_choices")
            with closing(fleet.slots.slot(Caller(name="key-2", running=1, queued=0))) as other:
                other.take(1)  # all that this key may have open, whatever the number of replicas
                error(await ask("b"), 429, "key_queue_full")
            fleet.num_admitted = fleet.capacity
            error(await ask("b"), 503, "queue_full")
            fleet.num_admitted = 0
            fleet.drain()
            error(await ask("b"), 503, "draining")
            assert (await client.get("/v1/models", headers=bearer("b"))).status_code == 503  # needs no admission
            text = (await client.get("/metrics", headers=bearer("b"))).text
            own = [line for line in text.splitlines() if 'replica="gateway"' in line]
            where = 'replica="gateway",model_name="builtin"'
            reasons = ("key_tokens_exceeded", "too_many_choices", "key_queue_full", "queue_full", "draining")
            assert own == [
                f'foretoken:request_failure_total{{{where},reason="draining"}} 1',
                *(f'foretoken:admission_rejections_total{{{where},reason="{reason}"}} 1' for reason in reasons),
            ]

    asyncio.run(run())


def test_what_waits_of_a_key_does_not_hold_up_others() -> None:
    """Two of a key's four requests may be open and one may run: two are refused, and another key's runs beside."""
    with served(api_keys=("greedy running=1 queued=1", "other"), max_running=4) as running:
        engine = running.serving.llm.engine
        go, step, seen = threading.Event(), engine.step, []

        def slow_step() -> Any:
            go.wait(60)
            results = step()
            seen.append([run.request.owner for run in engine.requests.running])
            return results

        engine.step = slow_step  # type: ignore[method-assign]
        answers: list[tuple[str, httpx.Response]] = []

        def ask(key: str) -> None:
            body = {"model": "builtin", "prompt": "x", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answers.append(
                (key, httpx.post(f"{running.url}/v1/completions", json=body, headers=bearer(key), timeout=60))
            )

        threads = [threading.Thread(target=ask, args=(key,)) for key in ("greedy",) * 4]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 2)
        for _, answer in answers:
            assert "2 of at most 2 choices open" in error(answer, 429, "key_queue_full")["message"]
        threads.append(threading.Thread(target=ask, args=("other",)))
        threads[-1].start()
        wait_until(lambda: running.serving.num_open == 3)
        go.set()
        for thread in threads:
            thread.join(60)
        assert sorted(answer.status_code for _, answer in answers) == [200, 200, 200, 429, 429]
        assert max(owners.count("key-1") for owners in seen) == 1
        assert any(sorted(owners) == ["key-1", "key-2"] for owners in seen), "the other key's request ran beside"


def wait_until(done: Any, seconds: float = 60) -> None:
    import time

    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_key_cannot_hold_all_places() -> None:
    """Without any limit of its own: the last place is for a key that has none, and its request runs beside."""
    with served(api_keys=("greedy", "other"), max_running=2, max_queued=1) as running:
        engine = running.serving.llm.engine
        go, step, seen = threading.Event(), engine.step, []

        def held_step() -> Any:
            results = step()
            seen.append([run.request.owner for run in engine.requests.running])
            go.wait(60)
            return results

        engine.step = held_step  # type: ignore[method-assign]
        answers: list[tuple[str, int]] = []

        def ask(key: str) -> None:
            body = {"model": "builtin", "prompt": "x", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=bearer(key), timeout=60)
            if answer.status_code == 503:
                assert "1 are for keys without open choices" in error(answer, 503, "queue_full")["message"]
            answers.append((key, answer.status_code))

        threads = [threading.Thread(target=ask, args=("greedy",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 2)
        assert answers == [("greedy", 503)] * 2, "two of its four are taken, where three places are"
        threads.append(threading.Thread(target=ask, args=("other",)))
        threads[-1].start()
        wait_until(lambda: running.serving.num_open == 3)
        go.set()
        for thread in threads:
            thread.join(60)
        assert sorted(answers) == [("greedy", 200)] * 2 + [("greedy", 503)] * 2 + [("other", 200)]
        both = next(owners for owners in seen if "key-2" in owners)
        assert sorted(both) == ["key-1", "key-2"], "it did not wait for the greedy key's second request"


def test_one_key_alone_has_all_places() -> None:
    """Nothing is kept back for others that there are not."""
    with served(api_keys=("only",), max_running=1, max_queued=1) as running:
        assert running.serving.slots.reserved == running.serving.llm.engine.kept_places == 0


def test_only_keys_that_may_come_first() -> None:
    with served(api_keys=("boss priority", "worker")) as running:

        def ask(key: str, priority: int) -> httpx.Response:
            body = {"model": "builtin", "prompt": "x", "max_tokens": 1, "priority": priority}
            return running.client.post("/v1/completions", json=body, headers=bearer(key))

        assert ask("boss", -5).status_code == 200
        assert error(ask("worker", -5), 400, "priority_not_allowed")["param"] == "priority"
        assert ask("worker", 0).status_code == ask("worker", 7).status_code == 200


def test_the_engine_lets_one_owner_run_so_many() -> None:
    engine = make_llm(ServerSettings()).engine
    owners = [("a", 1), ("a", 1), ("b", 0), ("b", 0)]
    for owner, most in owners:
        engine.add(Request([5, 6, 7], max_new_tokens=2, owner=owner, owner_running=most))
    engine.step()
    assert [run.request.owner for run in engine.requests.running] == ["a", "b", "b"]
    while engine.busy:
        engine.step()


def test_without_keys_all_callers_are_one(server: Running) -> None:
    """Texts are shared, and any priority may be asked for."""
    assert server.post("/v1/completions", prompt=TEXT, max_tokens=1, priority=-3).status_code == 200
    assert cached(server.post("/v1/completions", prompt=TEXT, max_tokens=1)) > 20
