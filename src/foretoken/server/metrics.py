"""Prometheus counters under vLLM's names."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from foretoken.engine.background import EngineStatus
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.engine.stopping import FinishReason

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
PHASES = ("draft", "target", "verify", "overhead")
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "error": "error"}
"""Finish reasons by the engine's name; cancelled and late requests are ``abort``."""


def under_names(text: str, compat: str) -> str:
    """An exposition and, if ``compat`` is another prefix, all of it once more under that."""
    return text + re.sub(r"^(# \w+ )?foretoken:", rf"\g<1>{compat}:", text, flags=re.MULTILINE) if compat else text


class Metrics:
    """All counters of a server, labelled with the model; ``compat`` is another prefix for their names, or empty.

    Every scrape calls ``status`` for the engine's current state and ``num_open`` for the number of admitted choices.
    """

    def __init__(
        self,
        model: str,
        status: Callable[[], EngineStatus | None],
        num_open: Callable[[], int] = lambda: 0,
        compat: str = "",
    ) -> None:
        self.registry = CollectorRegistry()
        self._model, self._compat = model, compat
        self._counters = self._new_counters()
        self.has_drafter = True
        self.registry.register(_Rounds(model, status))
        help_text = "Choices that are admitted, until the last byte of their answer was taken."
        self._gauge("places_taken", help_text, num_open)
        for name, help_text, value in (
            ("num_requests_running", "Requests in the batch.", lambda s: s.running),
            ("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
            ("kv_cache_bytes", "Memory of keys and values of running requests.", lambda s: s.kv_bytes),
            ("kv_cache_usage_perc", "KV cache usage as a share of its limit (0 without one).", _usage),
            ("prefix_cache_bytes", "Bytes of the prefix cache.", lambda s: s.prefix_bytes),
            ("prefix_cache_limit_bytes", "Limit of the prefix cache in bytes.", lambda s: s.prefix_limit_bytes),
            ("prefix_cache_texts", "Texts in the prefix cache.", lambda s: s.prefix_texts),
            ("cuda_graphs", "1 where the target's forwards run as CUDA graphs.", lambda s: float(s.graphs)),
            ("spec_predicted_speedup", "Predicted speed-up of the current drafts over plain decoding.", _speedup),
        ):
            self._gauge(name, help_text, lambda value=value: value(state) if (state := status()) else 0.0)  # type: ignore[misc]

    def _gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"foretoken:{name}", help_text, ["model_name"], registry=self.registry)
        gauge.labels(self._model).set_function(value)

    def _new_counters(self) -> dict[str, Any]:
        """Counters and histograms.  Those with only the model's label begin at 0, for tools that read before the first
        request."""

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            metric = Counter(f"foretoken:{name}", help_text, ["model_name", *labels], registry=self.registry)
            return metric if labels else metric.labels(self._model)

        def histogram(name: str, help_text: str) -> Histogram:
            metric = Histogram(f"foretoken:{name}", help_text, ["model_name"], registry=self.registry, buckets=SECONDS)
            return metric.labels(self._model)

        return {
            "success": counter("request_success", "Choices that have left the engine.", "finished_reason"),
            "failures": counter("request_failure", "Requests that were answered with an error.", "reason"),
            "rejections": counter("admission_rejections", "Requests refused at admission.", "reason"),
            "prompt": counter("prompt_tokens", "Tokens of prompts."),
            "cached": counter("prompt_tokens_cached", "Tokens of prompts taken from the prefix cache."),
            "generation": counter("generation_tokens", "Tokens of answers."),
            "drafts": counter("spec_decode_num_drafts", "Rounds with drafts, of each request."),
            "draft_tokens": counter("spec_decode_num_draft_tokens", "Draft tokens."),
            "accepted": counter("spec_decode_num_accepted_tokens", "Accepted draft tokens."),
            "accepted_at": counter(
                "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", "position"
            ),
            "plain": counter("spec_disabled", "Requests that were decoded plainly.", "reason"),
            "share": counter("spec_drafter_share", "Rounds with drafts by drafter.", "drafter"),
            "first": histogram("time_to_first_token_seconds", "Seconds from arrival to the first token."),
            "per_token": histogram(
                "request_time_per_output_token_seconds", "Mean seconds between tokens of a request."
            ),
            "between": histogram(
                "inter_token_latency_seconds", "Seconds between streamed blocks, divided by their tokens."
            ),
            "whole": histogram("e2e_request_latency_seconds", "Seconds from arrival to the end."),
            "queue": histogram("request_queue_time_seconds", "Seconds from arrival to admission."),
        }

    def ended(self, request: Request, arrived_s: float, stats: SpecStats, reason: FinishReason | None) -> None:
        """Count a choice that has left the engine, however it ended; runs in the engine's thread.  ``arrived_s`` is on
        the monotonic clock; without a ``reason`` it was cancelled."""
        whole_s, outcome = time.monotonic() - arrived_s, REASONS.get(reason or "", "abort")
        self._count(stats, outcome)
        if not stats.num_draft_tokens and stats.num_drafts:
            self._counters["plain"].labels(self._model, self._why_plain(request, stats)).inc()
        if outcome in ("stop", "length"):
            self._counters["whole"].observe(whole_s)
            if stats.num_new_tokens > 1:
                writing_s = max(0.0, whole_s - stats.first_token_s)
                self._counters["per_token"].observe(writing_s / (stats.num_new_tokens - 1))

    def _why_plain(self, request: Request, stats: SpecStats) -> str:
        """Reason why a request had no draft."""
        if not self.has_drafter:
            return "no_drafter"
        if request.max_draft_tokens == 0:
            return "asked_for"
        if request.max_new_tokens == 1:  # from the target itself
            return "one_token"
        return "nothing_to_draft" if stats.num_asked_rounds else "plain_is_faster"

    def _count(self, stats: SpecStats, reason: str) -> None:
        m, counters = self._model, self._counters
        counters["success"].labels(m, reason).inc()
        counters["prompt"].inc(stats.num_prompt_tokens)
        counters["cached"].inc(max(0, stats.num_prompt_tokens - stats.num_prompt_tokens_computed))
        counters["generation"].inc(stats.num_new_tokens)
        counters["drafts"].inc(stats.num_drafted_rounds)
        counters["draft_tokens"].inc(stats.num_draft_tokens)
        counters["accepted"].inc(stats.num_accepted_tokens)
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            counters["accepted_at"].labels(m, str(position)).inc(count)
        for drafter, rounds in stats.drafters.items():
            counters["share"].labels(m, drafter).inc(rounds)
        if stats.num_drafts:
            counters["first"].observe(stats.first_token_s)
            counters["queue"].observe(stats.queue_s)

    def came(self, seconds: float) -> None:
        """Record the seconds per token of a block."""
        self._counters["between"].observe(seconds)

    def failed(self, reason: str) -> None:
        self._counters["failures"].labels(self._model, reason).inc()

    def rejected(self, reason: str) -> None:
        self._counters["rejections"].labels(self._model, reason).inc()

    def text(self) -> str:
        """Exposition for Prometheus."""
        return under_names(generate_latest(self.registry).decode(), self._compat)


class _Rounds(Collector):
    """Counters of the engine's rounds, however many requests take part in one."""

    def __init__(self, model: str, status: Callable[[], EngineStatus | None]) -> None:
        self._model, self._status = model, status

    def collect(self) -> Iterator[CounterMetricFamily]:
        status = self._status()
        help_text = "Seconds of rounds by what took them, each round counted once."
        phases = CounterMetricFamily("foretoken:spec_step_seconds", help_text, labels=["model_name", "phase"])
        for phase in PHASES:
            spent = 0.0 if status is None else getattr(status.times, f"{phase}_s")
            phases.add_metric([self._model, phase], max(0.0, spent))
        yield phases
        rounds = CounterMetricFamily("foretoken:rounds", "Rounds of the engine.", labels=["model_name"])
        rounds.add_metric([self._model], 0 if status is None else status.rounds)
        yield rounds


def _speedup(status: EngineStatus) -> float:
    return float(status.controller.get("predicted_speedup") or 1.0)


def _usage(status: EngineStatus) -> float:
    return status.kv_bytes / status.kv_budget_bytes if status.kv_budget_bytes else 0.0
