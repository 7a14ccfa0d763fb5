"""``structured_outputs: {"sampling": "conditional"}``: answers, and one clear 400 that names the field."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")

from running_server import Running

from foretoken.loading.generation_defaults import GenerationDefaults
from foretoken.server.grammar import compile_language

COLOURS = ["red", "green", "dark green", "dark"]
CHOICE: dict[str, Any] = {"choice": COLOURS, "sampling": "conditional"}
PROMPT = "The colour is "
MESSAGES = [{"role": "user", "content": "Which colour?"}]


def test_a_completion_is_the_librarys(server: Running) -> None:
    llm = server.serving.llm
    language = compile_language("choice", COLOURS, llm.tokenizer, llm.target.vocab_size)
    for temperature, seed in ((0.0, None), (1.8, 3), (1.8, 4)):
        options: dict[str, Any] = {"temperature": temperature, "seed": seed}
        answer = server.complete(PROMPT, structured_outputs=CHOICE, return_token_ids=True, logprobs=2, **options)
        choice = answer["choices"][0]
        expected = llm.generate(PROMPT, constraint=language, max_new_tokens=8, **options)
        assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)
        assert choice["text"] in COLOURS and choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["token_logprobs"]) == len(expected.token_ids)


def test_several_choices_are_those_of_their_seeds(server: Running) -> None:
    options: dict[str, Any] = {"structured_outputs": CHOICE, "temperature": 2.0}
    several = server.complete(PROMPT, n=4, seed=10, **options)["choices"]
    alone = [server.complete(PROMPT, seed=10 + i, **options)["choices"][0]["text"] for i in range(4)]
    assert [choice["text"] for choice in several] == alone


def test_chat_streams_and_schemas(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no", None]}}}
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "seed": 5}
    both = {"response_format": form, "structured_outputs": {"sampling": "conditional"}}
    whole = server.post("/v1/chat/completions", **body, **both).json()
    assert json.loads(whole["choices"][0]["message"]["content"]) in ("yes", "no", None)
    same = {"structured_outputs": {"json": {"enum": ["yes", "no", None]}, "sampling": "conditional"}}
    again = server.post("/v1/chat/completions", **body, **same, stream=True)
    chunks = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_beside_other_requests(server: Running) -> None:
    """Company changes neither the string nor the others."""
    bodies: list[dict[str, Any]] = [
        {"structured_outputs": {**CHOICE, "regex": None}, "temperature": 1.5, "seed": 1},
        {"temperature": 0, "max_tokens": 24},
        {"structured_outputs": {"regex": "[0-9]{2}", "sampling": "conditional"}, "temperature": 1.5, "seed": 2},
        {"structured_outputs": {"regex": "[0-9]{2}", "sampling": "masked"}, "temperature": 1.5, "seed": 2},
        {"temperature": 1.0, "seed": 7, "max_tokens": 24},
    ]
    alone = [server.complete(PROMPT, **body)["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: server.complete(PROMPT, **body)["choices"][0]["text"], bodies))
    assert together == alone


def test_the_models_own_filters_are_left_out(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.serving.llm, "defaults", GenerationDefaults({"top_p": 0.8, "top_k": 20, "min_p": 0.1}))
    answer = server.complete(PROMPT, structured_outputs=CHOICE, temperature=1.0, top_p=1, top_k=-1)
    assert answer["choices"][0]["text"] in COLOURS


TALL = {"structured_outputs": {"regex": "[a-m][0-9]{2}x", "sampling": "conditional"}}
TEXT = {"structured_outputs": {"json": {"type": "string"}, "sampling": "conditional"}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"regex": "[0-9]{5}", "sampling": "conditional"}}, "structured_outputs", "too large"),
    (TALL, "structured_outputs", "tokens as a tree"),
    ({"structured_outputs": {"regex": "a*", "sampling": "conditional"}}, "structured_outputs", "not finite"),
    ({"structured_outputs": {"json_object": True, "sampling": "conditional"}}, "structured_outputs", "not finite"),
    (TEXT, "structured_outputs", "not finite"),
    ({"structured_outputs": {"json": {"enum": []}, "sampling": "conditional"}}, "structured_outputs", "cannot be"),
    ({"structured_outputs": {"regex": r"[^\s\S]", "sampling": "conditional"}}, "structured_outputs", "no text fits"),
    ({"structured_outputs": {"choice": [], "sampling": "conditional"}}, "structured_outputs", "1 items at least"),
    ({"structured_outputs": {"choice": [str(i) for i in range(100_000)], "sampling": "conditional"}},
     "structured_outputs", "items at most"),
    ({"structured_outputs": {"sampling": "conditional"}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {**CHOICE, "sampling": "exact"}}, "structured_outputs", "'masked' or 'conditional'"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"sampling": "conditional"}},
     "response_format", "not finite"),
    ({"structured_outputs": CHOICE, "max_tokens": 1}, "max_tokens", "a limit of 1 new tokens is too small"),
    ({"structured_outputs": CHOICE, "stop": ["k g"]}, "stop", "would end the string 'dark green'"),
    ({"structured_outputs": CHOICE, "ignore_eos": True}, "ignore_eos", "ends with end-of-text"),
    ({"structured_outputs": CHOICE, "top_p": 0.9}, "top_p", "give 1.0"),
    ({"structured_outputs": CHOICE, "top_k": 3}, "top_k", "give 0"),
    ({"structured_outputs": CHOICE, "min_p": 0.2}, "min_p", "give 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_a_400_that_names_the_field(
    server: Running, body: dict[str, Any], param: str, words: str
) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = server.post(path, **{"max_tokens": 24, "temperature": 1.0, **prompt, **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and words in error["message"] and "\n" not in error["message"]


def test_other_rules_that_leave_no_string(server: Running) -> None:
    answer = server.post(
        "/v1/completions", prompt="x", max_tokens=8, structured_outputs=CHOICE, bad_words=["red", "green", "dark"]
    )
    if answer.status_code != 400:  # the tokenizer may spell a colour by other tokens than the word alone
        assert answer.json()["choices"][0]["text"] in COLOURS
    else:
        assert answer.json()["error"]["code"] == "contradiction"
