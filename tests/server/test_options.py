"""Options through HTTP: a contradiction is a 400 that names the field, or has a defined end; never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running_server import Running
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PROMPT = "def fib(n):"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
PLAIN = {"enabled": False}


def twice(server: Running, **body: Any) -> dict[str, Any]:
    """The one choice of a completion, which is the same when it is decoded plainly and when it is streamed."""
    choice = server.complete(**body, return_token_ids=True)["choices"][0]
    plain = server.complete(**body, return_token_ids=True, speculative=PLAIN)["choices"][0]
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert choice[name] == plain[name]
    request = {"model": "builtin", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body, "stream": True}
    lines = server.client.post("/v1/completions", json=request).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    result: dict[str, Any] = choice
    return result


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stop_string_waits_for_the_least(server: Running, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 20}
    free = twice(server, **options)
    assert len(free["token_ids"]) == 20
    tokenizer = server.serving.llm.tokenizer
    stop = tokenizer.decode(free["token_ids"][:1])
    at_once = twice(server, **options, stop=stop)
    assert (at_once["token_ids"], at_once["finish_reason"]) == (free["token_ids"][:1], "stop")
    for least in (1, 5, 20):
        later = twice(server, **options, stop=stop, min_tokens=least)
        assert later["token_ids"] == free["token_ids"][: len(later["token_ids"])]
        assert len(later["token_ids"]) > least or len(later["token_ids"]) == 20


def test_structured_output_that_ends_before_the_least(server: Running) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    for temperature in (0, 1):
        options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 60, "response_format": FORM}
        ended = twice(server, **options, min_tokens=50)
        assert ended["finish_reason"] == "stop" and set(json.loads(ended["text"])) == {"ok"}
        assert ended["token_ids"] == twice(server, **options)["token_ids"]
        assert twice(server, **options, ignore_eos=True)["token_ids"] == ended["token_ids"]


def test_a_grammar_that_the_allowed_tokens_cannot_spell(server: Running) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    tokenizer = server.serving.llm.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abc"]
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = server.post(path, **prompt, max_tokens=8, response_format=FORM, allowed_token_ids=letters)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "allowed_token_ids"
        late = {"structured_outputs": {"regex": "[abc]{2}[xyz]"}, "allowed_token_ids": letters}
        answer = server.post(path, **prompt, max_tokens=8, **late)
        assert answer.status_code == 400 and "allow no token after 2" in answer.json()["error"]["message"]
        streamed = server.post(path, **prompt, max_tokens=8, **late, stream=True).text
        assert '"code": "contradiction"' in streamed.replace('":"', '": "') and "[DONE]" not in streamed
    fits = twice(server, structured_outputs={"regex": "[abc]{2}"}, allowed_token_ids=letters, min_tokens=4)
    assert fits["finish_reason"] == "stop" and len(fits["text"]) == 2


def test_a_special_token_as_a_stop_string(server: Running) -> None:
    tokenizer = server.serving.llm.tokenizer
    special = tokenizer.eos_token
    end = {str(tokenizer.eos_token_id): 100}
    ended = twice(server, stop=[special], ignore_eos=True, logit_bias=end)
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("", "stop", special)
    shown = twice(server, stop=special, ignore_eos=True, logit_bias=end, include_stop_str_in_output=True)
    assert shown["text"] == special
    doubled = twice(server, stop=[special * 2], ignore_eos=True, logit_bias=end, max_tokens=5)
    assert (doubled["text"], doubled["finish_reason"], doubled["stop_reason"]) == ("", "stop", special * 2)


def test_a_text_that_brings_its_bos_gets_no_second(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """``/tokenize`` and completions, with a tokenizer that puts one before every text."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "hi": 2, "you": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    adding = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="?")
    monkeypatch.setattr(server.serving.llm, "tokenizer", adding)
    for text in ("hi you", "<s>hi you"):
        assert server.post("/tokenize", prompt=text).json()["tokens"] == [0, 2, 3]
        answer = server.complete(text, max_tokens=1, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == [0, 2, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [10**7]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [1.5]),
        ("stop_token_ids", [10**7]),
        ("stop_token_ids", ["1"]),
        ("logit_bias", {"10000000": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": float("inf")}),
        ("temperature", float("nan")),
        ("top_p", float("nan")),
        ("min_p", float("-inf")),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 1e-40),
        ("stop", "\ud800"),
        ("bad_words", ["\ud800"]),
        ("bad_words", [""]),
        ("prediction", {"type": "content", "content": "\ud800"}),
        ("min_tokens", 9),
        ("min_tokens", 1.5),
        ("max_tokens", True),
    ],
)
def test_values_that_cannot_be_are_a_400_with_the_field(server: Running, field: str, value: Any) -> None:
    body = json.dumps({"model": "builtin", "prompt": PROMPT, "max_tokens": 8, field: value})
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field and "checkpoint" not in answer.text
