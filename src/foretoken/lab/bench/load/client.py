"""Sends requests and times what comes back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from time import perf_counter
from typing import Any

import httpx

from foretoken.lab.bench.load.sample import Drafts, Sample, StreamError
from foretoken.lab.bench.load.settings import Ask, LoadSettings, Server, ServerArm

SALTED_OWNERS = ("foretoken", "vllm")
"""Who knows ``cache_salt``; others refuse fields that they do not know, or ignore them."""
COUNTERS = {
    "rounds": "spec_decode_num_drafts",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
_DONE = b"[DONE]"


def open_client(timeout_s: float) -> httpx.AsyncClient:
    """A client for as many connections as a test opens; it takes no proxy from the environment."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits, trust_env=False)


def headers_of(server: Server) -> dict[str, str]:
    """The key."""
    return {"Authorization": f"Bearer {server.key}"} if server.key else {}


async def find_server(http: httpx.AsyncClient, name: str, url: str, key: str, model: str | None) -> Server:
    """The server at an address, with what it says of itself.

    Raises:
        ValueError: nothing answers there, or it does not say what it serves and no model was named.
    """
    server = Server(name, url, model or "", key)
    try:
        answer = await http.get(f"{url}/v1/models", headers=headers_of(server), timeout=10.0)
    except httpx.TransportError as error:
        raise ValueError(f"nothing answers at {url}: {error or type(error).__name__}") from None
    except httpx.InvalidURL as error:
        raise ValueError(f"{url} is no address: {error}") from None
    if answer.status_code in (401, 403):
        raise ValueError(f"{url} wants an API key: give --api-key, or set OPENAI_API_KEY")
    listed = _listed(answer)
    if not model and not listed:
        raise ValueError(f"{url}/v1/models does not say what is served ({answer.status_code}): give --model")
    mine = next((one for one in listed if one.get("id") == model), listed[0] if listed else {})
    salted = mine.get("owned_by") in SALTED_OWNERS
    return Server(name, url, model or str(mine.get("id")), key, salted, await _about(http, server))


async def _about(http: httpx.AsyncClient, server: Server) -> dict[str, Any]:
    """How a server of ours drafts; nothing of others."""
    try:
        answer = await http.get(f"{server.url}/v1/spec", headers=headers_of(server), timeout=10.0)
        found = answer.json() if answer.status_code == 200 else {}
    except (httpx.TransportError, ValueError):
        return {}
    names = ("drafter", "controller", "verifier", "limits")
    return {name: found[name] for name in names if name in found} if isinstance(found, dict) else {}


def _listed(answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        found = answer.json().get("data")
    except (ValueError, AttributeError):
        return []
    return [one for one in found if isinstance(one, dict) and one.get("id")] if isinstance(found, list) else []


async def ask(http: httpx.AsyncClient, settings: LoadSettings, arm: ServerArm, one: Ask, salt: str) -> Sample:
    """Send one request and read its stream to the end; whatever goes wrong is in the sample."""
    sample = Sample(one.number, one.prompt.category)
    path = "/v1/chat/completions" if settings.chat else "/v1/completions"
    content = json.dumps(settings.body(arm, one, salt)).encode()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **headers_of(arm.server)}
    sample.sent_s = perf_counter()
    try:
        async with (
            asyncio.timeout(settings.timeout_s),
            http.stream("POST", arm.server.url + path, content=content, headers=headers) as answer,
        ):
            sample.ignored = answer.headers.get("x-ignored-fields", "")
            if answer.status_code != 200:
                return sample.fail(f"http_{answer.status_code}", _reason(await answer.aread()))
            await _read(sample, answer)
    except (TimeoutError, httpx.TimeoutException):
        return sample.fail("timeout", f"no end after {settings.timeout_s:g} s")
    except httpx.ConnectError as error:
        return sample.fail("connect", str(error))
    except httpx.TransportError as error:
        return sample.fail("disconnected", f"{type(error).__name__}: {error}")
    except StreamError as error:
        return sample.fail("stream_error", str(error))
    except (ValueError, TypeError, AttributeError) as error:  # an event that is no JSON, or not of the shape
        return sample.fail("bad_answer", f"{type(error).__name__}: {error}")
    return sample.close()


def _reason(body: bytes) -> str:
    """The message of an error, as OpenAI and others word it."""
    try:
        found = json.loads(body)
        error = found.get("error", found.get("detail", found))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")


async def _read(sample: Sample, answer: httpx.Response) -> None:
    async for data in _events(answer):
        now_s = perf_counter()
        if data == _DONE:
            sample.done = True
            continue
        event = json.loads(data)
        if not isinstance(event, dict):
            raise TypeError("an event is no JSON object")
        sample.read(event, now_s)


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events; a last line without its end was cut off and is none."""
    held = b""
    async for chunk in answer.aiter_bytes():
        held += chunk
        *lines, held = held.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def counters(http: httpx.AsyncClient, server: Server) -> Drafts | None:
    """What a server has drafted so far, by its Prometheus page; nothing where it has none."""
    try:
        answer = await http.get(f"{server.url}/metrics", headers=headers_of(server), timeout=10.0)
    except (httpx.TransportError, httpx.InvalidURL):
        return None
    return read_counters(answer.text.splitlines()) if answer.status_code == 200 else None


def read_counters(lines: Sequence[str]) -> Drafts | None:
    """Sums of the counters, of whichever engine's prefix comes first (a server may export two)."""
    sums: dict[str, dict[str, float]] = {}
    names = {f"{name}_total": key for key, name in COUNTERS.items()}
    for line in lines:
        found = re.match(r"(\w+):(\w+)(?:\{.*\})? ([-+0-9.eE]+)", line)
        if found and found[2] in names:
            mine = sums.setdefault(found[1], {})
            mine[names[found[2]]] = mine.get(names[found[2]], 0.0) + float(found[3])
    first = next(iter(sums.values()), None)
    if first is None or "drafted" not in first:
        return None
    rounds = first.get("rounds")
    return Drafts(None if rounds is None else int(rounds), int(first["drafted"]), int(first.get("accepted", 0)))
