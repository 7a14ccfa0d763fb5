"""``/v1/completions`` and ``/v1/chat/completions`` against a real server: what clients rely on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from running_server import Running

from foretoken.engine.stats import SpecStats
from foretoken.server import usage

openai = pytest.importorskip("openai", reason="the openai client is not installed")

PROMPT = "def fib(n):"


@pytest.fixture
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0)


def events(text: str) -> list[Any]:
    """The data of a stream's events, with the end mark as it is."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_a_completion_is_what_the_library_writes(server: Running, client: Any) -> None:
    expected = server.serving.llm.plain.generate(PROMPT, max_new_tokens=20)
    answer = client.completions.create(model="builtin", prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(server.serving.llm.encode(PROMPT))
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "builtin"


def test_a_stream_says_the_same_as_one_piece(server: Running, client: Any) -> None:
    whole = server.complete(max_tokens=40)["choices"][0]["text"]
    chunks = list(
        client.completions.create(
            model="builtin",
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert len(chunks) < 40  # a chunk is a verified block, not a token


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_streams_usage_grows_with_what_was_sent(server: Running, path: str, count: int) -> None:
    prompts = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": ["one two one", "x"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompts, "max_tokens": 12, "n": count, "ignore_eos": True, "return_token_ids": True, "seed": 1}
    lines = server.post(path, **body, stream=True, stream_options=options).text.splitlines()
    *chunks, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    sent = 0
    for chunk in chunks:
        sent += len(chunk["choices"][0].get("token_ids", ()))
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
        assert usage["completion_tokens"] == sent and usage["total_tokens"] == usage["prompt_tokens"] + sent
    assert chunks[-1]["usage"] == last["usage"] and sent == 12 * count * len(prompts.get("prompt", "1"))


def test_a_stream_ends_with_done_and_a_comment_is_no_event(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=4, temperature=0, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    chunks = events(answer.text)
    assert chunks[-1] == "[DONE]" and all(chunk["id"] == chunks[0]["id"] for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_seed_fixes_the_text_in_any_company(server: Running, stream: bool) -> None:
    alone = [server.complete(temperature=1.0, seed=seed, max_tokens=12)["choices"][0]["text"] for seed in (1, 2, 1)]
    assert alone[0] == alone[2] != alone[1]
    many = server.complete(temperature=1.0, seed=1, n=4, max_tokens=12)["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2, 3]
    assert [many[0]["text"], many[1]["text"]] == alone[:2]
    plain = server.complete(temperature=1.0, seed=1, max_tokens=12, speculative={"enabled": False})
    assert plain["choices"][0]["text"] == alone[0]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_choices_that_run_side_by_side_spend_their_seconds_once() -> None:
    times = {"prefill_s": 0.3, "total_s": 0.8, "target_s": 0.4, "draft_s": 0.1}
    choices = [SpecStats(num_new_tokens=8, num_prompt_tokens_computed=5, **times) for _ in range(4)]
    found = usage.timings(choices, choices)
    assert (found["prompt_n"], found["predicted_n"]) == (20, 32)
    assert found["prompt_ms"] == pytest.approx(300) and found["predicted_ms"] == pytest.approx(500)
    assert found["predicted_per_second"] == pytest.approx(64)
    assert usage.speculative(usage.merged(choices), 0)["target_ms"] == pytest.approx(400)
    times = {"first_token_s": 0.3}
    choices = [SpecStats(num_new_tokens=count, **times) for count in (3, 8, 5)]
    assert usage.metrics(choices, 1.0, 0)["mean_itl_ms"] == pytest.approx(100)
    assert usage.metrics([SpecStats(num_new_tokens=1)], 1.0, 0)["mean_itl_ms"] == 0


def test_timings_count_a_prompt_once_for_all_its_choices(server: Running) -> None:
    prompts = ["def area(w, h): return", "class Timer:"]
    answer = server.complete(prompts, n=3, temperature=1.0, max_tokens=4, timings=True, cache_salt="timings")
    used, timings = answer["usage"], answer["timings"]
    assert timings["cache_n"] == used["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == used["prompt_tokens"]
    assert timings["predicted_n"] == used["completion_tokens"]


def test_several_prompts_as_text_and_as_ids(server: Running) -> None:
    ids = [server.serving.llm.encode(text) for text in (PROMPT, "class A:")]
    by_ids = server.complete(ids)["choices"]
    by_text = server.complete([PROMPT, "class A:"])["choices"]
    assert [choice["text"] for choice in by_ids] == [choice["text"] for choice in by_text]
    assert server.complete(ids[0])["choices"][0]["text"] == by_ids[0]["text"]


def test_what_lm_eval_asks_for(server: Running) -> None:
    """lm_eval asks for log-probabilities of a given continuation: the greedy token has one value, in both lists."""
    ids = server.serving.llm.encode(PROMPT)
    answer = server.complete([ids, ids[:3]], max_tokens=0, echo=True, logprobs=1, seed=1234)
    values = answer["choices"][0]["logprobs"]
    assert len(values["tokens"]) == len(values["token_logprobs"]) == len(values["top_logprobs"]) == len(ids)
    assert values["token_logprobs"][0] is None and values["top_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(values["tokens"]) == answer["choices"][0]["text"] == PROMPT
    assert values["text_offset"] == [sum(map(len, values["tokens"][:i])) for i in range(len(ids))]
    more = server.complete([ids], max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert len(more["tokens"]) == len(ids) + 1
    assert more["token_logprobs"][-1] == max(more["top_logprobs"][-1].values())  # greedy: the very same number
    assert more["token_logprobs"][1:-1] == values["token_logprobs"][1:]
    import torch

    from foretoken.models.base import Feed

    target = server.serving.llm.target.sibling()  # type: ignore[attr-defined]
    logits = target.forward([Feed(target.open(), ids)])[0].logits
    for i, token in enumerate(ids[1:]):
        assert math.isclose(
            values["token_logprobs"][i + 1], float(torch.log_softmax(logits[i], -1)[token]), abs_tol=1e-4
        )


def test_limits_of_the_text(server: Running) -> None:
    whole = server.complete(max_tokens=30)["choices"][0]["text"]
    stop = whole[10:14]
    cut = server.complete(max_tokens=30, stop=[stop])["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    kept = server.complete(max_tokens=30, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == cut["text"] + stop
    token = server.complete(max_tokens=30, return_token_ids=True)["choices"][0]["token_ids"][3]
    ended = server.complete(max_tokens=30, stop_token_ids=[token], return_token_ids=True, logprobs=1)["choices"][0]
    decode: Any = server.serving.llm.tokenizer.decode  # type: ignore[union-attr]
    assert ended["text"] == decode(ended["token_ids"][:-1]) and ended["logprobs"]["text_offset"][-1] == len(
        ended["text"]
    )
    options = {"stop_token_ids": [token], "include_stop_str_in_output": True, "return_token_ids": True}
    shown = server.complete(max_tokens=30, **options)["choices"][0]
    assert shown["token_ids"] == ended["token_ids"] and shown["text"] == decode(ended["token_ids"])
    assert ended["token_ids"][-1] == token and ended["finish_reason"] == "stop" and len(ended["token_ids"]) <= 4
    longer = server.complete(max_tokens=30, stop_token_ids=[token], min_tokens=10, return_token_ids=True)["choices"][0]
    assert len(longer["token_ids"]) >= 10


def test_what_may_be_written(server: Running) -> None:
    ids = server.complete(allowed_token_ids=[5, 6], max_tokens=12, return_token_ids=True, temperature=1.0)
    assert set(ids["choices"][0]["token_ids"]) <= {5, 6} | server.serving.llm.target.eos_token_ids
    usual = server.complete(max_tokens=12, return_token_ids=True)["choices"][0]
    word = server.serving.llm.tokenizer.decode([usual["token_ids"][1]]).strip()  # type: ignore[union-attr]
    without = server.complete(max_tokens=12, bad_words=[word])["choices"][0]["text"]
    assert word in usual["text"] and word not in without
    biased = server.complete(max_tokens=3, logit_bias={"7": 100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert biased == [7, 7, 7]


def test_predicted_outputs(server: Running) -> None:
    text = server.complete(max_tokens=40)["choices"][0]["text"]
    answer = server.complete(max_tokens=40, prediction={"type": "content", "content": text})
    details = answer["usage"]["completion_tokens_details"]
    assert answer["choices"][0]["text"] == text
    assert details["accepted_prediction_tokens"] >= 25
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    again = server.complete(max_tokens=40, prediction={"type": "content", "content": parts})
    assert again["usage"]["completion_tokens_details"] == details
    wrong = server.complete(max_tokens=40, prediction={"type": "content", "content": "nothing of this is true " * 4})
    assert wrong["choices"][0]["text"] == text
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


@pytest.mark.parametrize("prompt", ["def fib(n):", "zqxj vbk"])
def test_speculation_is_measured_in_shapes_that_add_up(server: Running, prompt: str) -> None:
    """aiperf drops other shapes; they also add up where no long draft was accepted."""
    metrics = server.complete(prompt, max_tokens=40)["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 > 1
    assert sum(histogram) == metrics["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
    assert metrics["num_accepted_draft_tokens"] + metrics["num_spec_steps"] >= 40


@pytest.mark.parametrize("stream", [False, True])
def test_explained_rounds_spell_the_answer(server: Running, stream: bool) -> None:
    body: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0,
        "speculative": {"explain": True},
        "return_token_ids": True,
    }
    if stream:
        answer = server.post("/v1/completions", prompt=PROMPT, stream=True, **body)
        choices = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
        assert all(len(choice["speculative"]["rounds"]) == 1 for choice in choices)
    else:
        choices = server.complete(**body)["choices"]
    rounds = [row for choice in choices for row in choice["speculative"]["rounds"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    spelled = [token for row in rounds for token in (*(row["tokens"][i] for i in row["accepted"]), row["next_token"])]
    assert spelled[: len(ids)] == ids
    assert any(row["accepted"] for row in rounds)
    assert all(len(row["p"]) == len(row["q"]) == len(row["texts"]) == len(row["tokens"]) for row in rounds)


def test_a_conversation(server: Running, client: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    completion = client.chat.completions.create(
        model="builtin", messages=messages, max_tokens=10, temperature=1, seed=3, logprobs=True, top_logprobs=2
    )
    choice = completion.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.bytes is not None for entry in choice.logprobs.content)
    stream = client.chat.completions.create(
        model="builtin", messages=messages, max_tokens=10, temperature=1, seed=3, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_the_second_turn_computes_what_is_new(server: Running) -> None:
    first = [{"role": "user", "content": "Tell me about the sea. " * 60}]
    reply = server.post("/v1/chat/completions", messages=first, max_tokens=8, temperature=0).json()
    turns = [
        *first,
        {"role": "assistant", "content": reply["choices"][0]["message"]["content"]},
        {"role": "user", "content": "On."},
    ]
    again = server.post("/v1/chat/completions", messages=turns, max_tokens=4, temperature=0).json()["usage"]
    computed = again["prompt_tokens"] - again["prompt_tokens_details"]["cached_tokens"]
    assert computed <= 0.1 * again["prompt_tokens"]
    salted = server.post(
        "/v1/chat/completions", messages=turns, max_tokens=4, temperature=0, cache_salt="another"
    ).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_structured_output(server: Running, client: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model="builtin",
        messages=[{"role": "user", "content": "Answer."}],
        max_tokens=20,
        temperature=1,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert set(json.loads(completion.choices[0].message.content)) == {"ok"}
    answer = server.complete(structured_outputs={"choice": ["red", "green"]}, temperature=1.0, seed=2)
    assert answer["choices"][0]["text"] in ("red", "green")
    bad = server.post("/v1/completions", prompt="x", structured_outputs={"regex": "(unclosed"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "structured_outputs"


def test_tokens_and_models(server: Running, client: Any) -> None:
    tokenized = server.client.post("/tokenize", json={"prompt": PROMPT}).json()
    assert tokenized["tokens"] == server.serving.llm.encode(PROMPT) and tokenized["count"] == len(tokenized["tokens"])
    assert server.client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()["prompt"] == PROMPT
    assert [model.id for model in client.models.list()] == ["builtin"]
    assert client.models.retrieve("builtin").id == "builtin"
    assert server.client.get("/tokenizer_info").json()["eos_token"]
    assert server.client.get("/version").json()["version"]


def test_counters_match_the_requests(server: Running) -> None:
    def read(name: str) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    names = (
        "foretoken:request_success_total",
        "foretoken:generation_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    )
    before = [read(name) for name in names]
    stats = [server.complete(max_tokens=20) for _ in range(3)]
    after = [read(name) for name in names]
    drafted = sum(answer["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in stats)
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 60, drafted]


def test_what_the_server_says_of_its_speculation(server: Running) -> None:
    spec = server.client.get("/v1/spec").json()
    assert spec["drafter"] == "ngram" and spec["lossless"] is True
    assert spec["state"]["dead"] is None and spec["memory"]["kv_bytes_per_token"] > 0
