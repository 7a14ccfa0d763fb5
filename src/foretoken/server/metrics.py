"""Prometheus counters under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "error": "error"}
"""Finish reasons by the engine's name; cancelled and late requests are ``abort``."""


class Metrics:
    """All counters of a server, once per name prefix, labelled with the model.

    Every scrape calls ``status`` for the engine's current state and ``num_open`` for the number of admitted choices.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        model: str,
        status: Callable[[], EngineStatus | None],
        num_open: Callable[[], int] = lambda: 0,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._sets = [self._counters(prefix) for prefix in prefixes]
        self.has_drafter = True
        self.registry.register(_Rounds(prefixes, model, status))
        self._between = [counters["between"].labels(model) for counters in self._sets]
        for prefix in prefixes:
            help_text = "Choices that are admitted, until the last byte of their answer was taken."
            places_taken = Gauge(f"{prefix}:places_taken", help_text, ["model_name"], registry=self.registry)
            places_taken.labels(model).set_function(num_open)
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
                gauge = Gauge(f"{prefix}:{name}", help_text, ["model_name"], registry=self.registry)
                gauge.labels(model).set_function(lambda value=value: value(state) if (state := status()) else 0.0)  # type: ignore[misc]

    def _counters(self, prefix: str) -> dict[str, Any]:
        """Counters and histograms of a prefix.  Those with only the model's label begin at 0, for tools that read
        before the first request."""

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:{name}", help_text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, help_text: str) -> Histogram:
            return Histogram(f"{prefix}:{name}", help_text, ["model_name"], registry=self.registry, buckets=SECONDS)

        metrics = {
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
        for name in (
            "prompt",
            "cached",
            "generation",
            "drafts",
            "draft_tokens",
            "accepted",
            "first",
            "per_token",
            "whole",
            "queue",
        ):
            metrics[name].labels(self._model)
        return metrics

    def ended(self, request: Request, arrived_s: float, stats: SpecStats, reason: FinishReason | None) -> None:
        """Count a choice that has left the engine, however it ended; runs in the engine's thread.  ``arrived_s`` is on
        the monotonic clock; without a ``reason`` it was cancelled."""
        whole_s, outcome = time.monotonic() - arrived_s, REASONS.get(reason or "", "abort")
        for counters in self._sets:
            self._count(counters, stats, outcome)
            if not stats.num_draft_tokens and stats.num_drafts:
                counters["plain"].labels(self._model, self._why_plain(request, stats)).inc()
            if outcome in ("stop", "length"):
                counters["whole"].labels(self._model).observe(whole_s)
                if stats.num_new_tokens > 1:
                    writing_s = max(0.0, whole_s - stats.first_token_s)
                    counters["per_token"].labels(self._model).observe(writing_s / (stats.num_new_tokens - 1))

    def _why_plain(self, request: Request, stats: SpecStats) -> str:
        """Reason why a request had no draft."""
        if not self.has_drafter:
            return "no_drafter"
        if request.max_draft_tokens == 0:
            return "asked_for"
        if request.max_new_tokens == 1:  # from the target itself
            return "one_token"
        return "nothing_to_draft" if stats.num_asked_rounds else "plain_is_faster"

    def _count(self, counters: dict[str, Any], stats: SpecStats, reason: str) -> None:
        m = self._model
        counters["success"].labels(m, reason).inc()
        counters["prompt"].labels(m).inc(stats.num_prompt_tokens)
        counters["cached"].labels(m).inc(max(0, stats.num_prompt_tokens - stats.num_prompt_tokens_computed))
        counters["generation"].labels(m).inc(stats.num_new_tokens)
        counters["drafts"].labels(m).inc(stats.num_drafted_rounds)
        counters["draft_tokens"].labels(m).inc(stats.num_draft_tokens)
        counters["accepted"].labels(m).inc(stats.num_accepted_tokens)
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            counters["accepted_at"].labels(m, str(position)).inc(count)
        for drafter, rounds in stats.drafters.items():
            counters["share"].labels(m, drafter).inc(rounds)
        if stats.num_drafts:
            counters["first"].labels(m).observe(stats.first_token_s)
            counters["queue"].labels(m).observe(stats.queue_s)

    def came(self, seconds: float) -> None:
        """Record the seconds per token of a block."""
        for between in self._between:
            between.observe(seconds)

    def failed(self, reason: str) -> None:
        for counters in self._sets:
            counters["failures"].labels(self._model, reason).inc()

    def rejected(self, reason: str) -> None:
        for counters in self._sets:
            counters["rejections"].labels(self._model, reason).inc()

    def text(self) -> bytes:
        """Exposition for Prometheus."""
        return generate_latest(self.registry)


class _Rounds(Collector):
    """Counters of the engine's rounds, however many requests take part in one."""

    def __init__(self, prefixes: Sequence[str], model: str, status: Callable[[], EngineStatus | None]) -> None:
        self._prefixes, self._model, self._status = prefixes, model, status

    def collect(self) -> Iterator[CounterMetricFamily]:
        status = self._status()
        for prefix in self._prefixes:
            help_text = "Seconds of rounds by what took them, each round counted once."
            phases = CounterMetricFamily(f"{prefix}:spec_step_seconds", help_text, labels=["model_name", "phase"])
            for phase in PHASES:
                spent = 0.0 if status is None else getattr(status.times, f"{phase}_s")
                phases.add_metric([self._model, phase], max(0.0, spent))
            yield phases
            rounds = CounterMetricFamily(f"{prefix}:rounds", "Rounds of the engine.", labels=["model_name"])
            rounds.add_metric([self._model], 0 if status is None else status.rounds)
            yield rounds


def _speedup(status: EngineStatus) -> float:
    return float(status.controller.get("predicted_speedup") or 1.0)


def _usage(status: EngineStatus) -> float:
    return status.kv_bytes / status.kv_budget_bytes if status.kv_budget_bytes else 0.0
