"""Sends requests and times what comes back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import httpx

from foretoken.lab.bench.load.settings import Ask, LoadSettings, Server, ServerArm

COUNTERS = {
    "rounds": "spec_decode_num_drafts",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
_DONE = b"[DONE]"


@dataclass
class Drafts:
    """What speculation did, as far as a server says: verification rounds (calls of the target; ``None`` where they are
    not told), and draft tokens."""

    rounds: int | None = None
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Drafts) -> None:
        """Count another one in."""
        self.rounds = None if self.rounds is None or other.rounds is None else self.rounds + other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, the target's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass
class Sample:
    """One request.

    Attributes:
        number: which; the same number asked the same of every arm.
        sent_s: when it was sent, on the clock of ``time.perf_counter``; the following are, too.
        first_s: when its first text came.
        last_s: when it said that it was finished.
        chunks: events that carried text.
        tokens, prompt_tokens: what the server counted; chunks where it counts nothing.
        counted: whether the server counted.
        text, finish_reason: what it said.
        done: whether the stream ended with ``[DONE]``.
        error: what kind of error ended it; empty for none.
        detail: the error in words.
        drafts: what speculation did, if it is told.
        token_ids: of the answer, where they were asked for and are told.
        gap: for an answer that differs from another: how much less likely its token was (see ``run.find_gaps``).
        ignored: fields that the server says it ignored.
    """

    number: int
    category: str
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    chunks: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    counted: bool = False
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    error: str = ""
    detail: str = ""
    drafts: Drafts | None = None
    token_ids: list[int] = field(default_factory=list)
    gap: float | None = None
    ignored: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended as it should."""
        return not self.error and self.last_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if not self.ok or self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the end."""
        return None if not self.ok or self.last_s is None else self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; nothing for an answer that came in one piece."""
        if not self.ok or self.first_s is None or self.last_s is None or self.tokens < 2 or self.chunks < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def fail(self, kind: str, detail: str) -> Sample:
        """It ended with an error."""
        self.error, self.detail = kind, " ".join(detail.split())[:300]
        return self

    def read(self, event: Mapping[str, Any], now_s: float) -> None:
        """Take in one event of the stream.  Raises ``StreamError`` where it is an error."""
        if event.get("error"):
            raise StreamError(_message(event["error"]))
        for choice in event.get("choices") or ():
            text = _text_of(choice)
            if text:
                self.first_s = now_s if self.first_s is None else self.first_s
                self.chunks += 1
                self.text += text
            self.token_ids += choice.get("token_ids") or ()
            if choice.get("finish_reason"):
                self.finish_reason, self.last_s = str(choice["finish_reason"]), now_s
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.counted = True
            self.tokens = int(usage.get("completion_tokens") or 0)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.drafts = drafts_of(event) or self.drafts

    def close(self) -> Sample:
        """The stream has ended without an error: did it end as it should?"""
        if self.finish_reason is None:
            end = "[DONE]" if self.done else "nothing more"
            return self.fail("truncated", f"the stream ended with {end} and without a finish_reason")
        if not self.counted:
            self.tokens = self.chunks
        if self.first_s is None:  # no text at all: the end is what came first
            self.first_s = self.last_s
        return self


class StreamError(Exception):
    """An error that came as an event of a stream."""


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a completion or of a chat, thoughts and calls of tools included."""
    if "text" in choice:
        return str(choice["text"] or "")
    delta = choice.get("delta") or {}
    parts = [delta.get(name) for name in ("reasoning_content", "content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(str(part) for part in parts if part)


def drafts_of(event: Mapping[str, Any]) -> Drafts | None:
    """What an event says of speculation: ``metrics.speculative_decoding``, llama.cpp's timings, or OpenAI's usage."""
    metrics = event.get("metrics")
    spec = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if isinstance(spec, Mapping) and "num_draft_tokens" in spec:
        rounds = spec.get("num_spec_steps")
        accepted = int(spec.get("num_accepted_draft_tokens") or 0)
        return Drafts(None if rounds is None else int(rounds), int(spec["num_draft_tokens"] or 0), accepted)
    timings = event.get("timings")
    if isinstance(timings, Mapping) and timings.get("draft_n"):
        return Drafts(None, int(timings["draft_n"]), int(timings.get("draft_n_accepted") or 0))
    usage = event.get("usage")
    details = usage.get("completion_tokens_details") if isinstance(usage, Mapping) else None
    if isinstance(details, Mapping):
        accepted = int(details.get("accepted_prediction_tokens") or 0)
        rejected = int(details.get("rejected_prediction_tokens") or 0)
        if accepted + rejected:
            return Drafts(None, accepted + rejected, accepted)
    return None


def open_client(timeout_s: float) -> httpx.AsyncClient:
    """A client for as many connections as a test opens; it takes no proxy from the environment."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits, trust_env=False)


def headers_of(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.key}"} if server.key else {}


async def find_server(http: httpx.AsyncClient, server: Server) -> Server:
    """The server with what it says of itself.  Raises ``ValueError`` where nothing answers, or the server does not say
    what it serves and no model was named."""
    url, model = server.url, server.model
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
    entry = next((offer for offer in listed if offer.get("id") == model), listed[0] if listed else {})
    # Who knows ``cache_salt``; others refuse fields that they do not know, or ignore them
    salted = entry.get("owned_by") in ("foretoken", "vllm")
    return replace(server, model=model or str(entry.get("id")), salted=salted, about=await _about(http, server))


async def _about(http: httpx.AsyncClient, server: Server) -> dict[str, Any]:
    """How a server of ours drafts; nothing of others."""
    try:
        answer = await http.get(f"{server.url}/v1/spec", headers=headers_of(server), timeout=10.0)
        spec = answer.json() if answer.status_code == 200 else {}
    except (httpx.TransportError, ValueError):
        return {}
    names = ("drafter", "controller", "verifier", "limits")
    return {name: spec[name] for name in names if name in spec} if isinstance(spec, dict) else {}


def _listed(answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        models = answer.json().get("data")
    except (ValueError, AttributeError):
        return []
    return (
        [model for model in models if isinstance(model, dict) and model.get("id")] if isinstance(models, list) else []
    )


async def ask(http: httpx.AsyncClient, settings: LoadSettings, arm: ServerArm, request: Ask, salt: str) -> Sample:
    """Send one request and read its stream to the end; whatever goes wrong is in the sample."""
    sample = Sample(request.number, request.prompt.category)
    path = "/v1/chat/completions" if settings.chat else "/v1/completions"
    content = json.dumps(settings.body(arm, request, salt)).encode()
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
        payload = json.loads(body)
        return _message(payload.get("error", payload.get("detail", payload)))
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
    rest = b""
    async for chunk in answer.aiter_bytes():
        rest += chunk
        *lines, rest = rest.split(b"\n")
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
        match = re.match(r"(\w+):(\w+)(?:\{.*\})? ([-+0-9.eE]+)", line)
        if match and match[2] in names:
            counts, key = sums.setdefault(match[1], {}), names[match[2]]
            counts[key] = counts.get(key, 0.0) + float(match[3])
    first = next(iter(sums.values()), None)
    if first is None or "drafted" not in first:
        return None
    rounds = first.get("rounds")
    return Drafts(None if rounds is None else int(rounds), int(first["drafted"]), int(first.get("accepted", 0)))
