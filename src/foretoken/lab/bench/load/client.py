"""HTTP client of a load test: sends requests and times their streams."""

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


@dataclass
class Drafts:
    """Speculation counts as reported by a server: verification rounds (target calls; ``None`` if not reported) and
    draft tokens."""

    rounds: int | None = None
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Drafts) -> None:
        """Add the counts of another instance."""
        self.rounds = None if self.rounds is None or other.rounds is None else self.rounds + other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, including the target's own."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass
class Sample:
    """One request.

    Attributes:
        number: index of the request; the same for every arm.
        sent_s: time of sending, on the clock of ``time.perf_counter`` like the next two.
        first_s: time of the first text.
        last_s: time of the finish reason.
        chunks: events that carried text.
        tokens, prompt_tokens: counts from the server; chunks if it reports none.
        counted: whether the server reported counts.
        text, finish_reason: the answer.
        done: whether the stream ended with ``[DONE]``.
        error: kind of the error that ended it; empty for none.
        detail: error message.
        drafts: speculation counts, if reported.
        token_ids: ids of the answer, if requested and reported.
        gap: for an answer that differs from another: log-probability by which its token is less likely (see
            ``run.find_gaps``); ``None`` also for a token that is not among the likeliest.
        examined: whether the server has reported the likeliest tokens at the difference.
        ignored: fields that the server reports as ignored.
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
    examined: bool = False
    ignored: str = ""

    @property
    def ok(self) -> bool:
        """Whether it completed without an error."""
        return not self.error and self.last_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if not self.ok or self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the end of the answer."""
        return None if not self.ok or self.last_s is None else self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` for an answer in one chunk."""
        if not self.ok or self.first_s is None or self.last_s is None or self.tokens < 2 or self.chunks < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def fail(self, kind: str, detail: str) -> Sample:
        """Record an error and return the sample."""
        self.error, self.detail = kind, " ".join(detail.split())[:300]
        return self

    def read(self, event: Mapping[str, Any], now_s: float) -> None:
        """Add one event of the stream.  Raises ``StreamError`` for an error event."""
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
        """Check a stream that ended without an error, and return the sample."""
        if self.finish_reason is None:
            end = "[DONE]" if self.done else "nothing more"
            return self.fail("truncated", f"the stream ended with {end} and without a finish_reason")
        if not self.counted:
            self.tokens = self.chunks
        if self.first_s is None:  # no text at all: the end counts as the first event
            self.first_s = self.last_s
        return self


class StreamError(Exception):
    """An error event of a stream."""


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of a completion or chat choice, including reasoning and tool calls."""
    if "text" in choice:
        return str(choice["text"] or "")
    delta = choice.get("delta") or {}
    parts = [delta.get(name) for name in ("reasoning_content", "content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(str(part) for part in parts if part)


def drafts_of(event: Mapping[str, Any]) -> Drafts | None:
    """Speculation counts in an event: ``metrics.speculative_decoding``, llama.cpp's timings, or OpenAI's usage."""
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
    """A client without a connection limit, and without a proxy from the environment."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits, trust_env=False)


def headers_of(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.key}"} if server.key else {}


async def find_server(http: httpx.AsyncClient, server: Server) -> Server:
    """The server with its reported model and settings.  Raises ``ValueError`` if nothing answers, or if no model is
    listed or named."""
    url, model = server.url, server.model
    try:
        answer = await http.get(f"{url}/v1/models", headers=headers_of(server), timeout=10.0)
    except httpx.TransportError as error:
        raise ValueError(f"nothing answers at {url}: {error or type(error).__name__}") from None
    except httpx.InvalidURL as error:
        raise ValueError(f"{url} is not a valid address: {error}") from None
    if answer.status_code in (401, 403):
        raise ValueError(f"{url} needs an API key: give --api-key, or set OPENAI_API_KEY")
    listed = _listed(answer)
    if not model and not listed:
        raise ValueError(f"{url}/v1/models does not list a model ({answer.status_code}): give --model")
    entry = next((offer for offer in listed if offer.get("id") == model), listed[0] if listed else {})
    # Servers that support ``cache_salt``; others refuse or ignore unknown fields
    salted = entry.get("owned_by") in ("foretoken", "vllm")
    return replace(server, model=model or str(entry.get("id")), salted=salted, about=await _about(http, server))


async def _about(http: httpx.AsyncClient, server: Server) -> dict[str, Any]:
    """Speculation settings of a foretoken server; empty for others."""
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
    """Send one request and read its stream to the end; errors are recorded in the sample."""
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
    except (ValueError, TypeError, AttributeError) as error:  # an event that is not JSON or has another shape
        return sample.fail("bad_answer", f"{type(error).__name__}: {error}")
    return sample.close()


def _reason(body: bytes) -> str:
    """Error message of a response body, in OpenAI's or similar formats."""
    try:
        payload = json.loads(body)
        return _message(payload.get("error", payload.get("detail", payload)))
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")


async def _read(sample: Sample, answer: httpx.Response) -> None:
    async for data in _events(answer):
        now_s = perf_counter()
        if data == b"[DONE]":
            sample.done = True
            continue
        event = json.loads(data)
        if not isinstance(event, dict):
            raise TypeError("an event is not a JSON object")
        sample.read(event, now_s)


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Data of server-sent events; an incomplete last line is dropped."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        rest += chunk
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def counters(http: httpx.AsyncClient, server: Server) -> Drafts | None:
    """Draft counts so far from a server's Prometheus page; ``None`` if there is none."""
    try:
        answer = await http.get(f"{server.url}/metrics", headers=headers_of(server), timeout=10.0)
    except (httpx.TransportError, httpx.InvalidURL):
        return None
    return read_counters(answer.text.splitlines()) if answer.status_code == 200 else None


def read_counters(lines: Sequence[str]) -> Drafts | None:
    """Sums of the counters with the first engine prefix (a server may export two)."""
    sums: dict[str, dict[str, float]] = {}
    names = {
        "spec_decode_num_drafts_total": "rounds",
        "spec_decode_num_draft_tokens_total": "drafted",
        "spec_decode_num_accepted_tokens_total": "accepted",
    }
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
