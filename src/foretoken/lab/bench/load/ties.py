"""Whether rounding explains why two greedy answers of one server differ: it is asked once more where they part."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from foretoken.lab.bench.load.client import headers_of
from foretoken.lab.bench.load.drive import Pass
from foretoken.lab.bench.load.sample import Sample
from foretoken.lab.bench.load.settings import Ask, LoadSettings, Server

MOST_ASKED = 32
TOP = 20


async def find_gaps(
    http: httpx.AsyncClient,
    settings: LoadSettings,
    asks: Sequence[Ask],
    baseline: Sequence[Pass],
    others: Sequence[Pass],
) -> None:
    """Set :attr:`Sample.gap` of greedy answers that differ from the baseline's, where tokens are known."""
    if settings.temperature or settings.chat:
        return
    first = {(one.number, sample.number): sample for one in baseline for sample in one.samples if sample.ok}
    asked = 0
    for one in others:
        for sample in one.samples:
            other = first.get((one.number, sample.number))
            if other is None or not sample.ok or not sample.token_ids or sample.token_ids == other.token_ids:
                continue
            if asked < MOST_ASKED:
                asked += 1
                sample.gap = await _gap(http, one.arm.server, asks[sample.number].prompt.text, other, sample)


async def _gap(http: httpx.AsyncClient, server: Server, prompt: str, one: Sample, other: Sample) -> float | None:
    """How far the less likely of the two tokens is from the most likely one; ``None`` where the server does not say."""
    pairs = list(zip(one.token_ids, other.token_ids, strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:  # one of them is longer
        return None
    try:
        answer = await http.post(
            f"{server.url}/tokenize", json={"model": server.model, "prompt": prompt}, headers=headers_of(server)
        )
        prefix = [*answer.json()["tokens"], *one.token_ids[:place]]
        body = {
            "model": server.model, "prompt": prefix, "max_tokens": 1, "temperature": 0, "logprobs": TOP,
            "return_tokens_as_token_ids": True, "speculative": {"enabled": False},
        }  # fmt: skip
        answer = await http.post(f"{server.url}/v1/completions", json=body, headers=headers_of(server))
        top = answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        return max(top.values()) - min(top[f"token_id:{token}"] for token in pairs[place])
    except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError):
        return None
