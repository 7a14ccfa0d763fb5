"""Counters that one can bill by: compared with a recount of 500 requests, those that were broken off included."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import Running, make_llm, served

from foretoken.core import RoundTimes
from foretoken.llm import Llm
from foretoken.server.config import ServerSettings
from foretoken.server.metrics import PHASES, Metrics

PROMPTS = [
    "def fib(n):\n    return ",
    "one two three one two three one two",
    "x",
    "a b c d e f g h i j k l m n o p q r s t",
]
COMPARED = (
    "request_success_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_drafter_share_total",
    "spec_disabled_total",
    "request_failure_total",
    "admission_rejections_total",
    "time_to_first_token_seconds_count",
    "request_queue_time_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
)


def counters(running: Running) -> dict[str, dict[str, float]]:
    """Every sample by its name and its own label."""
    totals: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(running.client.get("/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "le")]
            totals.setdefault(sample.name.removeprefix("foretoken:"), {})["".join(labels)] = sample.value
    return {name: {label: value for label, value in values.items() if value} for name, values in totals.items()}


@dataclass
class Seen:
    """One request, as the engine's rounds show it."""

    prompt: int = 0
    plain_asked: bool = False
    longest: int = 0
    drafter_asked: bool = False
    reason: str = "abort"
    read: bool = False
    cached: int = 0
    tokens: int = 0
    drafted: list[tuple[int, int, str]] = field(default_factory=list)
    rounds: int = 0
    blocks: int = 0


class Recount:
    """Watches an engine from outside its counters: what goes into a round, and what comes out."""

    def __init__(self, llm: Llm) -> None:
        self.engine, self.seen, self.times, self.rounds = llm.engine, {}, [0.0] * 4, 0
        self._step, self._add = llm.engine.step, llm.engine.add
        self._cancel = llm.engine.cancel
        llm.engine.step, llm.engine.add, llm.engine.cancel = self.step, self.add, self.cancel  # type: ignore[method-assign]
        llm.engine.on_round = self.round
        assert llm.drafter is not None
        self._propose = llm.drafter.propose_batch
        llm.drafter.propose_batch = self.propose  # type: ignore[method-assign]

    def add(self, request: Any, arrived_s: float | None = None, checked: bool = False) -> int:
        request_id = self._add(request, arrived_s, checked)
        self.seen[request_id] = Seen(len(request.prompt), request.max_draft_tokens == 0, request.max_new_tokens)
        return request_id

    def propose(self, contexts: Any, budgets: Any) -> Any:
        for context in contexts:
            self.seen[context.request_id].drafter_asked = True
        return self._propose(contexts, budgets)

    def round(self, runs: Any, trees: Any, verdicts: Any, times: RoundTimes) -> None:
        self.rounds += 1
        for run, tree, verdict in zip(runs, trees, verdicts, strict=True):
            record = self.seen[run.id]
            record.rounds += 1
            record.read, record.cached = True, run.stats.num_prompt_tokens - run.stats.num_prompt_tokens_computed
            record.drafted.append((len(tree) - 1, len(verdict.path), "ngram"))
        parts = [times.draft_s, times.target_s, times.verify_s, times.overhead_s]
        self.times = [before + part for before, part in zip(self.times, parts, strict=True)]

    def cancel(self, request_id: int) -> None:
        """A request that leaves before its first round has as much of its prompt read as its text in the target has."""
        for run in self.engine.requests.running:
            if run.id == request_id and not self.seen[run.id].rounds and run.sequence is not None:
                record, stats = self.seen[run.id], run.stats
                record.read, record.cached = True, stats.num_prompt_tokens - stats.num_prompt_tokens_computed
                record.prompt = record.prompt if run.started else len(run.sequence.tokens)
        self._cancel(request_id)

    def step(self) -> Any:
        results = self._step()
        for run, emission in results:
            record = self.seen[run.id]
            record.tokens += len(emission.token_ids)
            record.blocks += len(emission.token_ids) > 0
            if emission.finish_reason is not None:
                words = {"eos": "stop", "stop": "stop", "length": "length", "error": "error"}
                record.reason = words.get(emission.finish_reason, "abort")
        return results


def why_plain(record: Seen) -> str:
    if record.plain_asked:
        return "asked_for"
    if record.longest == 1:
        return "one_token"
    return "nothing_to_draft" if record.drafter_asked else "plain_is_faster"


def expected(
    all_seen: list[Seen], unseen: int, rejected: Counter[str], failed: Counter[str]
) -> dict[str, dict[str, float]]:
    """The counters that these requests must give, with so many that were cancelled before the engine had them."""
    drafts = [draft for record in all_seen for draft in record.drafted if draft[0]]
    positions = Counter(str(place) for _, accepted, _ in drafts for place in range(accepted))
    done = [record for record in all_seen if record.reason in ("stop", "length")]
    begun = [record for record in all_seen if record.rounds]
    plain = Counter(why_plain(record) for record in begun if not any(d for d, _, _ in record.drafted))
    reasons = Counter(record.reason for record in all_seen)
    reasons["abort"] += unseen
    whole: dict[str, Any] = {
        "request_success_total": reasons,
        "prompt_tokens_total": {"": sum(record.prompt for record in all_seen if record.read)},
        "prompt_tokens_cached_total": {"": sum(record.cached for record in all_seen)},
        "generation_tokens_total": {"": sum(record.tokens for record in all_seen)},
        "spec_decode_num_drafts_total": {"": len(drafts)},
        "spec_decode_num_draft_tokens_total": {"": sum(size for size, _, _ in drafts)},
        "spec_decode_num_accepted_tokens_total": {"": sum(accepted for _, accepted, _ in drafts)},
        "spec_decode_num_accepted_tokens_per_pos_total": positions,
        "spec_drafter_share_total": Counter(who for _, _, who in drafts),
        "spec_disabled_total": plain,
        "request_failure_total": failed,
        "admission_rejections_total": rejected,
        "time_to_first_token_seconds_count": {"": len(begun)},
        "request_queue_time_seconds_count": {"": len(begun)},
        "e2e_request_latency_seconds_count": {"": len(done)},
        "request_time_per_output_token_seconds_count": {"": sum(record.tokens > 1 for record in done)},
    }
    return {name: {k: float(v) for k, v in values.items() if v} for name, values in whole.items()}


def ask(running: Running, number: int) -> tuple[str, int]:
    """One of 500 requests: whole, streamed, refused, or broken off; returns what became of it, and its choices."""
    rng = random.Random(number)
    count = rng.choice([1, 1, 1, 2])
    body: dict[str, Any] = {"model": "builtin", "prompt": rng.choice(PROMPTS), "seed": number, "n": count}
    body |= {"max_tokens": rng.choice([1, 2, 6, 12]), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.2:
        body["speculative"] = {"enabled": False}
    kind = rng.choice(["whole", "stream", "break", "leave", "wrong"]) if number % 2 else "whole"
    with httpx.Client(base_url=running.url, timeout=120) as client:
        if kind == "wrong":
            assert client.post("/v1/completions", json={**body, "max_tokens": 10**6}).status_code == 400
            return "refused", 0
        if kind == "leave":
            body |= {"max_tokens": 500, "ignore_eos": True}
            try:
                client.post("/v1/completions", json=body, timeout=rng.choice([0.01, 0.1, 0.3]))
            except httpx.TimeoutException:
                return "left", count
            raise AssertionError("500 tokens in .3 s")
        if kind in ("stream", "break"):
            longer = {"max_tokens": 500, "ignore_eos": True} if kind == "break" else {}
            with client.stream("POST", "/v1/completions", json={**body, **longer, "stream": True}) as answer:
                for seen, _ in enumerate(answer.iter_lines()):
                    if kind == "break" and seen > 4:
                        return "left", count
            return "done", count
        answer = client.post("/v1/completions", json=body)
        return ("done" if answer.status_code == 200 else "rejected"), count


def test_every_counter_against_500_requests() -> None:
    with served(max_running=6, max_queued=400, prefill_chunk=2) as running:
        recount = Recount(running.serving.llm)
        with ThreadPoolExecutor(12) as pool:
            results = list(pool.map(lambda number: ask(running, number), range(500)))
        settle(running)
        counted = counters(running)
        refused = Counter(context_length_exceeded=sum(what == "refused" for what, _ in results))
        recounted = expected(list(recount.seen.values()), 0, Counter(), refused)
        assert {"asked_for", "one_token", "nothing_to_draft"} <= recounted["spec_disabled_total"].keys()
        left = sum(what == "left" for what, _ in results)
        assert left > 30 and sum(what == "done" for what, _ in results) > 250
        aborted = counted["request_success_total"].pop("abort")
        early = aborted - recounted["request_success_total"].pop("abort")
        assert 0 <= early <= sum(count for what, count in results if what == "left"), (
            "cancelled before the engine had them"
        )
        for name in COMPARED:
            assert counted.get(name, {}) == recounted[name], name
        assert counted["rounds_total"] == {"": recount.rounds}
        for phase, seconds in zip(PHASES, recount.times, strict=True):
            assert counted["spec_step_seconds_total"][phase] == pytest.approx(seconds, rel=1e-6), phase
        between = [(max(0, record.blocks - 1), record.reason != "abort") for record in recount.seen.values()]
        sent = counted["inter_token_latency_seconds_count"][""]
        assert sum(count for count, whole in between if whole) <= sent <= sum(count for count, _ in between)
        done = sum(count for what, count in results if what == "done")
        reasons = counted["request_success_total"]
        assert reasons["stop"] + reasons["length"] == done
        assert counted["num_requests_running"] == counted["num_requests_waiting"] == counted["places_taken"] == {}
        assert counted["prefix_cache_bytes"][""] > 0 and counted["prefix_cache_texts"][""] > 0
        assert counted["prefix_cache_limit_bytes"] == {"": 2.0**28}


def settle(running: Running) -> None:
    """Until everything has left."""
    end = time.monotonic() + 60
    while running.serving.num_open or running.serving.slots.open:
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.1)


def test_every_error_answer_is_counted_once() -> None:
    with served(api_keys=("secret",), max_body=4096) as running:
        anonymous = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"})
        running.client.headers["Authorization"] = "Bearer secret"
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        seen = Counter([(anonymous.status_code, "invalid_api_key")])
        for path, body, status, reason in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 10**6}, 400, "context_length_exceeded"),
            ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "invalid_value"),
            ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "invalid_request_error"),
            ("/v1/chat/completions", {**chat, "top_logprobs": 3}, 400, "invalid_request_error"),
            ("/v1/responses", {"input": "Hi", "previous_response_id": "a"}, 400, "unsupported_parameter"),
            ("/v1/responses", {"input": "a b" * 1200}, 400, "context_length_exceeded"),  # its field is renamed
            ("/v1/messages", {**chat, "max_tokens": 0}, 400, "invalid_value"),
            ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found"),
            ("/v1/completions", {"prompt": "x" * 5000}, 413, "invalid_request_error"),
            ("/tokenize", {}, 400, "invalid_request_error"),
        ):
            assert running.post(path, **body).status_code == status, (path, body)
            seen[status, reason] += 1
        assert running.client.get("/v1/models/other").status_code == 404
        seen[404, "model_not_found"] += 1
        for path in ("/nothing", "/favicon.ico"):  # who looks for pages is no client of the API
            assert running.client.get(path).status_code == 404
        reasons: Counter[str] = Counter()
        for (_, reason), count in seen.items():
            reasons[reason] += count
        counted = counters(running)
        assert counted["request_failure_total"] == reasons and not counted.get("admission_rejections_total")


def test_late_and_refused_requests() -> None:
    """A late request is an abort with the tokens that it got, and a failure; one without a place was not admitted."""
    with served(request_timeout=0.5, max_running=1, max_queued=0, prefix_memory="1MiB") as running:
        go, step = threading.Event(), running.serving.llm.engine.step

        def slow_step() -> Any:
            go.wait(60)
            time.sleep(0.02)
            return step()

        running.serving.llm.engine.step = slow_step  # type: ignore[method-assign]
        late: list[httpx.Response] = []
        body = {"model": "builtin", "prompt": "def f(x):", "max_tokens": 900, "ignore_eos": True}
        asking = threading.Thread(
            target=lambda: late.append(httpx.post(f"{running.url}/v1/completions", json=body, timeout=60))
        )
        asking.start()
        while not running.serving.slots.open:
            time.sleep(0.01)
        assert running.post("/v1/completions", prompt="x").status_code == 503
        go.set()
        asking.join(60)
        assert late[0].status_code == 504
        settle(running)
        counted = counters(running)
        assert counted["request_success_total"] == {"abort": 1}
        assert counted["request_failure_total"] == {"deadline_exceeded": 1}
        assert counted["admission_rejections_total"] == {"queue_full": 1}
        assert counted["prefix_cache_limit_bytes"] == {"": 2.0**20}
        generated = counted.get("generation_tokens_total", {}).get("", 0)
        assert generated < 900 and (generated == 0) == (counted.get("prompt_tokens_total", {}) == {})


def test_rounds_with_drafts_are_counted_apart_from_rounds() -> None:
    with served() as running:
        spec = running.complete("one two one two one two", max_tokens=30, ignore_eos=True)["metrics"][
            "speculative_decoding"
        ]
        counted = counters(running)
        assert counted["spec_decode_num_drafts_total"] == {"": spec["num_drafts"]}
        assert 0 < spec["num_drafts"] < spec["num_spec_steps"]
        assert spec["num_spec_steps"] == counted["rounds_total"][""]


@pytest.mark.parametrize("text", ["spam " * 12, "def fib(n):\n    return n", "return return return return"])
def test_a_predictions_tokens_count_once(text: str) -> None:
    """Both numbers together never exceed the prediction, however often its tokens were tried."""
    llm = make_llm(ServerSettings())
    with served() as running:
        answer = running.complete(
            "spam spam spam eggs spam", max_tokens=60, ignore_eos=True, prediction={"type": "content", "content": text}
        )
        details = answer["usage"]["completion_tokens_details"]
        size = len(llm.tokenizer(text, add_special_tokens=False)["input_ids"])
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert accepted >= 0 and rejected >= 0 and 0 < accepted + rejected <= size
        drafted = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert drafted >= accepted + rejected


def test_a_draft_is_counted_by_who_made_it() -> None:
    """Users know a drafter by the name that they gave it, not by what is wrapped around it."""
    with served() as running:
        text = "spam eggs ham toast beans tea"
        prediction = {"type": "content", "content": running.complete(text, max_tokens=20)["choices"][0]["text"]}
        running.complete(text, max_tokens=20, prediction=prediction)
        running.complete("one two one two one two", max_tokens=30, ignore_eos=True)
        choices = {"structured_outputs": {"choice": ["unmistakable"]}}
        traced = running.complete("x", max_tokens=20, **choices, speculative={"explain": True})
        assert set(counters(running)["spec_drafter_share_total"]) == {"prediction", "ngram", "grammar"}
        assert {round_["drafter"] for round_ in traced["choices"][0]["speculative"]["rounds"]} == {"grammar"}
        refused = running.post("/v1/completions", prompt="x", speculative={"method": "known"})
        assert refused.status_code == 400 and "auto, ngram, none" in refused.json()["error"]["message"]


def test_what_has_no_label_but_the_models_begins_at_0() -> None:
    """Tools look before the first request."""
    families = list(Metrics("m", lambda: None).registry.collect())
    empty = {family.name.removeprefix("foretoken:") for family in families if not family.samples}
    assert empty == {
        "request_success",
        "request_failure",
        "admission_rejections",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_disabled",
        "spec_drafter_share",
    }


def test_times_count_from_the_arrival_of_the_http_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before the engine (template, tokens, grammar) delays the first token, and is no part of writing."""
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    from foretoken.server import grammar

    compile_constraint = grammar.compile_constraint

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.6)
        return compile_constraint(*args, **options)

    monkeypatch.setattr(grammar, "compile_constraint", slow)
    names = ("time_to_first_token_seconds_sum", "e2e_request_latency_seconds_sum")
    before = counters(server)
    began = time.monotonic()
    answer = server.complete(structured_outputs={"regex": "[a-z]{30}"}, max_tokens=4)
    wall_ms = 1e3 * (time.monotonic() - began)
    times = answer["metrics"]
    assert 600 <= times["time_to_first_token_ms"] <= wall_ms
    assert times["time_to_first_token_ms"] + times["generation_time_ms"] <= wall_ms
    assert times["generation_time_ms"] <= wall_ms - 600
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 3)
    after = counters(server)
    assert all(after[name][""] - before.get(name, {}).get("", 0) >= 0.6 for name in names)
