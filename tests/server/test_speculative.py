"""What no other server has: the drafter of a request, its rounds explained, chunks that tell nothing, learning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import Running, served

import foretoken as ft
from foretoken.core.io.checkpoints import ZOO
from foretoken.llm import Llm
from foretoken.server.config import ServerSettings

MEMBERS = ["model,k=4", "ngram,n=3,k=6"]


def make_auto(settings: ServerSettings) -> Llm:
    """Two drafters, and the controller that chooses."""
    return ft.load("builtin", f"router,drafters=({'|'.join(MEMBERS)})", dtype="float32", known=True)


@pytest.fixture(scope="module")
def auto() -> Iterator[Running]:
    with served(make_auto) as running:
        yield running


def rounds(answer: dict[str, Any]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = answer["choices"][0]["speculative"]["rounds"]
    return result


@pytest.mark.parametrize(
    ("method", "drafter"), [("model", MEMBERS[0]), ("ngram", MEMBERS[1]), (MEMBERS[1], MEMBERS[1])]
)
def test_a_request_names_its_drafter(auto: Running, method: str, drafter: str) -> None:
    plain = auto.complete(max_tokens=40, speculative={"enabled": False, "explain": True})
    assert {len(round_["tokens"]) for round_ in rounds(plain)} == {1}
    assert plain["choices"][0]["speculative"]["why"] == "plain: the request asked for it"
    options = {"method": method, "num_speculative_tokens": 3, "explain": True}
    answer = auto.complete(max_tokens=40, speculative=options)
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert {round_["drafter"] for round_ in rounds(answer)} - {"none"} == {drafter}
    assert max(len(round_["tokens"]) - 1 for round_ in rounds(answer)) == 3
    assert answer["choices"][0]["speculative"]["why"] == f"drafts: the request named {drafter}"


@pytest.mark.parametrize("body", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", [*MEMBERS, "auto"])
def test_whoever_drafts_the_answer_is_plain_decodings(auto: Running, method: str, body: dict[str, Any]) -> None:
    """R10: text, ids, usage and finish reason, whole and streamed; ``benchmarks/http_lossless.py`` has all drafters."""
    prompts = ["def fib(n):", "The river", "class A:\n    x = 1\n\nclass B:", "import os\nimport "]
    request = {"prompt": prompts, "max_tokens": 24, "stop": ["zz", "\n\n\n"], "return_token_ids": True, **body}
    plain = auto.complete(**request, speculative={"enabled": False})
    drafted = auto.complete(**request, speculative={"method": method})

    def summary(answer: dict[str, Any]) -> Any:
        names = ("text", "token_ids", "finish_reason", "stop_reason")
        usage = [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        return [[choice[name] for name in names] for choice in answer["choices"]], usage

    assert summary(drafted) == summary(plain)
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0 or method == "auto"
    text = auto.post("/v1/completions", **request, speculative={"method": method}, stream=True).text
    chunks = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    for index, choice in enumerate(plain["choices"]):
        pieces = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in pieces) == choice["text"]
        assert [token for chunk in pieces for token in chunk["token_ids"]] == choice["token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_a_drafter_that_is_not_there_is_refused(auto: Running) -> None:
    for options in ({"method": "telepathy"}, {"tree": "2x2"}):
        answer = auto.post("/v1/completions", prompt="x", speculative=options)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "speculative"
    assert "model,k=4" in auto.post("/v1/completions", prompt="x", speculative={"method": "m"}).text


@pytest.mark.parametrize("grouped", [False, True])
def test_a_drafter_with_a_path_is_named_without_it(grouped: bool) -> None:
    path = f"model:{ZOO / 'draft'}"
    spec = f"router,drafters=({path},k=4|ngram)" if grouped else f"{path},k=4"
    with served(lambda settings: ft.load("builtin", spec, dtype="float32", known=True)) as running:
        for method in ("model", path, f"{path},k=4"):
            answer = running.complete(max_tokens=6, speculative={"method": method, "explain": True})
            assert {round_["drafter"] for round_ in rounds(answer)} <= {"model", f"{path},k=4", "none"}
        for method in ("mod", f"{path}x", "known"):
            assert running.post("/v1/completions", prompt="x", speculative={"method": method}).status_code == 400


def test_the_server_says_why_it_drafts(auto: Running) -> None:
    answer = auto.complete(max_tokens=100, speculative={"explain": True})
    why = answer["choices"][0]["speculative"]["why"]
    assert why.startswith(("drafts: a round with", "plain: a round with")) and "plain rounds and brings" in why
    spec = auto.client.get("/v1/spec").json()
    assert [drafter["name"] for drafter in spec["drafters"]] == MEMBERS
    assert all(drafter["shape"] == "chain" and drafter["max_depth"] in (4, 6) for drafter in spec["drafters"])
    costs = spec["state"]["controller"]
    assert {option["drafter"] for option in costs["options"]} == set(MEMBERS)
    assert all(option["cost"] > 0 and option["tokens"] >= 1 for option in costs["options"])
    assert costs["predicted_speedup"] >= 1.0 or costs["plan"]
    assert answer["metrics"]["speculative_decoding"]["predicted_speedup"] > 0
    text = auto.client.get("/metrics").text
    assert "foretoken:spec_predicted_speedup" in text
    shares = [line for line in text.splitlines() if line.startswith("foretoken:spec_drafter_share_total{")]
    assert {name for name in MEMBERS if any(f'drafter="{name}"' in line for line in shares)} == set(MEMBERS)


def test_rejections_come_with_the_test_that_they_failed(auto: Running) -> None:
    """Unseeded, so that the rules toss coins; what was accepted passed its tests and what was not did not."""
    answer = auto.complete(max_tokens=60, temperature=1, speculative={"method": "model", "explain": True})
    seen = 0
    for round_ in rounds(answer):
        path = [0, *round_["accepted"]]
        children = [node for node, parent in enumerate(round_["parents"]) if parent in path]
        assert round_["rejected"] == [node for node in children if node not in path]
        if len(round_["tokens"]) == 1:
            continue
        assert round_["verifier"] in ("block", "rejection")
        assert all(0 <= test["u"] < 1 and 0 <= test["chance"] <= 1 for test in round_["tests"])
        assert round_["tests"]
        passed = [test["u"] < test["chance"] for test in round_["tests"]]
        assert any(passed) == bool(round_["accepted"])  # block verification takes the longest beginning that passes
        seen += not passed[0]
    assert seen


def test_greedy_and_seeded_rounds_leave_nothing_to_chance(auto: Running) -> None:
    for body in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        answer = auto.complete(max_tokens=30, **body, speculative={"method": "model", "explain": True})
        assert all(round_["tests"] == [] for round_ in rounds(answer))
        assert any(round_["rejected"] for round_ in rounds(answer))


@pytest.mark.parametrize("chat", [False, True])
def test_padded_chunks_tell_nothing_by_their_size(chat: bool) -> None:
    """Every event fills a multiple of the pad, whatever is in it; what it says is as without."""
    with served(stream_pad=1024, stream_interval=4) as running:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "Go."}]} if chat else {"prompt": "def fib(n):"}
        )
        body = {"model": "builtin", **prompt, "max_tokens": 40, "temperature": 0}
        whole = running.client.post(path, json=body).json()["choices"][0]
        sizes, texts, counts = [], [], []
        request = {**body, "stream": True, "return_token_ids": True}
        with running.client.stream("POST", path, json=request) as answer:
            frames = answer.read().split(b"\n\n")
        pending = b""
        for frame in frames:
            pending += frame + b"\n\n"
            if not frame.startswith(b"data: {"):
                continue
            sizes.append(len(pending))
            pending = b""
            choice = json.loads(frame[6:])["choices"][0]
            texts.append((choice.get("delta") or {}).get("content", "") if chat else choice["text"])
            counts.append(len(choice.get("token_ids", [])))
        assert "".join(texts) == (whole["message"]["content"] if chat else whole["text"])
        assert all(size % 1024 == 0 for size in sizes) and len(sizes) > 3
        assert all(
            count >= 4 for count in counts[int(chat) : -1]
        )  # the first of a chat is the role, the last is the rest


def test_a_draft_model_learns_while_it_serves_and_is_saved(tmp_path: Path) -> None:
    folder = tmp_path / "draft"

    def make(settings: ServerSettings) -> Llm:
        spec = settings.online_drafter.replace("online,", "online,every=2,budget=1,thread=false,")
        return ft.load("builtin", spec, dtype="float32", controller="constant", known=True)

    with served(make, online=True, online_save=str(folder), drafter="model,k=3") as running:
        before = running.complete(max_tokens=24)
        for seed in range(6):
            running.complete(f"class A{seed}:", max_tokens=24, temperature=1)
        learned = running.client.get("/v1/spec").json()["online"]
        assert learned["updates"] >= 1 and learned["positions"] > 0
        assert running.complete(max_tokens=24)["choices"][0]["text"] == before["choices"][0]["text"]
    assert (folder / "model.safetensors").exists()
    again = ft.load("builtin", f"model:{folder},k=3", dtype="float32", controller="constant")
    assert again.generate("def fib(n):", max_new_tokens=24).text == before["choices"][0]["text"]


@pytest.mark.parametrize(
    ("drafter", "spec"),
    [("auto", "online"), ("model", "online"), ("model:/d,k=3", "online:/d,k=3"), ("online,every=4", "online,every=4")],
)
def test_what_learns_is_the_draft_model(drafter: str, spec: str) -> None:
    assert ServerSettings(online=True, drafter=drafter).online_drafter == spec
    assert ServerSettings(online=True, drafter=drafter, online_save="/s").online_drafter == f"{spec},save=/s"


def test_what_cannot_learn_is_refused() -> None:
    with pytest.raises(ValueError, match="online trains a draft model"):
        ServerSettings(online=True, drafter="ngram")
    with pytest.raises(ValueError, match="online_save needs online"):
        ServerSettings(online_save="/s")
