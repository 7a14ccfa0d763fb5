"""Settings of a load test: servers, number of requests, arrivals, and request bodies."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foretoken.core.settings import setting

if TYPE_CHECKING:
    from foretoken.lab.prompts import BenchPrompt

Shape = Literal["concurrency", "rate"]
LARGEST_TIE = 0.3
"""Largest gap between two log-probabilities that bfloat16 rounding may reverse: 4 % of a logit of 8."""
SERVER, PLAIN, SPECULATIVE = "server", "plain", "speculative"


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes:
        url: without ``/v1``.
        model: model name in requests; empty until the server has listed its models.
        key: API key; empty for none.
        salted: whether it separates caches by ``cache_salt`` (others refuse or ignore the field).
        about: its reported settings.
    """

    name: str
    url: str
    model: str = ""
    key: str = field(default="", repr=False)
    salted: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerArm:
    """A server and extra fields of its requests."""

    name: str
    server: Server
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Level:
    """Arrival pattern of requests.

    Attributes:
        shape: ``concurrency``: clients that each send the next request when the last has ended; ``rate``: a Poisson
            process, whether the server keeps up or not.
        value: number of clients, or requests per second.
        burst: with a rate, number of requests that arrive together.
    """

    shape: Shape
    value: float
    burst: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.value <= 0:
            raise ValueError(f"--{self.shape} must be above 0, not {self.value:g}")
        if self.burst < 1:
            raise ValueError(f"--burst must be at least 1, not {self.burst}")

    @property
    def label(self) -> str:
        """Short description."""
        if self.shape == "concurrency":
            return f"{self.value:g} at a time"
        return f"{self.value:g}/s" + (f", {self.burst} together" if self.burst > 1 else "")


@dataclass(frozen=True)
class Ask:
    """One request of a pass, the same for every arm."""

    number: int
    prompt: BenchPrompt
    seed: int | None


@dataclass(frozen=True)
class LoadSettings:
    """Settings of a load test.

    Attributes:
        levels: run one after the other.
        passes: passes per level; arms take turns at going first.
        seed: of the first request, incremented per request; also of the arrivals. ``None`` sends no seed.
        chat: chat completions instead of completions.
        ignore_eos: request outputs of equal length.
        extra: further fields of every request.
        timeout_s: time limit of a request.
    """

    levels: Sequence[Level] = ()
    requests: int = setting(64, "Requests per level, arm and pass.", 1)
    passes: int = 1
    warmup: int = setting(4, "Requests to each arm before anything is measured.", 1)
    max_tokens: int = setting(128, "Most tokens of an answer.", 1)
    temperature: float = setting(0.0, "0 is greedy.", 0.0, 2.0)
    top_p: float = setting(1.0, "Nucleus; 1 is off.", 0.0, 1.0)
    seed: int | None = setting(None, "Seed of the first request, counted up; also of the arrivals.")
    chat: bool = False
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def fixed(self) -> bool:
        """Whether answers are deterministic."""
        return self.temperature == 0 or self.seed is not None

    def asks(self, prompts: Mapping[str, Sequence[BenchPrompt]], count: int) -> list[Ask]:
        """Requests that cycle through the categories, reusing prompts when they run out."""
        lists = [list(group) for group in prompts.values()]
        asks = []
        for number in range(count):
            group = lists[number % len(lists)]
            prompt = group[number // len(lists) % len(group)]
            asks.append(Ask(number, prompt, None if self.seed is None else self.seed + number))
        return asks

    def body(self, arm: ServerArm, ask: Ask, salt: str) -> dict[str, Any]:
        """JSON body of a request."""
        body: dict[str, Any] = {"model": arm.server.model, "max_tokens": self.max_tokens, "stream": True}
        if self.chat:
            body["messages"] = list(ask.prompt.messages) or [{"role": "user", "content": ask.prompt.text}]
        else:
            body["prompt"] = ask.prompt.text
        body |= {"temperature": self.temperature, "stream_options": {"include_usage": True}}
        if self.top_p < 1:
            body["top_p"] = self.top_p
        if ask.seed is not None:
            body["seed"] = ask.seed
        if self.ignore_eos:
            body["ignore_eos"] = True
        if arm.server.salted:
            body["cache_salt"] = salt
        return body | dict(self.extra) | dict(arm.extra)


def arrivals(level: Level, count: int, seed: int) -> list[float]:
    """Arrival times in seconds from the start; bursts keep the average rate."""
    rng = random.Random(seed)
    times: list[float] = []
    time_s = 0.0
    while len(times) < count:
        times += [time_s] * min(level.burst, count - len(times))
        time_s += rng.expovariate(level.value / level.burst)
    return times
