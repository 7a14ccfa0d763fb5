"""A load test from settings to output lines: cells, then a summary."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from foretoken.core.io.files import write_text
from foretoken.lab.bench.load import figures
from foretoken.lab.bench.load.client import Sample, find_server, headers_of, open_client
from foretoken.lab.bench.load.drive import Driver, Pass, Tell, stopped_by_signals
from foretoken.lab.bench.load.settings import PLAIN, SERVER, SPECULATIVE, Ask, LoadSettings, Server, ServerArm
from foretoken.lab.prompts import BenchPrompt
from foretoken.models.native.library import cpu_info


@dataclass(frozen=True)
class LoadResult:
    """Results of a load test: ``cells``, one per level and arm, and ``stopped_by``, the signal that interrupted it."""

    cells: Sequence[dict[str, Any]]
    summary: dict[str, Any]
    stopped_by: int | None

    @property
    def lines(self) -> list[str]:
        return [json.dumps(row, ensure_ascii=False) for row in (*self.cells, self.summary)]

    def write(self, file: Path) -> None:
        """Write the lines atomically."""
        write_text(file, "".join(line + "\n" for line in self.lines))


def parse_addresses(
    addresses: Sequence[str], compare: bool, keys: Sequence[str], models: Sequence[str]
) -> list[Server]:
    """Servers from ``URL`` or ``NAME=URL``.  Raises ``ValueError`` for an invalid address, a repeated name, or a wrong
    number of keys or models."""
    if compare and len(addresses) > 1:
        raise ValueError("--compare compares one server with itself: give one URL")
    servers = []
    for index, text in enumerate(addresses):
        match = re.match(r"([\w.-]+)=(https?://.*)", text)
        name, url = match.groups() if match else ("", text)
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{text!r} is not a server: give http://HOST:PORT, or NAME=http://HOST:PORT")
        try:
            urlsplit(url).port  # noqa: B018 (the property checks the number)
        except ValueError as error:
            raise ValueError(f"{text!r} is not a valid address: {error}") from None
        alone = SERVER if len(addresses) == 1 else url.split("://", 1)[1]
        key, model = _of(keys, index, len(addresses), "--api-key"), _of(models, index, len(addresses), "--model")
        servers.append(Server(name or alone, url, model, key))
    twice = [name for name, count in Counter(server.name for server in servers).items() if count > 1]
    if twice:
        raise ValueError(f"two servers are called {twice[0]}: give NAME=URL")
    return servers


def _of(values: Sequence[str], index: int, count: int, option: str) -> str:
    """The value for one server: its own, or the one for all; empty if there are none."""
    if len(values) not in (0, 1, count):
        raise ValueError(f"{option} was given {len(values)} times for {count} servers: give it once, or once for each")
    return values[index if len(values) == count else 0] if values else ""


def run_load(
    servers: Sequence[Server],
    prompts: Mapping[str, Sequence[BenchPrompt]],
    settings: LoadSettings,
    compare: bool = False,
    tell: Tell = lambda done, total, text: None,
) -> LoadResult:
    """Run a load test; Ctrl-C and SIGTERM end it early with the results so far.

    The first server is the baseline; ``compare`` compares plain decoding with speculation on a single server.  Prompts
    are grouped by category.  Raises ``ValueError`` if a server is unreachable or refuses the requests.
    """
    arms, passes, stopped_by = asyncio.run(_measured(servers, prompts, settings, compare, tell))
    about = summary(arms, passes, settings, prompts, stopped_by is not None)
    return LoadResult(figures.cells(arms, passes, settings), about, stopped_by)


async def _measured(
    servers: Sequence[Server],
    prompts: Mapping[str, Sequence[BenchPrompt]],
    settings: LoadSettings,
    compare: bool,
    tell: Tell,
) -> tuple[list[ServerArm], list[Pass], int | None]:
    """The arms, their passes, and the signal that interrupted them."""
    async with open_client(settings.timeout_s) as http:
        driver = Driver(http, settings, prompts, tell)
        with stopped_by_signals(driver.stop) as caught:
            resolved = [await find_server(http, server) for server in servers]
            arms = _compared(resolved[0]) if compare else [ServerArm(server.name, server) for server in resolved]
            passes = await driver.run(arms)
            if compare and not driver.stop.is_set():
                asks = settings.asks(prompts, settings.requests)
                for level in settings.levels:
                    plain, drafting = (
                        [pass_ for pass_ in passes if pass_.arm is arm and pass_.level is level] for arm in arms
                    )
                    await find_gaps(http, settings, asks, plain, drafting)
        return arms, passes, caught[0] if caught else None


def _compared(server: Server) -> list[ServerArm]:
    """Arms for plain decoding and speculation on one server."""
    ids = {"return_token_ids": True}
    plain = {"speculative": {"enabled": False}}
    return [ServerArm(PLAIN, server, {**ids, **plain}), ServerArm(SPECULATIVE, server, ids)]


def summary(
    arms: Sequence[ServerArm],
    passes: Sequence[Pass],
    settings: LoadSettings,
    prompts: Mapping[str, Sequence[BenchPrompt]],
    interrupted: bool,
) -> dict[str, Any]:
    """The last line of the output."""
    groups = figures.grouped(passes)
    levels = [level for level in settings.levels if any((level, arm.name) in groups for arm in arms)]
    config = asdict(settings)
    config["levels"] = [level.label for level in settings.levels]
    config["prompts"] = {category: len(group) for category, group in prompts.items()}
    return {
        "summary": True,
        "kind": "load",
        "target": arms[0].server.model,
        "servers": {arm.name: {"url": arm.server.url, "model": arm.server.model, **arm.server.about} for arm in arms},
        "client": client_facts(),
        "arms": [arm.name for arm in arms],
        "settings": config,
        "cells": sum((level, arm.name) in groups for level in settings.levels for arm in arms),
        "interrupted": interrupted,
        "equality": _equality(arms, groups, settings),
        "categories": {
            arm.name: figures.by_category([pass_ for pass_ in passes if pass_.arm.name == arm.name]) for arm in arms
        },
        "curves": [_curves(groups[level, arm.name]) for level in levels for arm in arms if (level, arm.name) in groups],
        "notes": notes(passes, settings, prompts),
    }


def client_facts() -> dict[str, Any]:
    """The client machine; a server on it shares its cores."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "load": load,
        "python": platform.python_version(),
        "httpx": httpx.__version__,
    }


def _equality(
    arms: Sequence[ServerArm], groups: Mapping[Any, list[Pass]], settings: LoadSettings
) -> list[dict[str, Any]]:
    """Equality of texts with the first arm's, if answers are deterministic."""
    if not settings.fixed:
        return []
    return [
        {"arm": arm.name, "load": level.shape, "level": level.value, **figures.equality(arm_passes, baseline)}
        for level in settings.levels
        for arm in arms[1:]
        if (arm_passes := groups.get((level, arm.name))) and (baseline := groups.get((level, arms[0].name)))
    ]


def _curves(passes: Sequence[Pass]) -> dict[str, Any]:
    good = [sample for pass_ in passes for sample in pass_.samples if sample.ok]
    return {
        "arm": passes[0].arm.name,
        "load": passes[0].level.shape,
        "level": passes[0].level.value,
        "percentiles": list(figures.CURVE),
        "ttft_ms": figures.curve(sample.ttft_s for sample in good),
        "tpot_ms": figures.curve(sample.tpot_s for sample in good),
        "e2e_ms": figures.curve(sample.e2e_s for sample in good),
    }


def notes(passes: Sequence[Pass], settings: LoadSettings, prompts: Mapping[str, Sequence[Any]]) -> list[str]:
    """Warnings for the reader of this run."""
    remarks = []
    samples = [sample for pass_ in passes for sample in pass_.samples]
    good = [sample for sample in samples if sample.ok]
    # All planned requests, even those not sent before an interrupt
    numbers = range(settings.requests) if samples else ()
    distinct = len({(number % len(prompts), _row(number, prompts)) for number in numbers})
    if distinct < len(numbers):
        remarks.append(
            f"There are {distinct} prompts for {settings.requests} requests: a server that keeps prompts reads the "
            "repeated ones faster."
        )
    if not settings.fixed:
        remarks.append("Texts were not compared: at a temperature above 0 that needs --seed.")
    if uncounted := sum(not sample.counted for sample in good):
        remarks.append(f"{uncounted} answers had no usage: their stream chunks are counted as tokens.")
    if undone := sum(not sample.done for sample in good):
        remarks.append(f"{undone} streams ended without [DONE], but with a finish_reason: they count as complete.")
    late = max((pass_.lag_s for pass_ in passes), default=0.0)
    # Shorter delays are not reported
    if late > 0.05:
        remarks.append(f"The client was late by up to {1000 * late:.0f} ms: it is too slow for this rate.")
    if len({sample.tokens for sample in good}) > 1:
        remarks.append("Answers had different lengths; --ignore-eos makes them equal where the server knows it.")
    details = {sample.error: sample.detail for sample in samples if sample.error}
    remarks += [f"An error of kind {kind}: {detail}" for kind, detail in details.items()]
    return remarks


def _row(number: int, prompts: Mapping[str, Sequence[Any]]) -> int:
    groups = list(prompts.values())
    return number // len(groups) % len(groups[number % len(groups)])


async def find_gaps(
    http: httpx.AsyncClient,
    settings: LoadSettings,
    asks: Sequence[Ask],
    baseline: Sequence[Pass],
    others: Sequence[Pass],
    most: int = 32,
) -> None:
    """Examine at most ``most`` greedy answers that differ from the baseline's, given token ids, for numerical ties."""
    if settings.temperature or settings.chat:
        return
    different = [
        (sample, other)
        for sample, other in figures.pairs(others, baseline)
        if sample.token_ids and sample.token_ids != other.token_ids
    ]
    for sample, other in different[:most]:
        await _examine(http, others[0].arm.server, asks[sample.number].prompt.text, other, sample)


async def _examine(http: httpx.AsyncClient, server: Server, prompt: str, sample: Sample, other: Sample) -> None:
    """Set ``other.examined``, and ``other.gap``: the gap in log-probability between the most likely token and the lower
    of the two differing ones.  Nothing is set if the server does not report the likeliest tokens."""
    pairs = list(zip(sample.token_ids, other.token_ids, strict=False))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:  # one answer is a prefix of the other
        return
    try:
        answer = await http.post(
            f"{server.url}/tokenize", json={"model": server.model, "prompt": prompt}, headers=headers_of(server)
        )
        prefix = [*answer.json()["tokens"], *sample.token_ids[:index]]
        body = {
            "model": server.model, "prompt": prefix, "max_tokens": 1, "temperature": 0, "logprobs": 20,
            "return_tokens_as_token_ids": True, "speculative": {"enabled": False},
        }  # fmt: skip
        answer = await http.post(f"{server.url}/v1/completions", json=body, headers=headers_of(server))
        top = answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        likeliest = max(top.values())
        reported = {name: float(value) for name, value in top.items() if name.startswith("token_id:")}
    except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return
    if reported:
        other.examined = True
        values = [reported[name] for token in pairs[index] if (name := f"token_id:{token}") in reported]
        other.gap = likeliest - min(values) if len(values) == 2 else None
