"""Histories that models have written, prefilled answers, tools that a template cannot show, values of tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import Running, served
from tool_server import SCHEMA, TEMPLATE, make_with_template

import foretoken as ft
from foretoken.llm import Llm
from foretoken.server.config import ServerSettings

TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
LIKE_MISTRAL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}{{ c.id }}{% endfor %}{{ m.tool_call_id or '' }}{% endfor %}<assistant>"
)
BLIND = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def templated() -> Iterator[Running]:
    with served(make_with_template) as running:
        yield running


def chat(running: Running, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    return running.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 2, "temperature": 0, **body})


def prompt_of(running: Running, **body: Any) -> str:
    """The prompt that a chat request was turned into."""
    answer = chat(running, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return str(running.serving.llm.tokenizer.decode(answer.json()["choices"][0]["prompt_token_ids"]))


def history(**call: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "tool_call_id": call.get("id"), "content": "seen"},
    ]


# -- histories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        (None, {}),
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ('{"x": ', {"unparsed": '{"x": '}),
        ("[1]", {"unparsed": "[1]"}),
    ],
)
def test_whatever_a_model_has_called_the_conversation_goes_on(templated: Running, arguments: Any, shown: Any) -> None:
    text = prompt_of(templated, messages=history(id=None, function={"name": "look", "arguments": arguments}))
    assert f'"arguments": {json.dumps(shown)}' in text and text.endswith("<tool>seen<assistant>")


def test_ids_that_a_template_refuses_are_made_fit() -> None:
    def make(settings: ServerSettings) -> Llm:
        llm = make_with_template(settings)
        llm.tokenizer.chat_template = LIKE_MISTRAL
        return llm

    with served(make) as running:
        for call_id in ("call_0123456789", None, "abcdefghi"):
            text = prompt_of(running, messages=history(id=call_id, function={"name": "look", "arguments": "{}"}))
            shown = text.partition("[TOOL_CALLS]look")[2][:9]
            assert shown.isalnum() and (call_id is None or text.endswith(f"seen{shown}<assistant>"))
            assert call_id != "abcdefghi" or shown == call_id


def test_a_template_without_a_place_for_tools_refuses_them() -> None:
    def make(settings: ServerSettings) -> Llm:
        llm = make_with_template(settings)
        llm.tokenizer.chat_template = BLIND
        return llm

    with served(make) as running:
        answer = chat(running, tools=[TOOL])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        messages = history(id="1", function={"name": "look", "arguments": "{}"})
        messages.append({"role": "user", "content": "Did you look?"})  # which is no place for a call
        answer = chat(running, messages=messages)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert chat(running, tools=[TOOL], tool_choice="none").status_code == 200


def test_a_template_that_shows_the_first_of_several_calls_refuses_the_others() -> None:
    def make(settings: ServerSettings) -> Llm:
        llm = make_with_template(settings)
        llm.tokenizer.chat_template = TEMPLATE.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
        return llm

    with served(make) as running:
        messages = history(id="1", function={"name": "look", "arguments": "{}"})
        assert chat(running, messages=messages).status_code == 200
        messages[1]["tool_calls"] *= 2
        answer = chat(running, messages=messages)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_developer_speaks_as_the_system_where_a_template_knows_none(templated: Running) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_of(templated, messages=messages) == "<system>Be brief.<user>Hi<assistant>"


def test_an_earlier_refusal_is_text(templated: Running) -> None:
    """Clients send a refusal back as they got it."""
    parts = [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "I cannot."}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
    messages.append({"role": "user", "content": "Why?"})
    assert prompt_of(templated, messages=messages) == "<user>Hi<assistant>No: I cannot.<user>Why?<assistant>"


# -- what is not kept -------------------------------------------------------------------------------------------------


def test_strict_is_named_where_no_schema_is_enforced(templated: Running) -> None:
    """Each API names it; the answer of /v1/responses does not repeat ``strict`` then."""
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    flat = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    other = {"type": "function", "name": "hear", "parameters": SCHEMA}
    for choice, named in (("auto", True), (None, True), ("required", False), ("none", False)):
        answer = chat(templated, tools=[strict], tool_choice=choice)
        assert answer.headers.get("X-Ignored-Fields") == ("tools.function.strict" if named else None), choice
        body = {"input": "Hi", "max_output_tokens": 1, "tools": [flat, other], "tool_choice": choice}
        answer = templated.post("/v1/responses", **body)
        assert answer.headers.get("X-Ignored-Fields") == ("tools.strict" if named else None), choice
        assert [tool["strict"] for tool in answer.json()["tools"]] == [not named, None]
    assert "X-Ignored-Fields" not in chat(templated, tools=[TOOL]).headers
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]
    tool = {"name": "look", "input_schema": SCHEMA, "strict": True, "zz": 1}
    answer = templated.post("/v1/messages", messages=messages, max_tokens=1, tools=[tool])
    assert answer.headers["X-Ignored-Fields"] == "tools.zz, tools.strict"


# -- prefilled answers -----------------------------------------------------------------------------------------------


def test_an_answer_goes_on_with_its_beginning(templated: Running, server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It says"}]
    assert prompt_of(templated, messages=messages).endswith("<assistant>It says<assistant>")
    more = {"messages": messages, "continue_final_message": True}
    assert prompt_of(templated, **more).endswith("<assistant>It says")
    assert prompt_of(server, **more) == "User: Hi\nAssistant: It says"
    for body in (
        {**more, "add_generation_prompt": True},
        {"continue_final_message": True},
        {"messages": [*messages[:1], {"role": "assistant", "content": " "}], "continue_final_message": True},
    ):
        answer = chat(templated, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in body


# -- values of tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "stream"),
    [
        *itertools.product(({}, {"stop": ["c"]}, {"include_stop_str_in_output": True, "stop": ["c"]}), (False, True)),
        ({"echo": True, "max_tokens": 0}, False),
    ],
)
def test_offsets_never_pass_the_text(server: Running, more: dict[str, Any], stream: bool) -> None:
    """Characters of several tokens, an end of the text, and a stop string."""
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    text = "a\u4f60b\U0001f600c"
    body = {"max_tokens": 40, "logprobs": 2, "structured_outputs": {"choice": [text]}, "prompt": text, **more}
    if more.get("echo"):
        del body["structured_outputs"]
    if stream:
        lines = server.post("/v1/completions", temperature=0, stream=True, **body).text.splitlines()
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    else:
        choices = [server.complete(**body)["choices"][0]]
    whole = "".join(choice["text"] for choice in choices)
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(whole)
    for offset, token in zip(offsets, tokens, strict=True):
        if token in ("a", "b", "c") and offset < len(whole):
            assert whole[offset] == token


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("stop", ["a long stop string", slice(10, 18), slice(9, 17), None])
def test_a_stream_has_the_values_of_one_piece(server: Running, stop: str | slice | None, kept: bool) -> None:
    """This also holds where text waits for a stop string that never comes, or that cuts off several tokens."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "logprobs": 1}
    text = server.complete(**body)["choices"][0]["text"]
    if stop is not None:
        body |= {"stop": [text[stop] if isinstance(stop, slice) else stop], "include_stop_str_in_output": kept}
    whole = server.complete(**body)["choices"][0]
    lines = server.post("/v1/completions", prompt="def fib(n):", stream=True, **body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "text_offset"):
        streamed = list(itertools.chain.from_iterable(choice["logprobs"][name] for choice in choices))
        assert streamed == whole["logprobs"][name]


def test_bytes_add_up_to_the_text(server: Running) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    text = "a\u4f60b\U0001f600"
    choice = chat(
        server,
        max_tokens=40,
        logprobs=True,
        top_logprobs=20,
        structured_outputs={"choice": [text]},
        return_token_ids=True,
    ).json()["choices"][0]
    ends = server.serving.llm.target.eos_token_ids
    content = [
        row for row, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True) if token not in ends
    ]
    assert bytes(itertools.chain.from_iterable(row["bytes"] for row in content)) == text.encode()
    assert len(content) > len(text)  # some are parts of a character
    for row in choice["logprobs"]["content"]:
        assert len(row["top_logprobs"]) == 20 and len({entry["token"] for entry in row["top_logprobs"]}) == 20
        assert "\ufffd" not in row["token"]


def test_the_likeliest_tokens_are_all_there(server: Running) -> None:
    """Parts of characters shared one text, and so one place in the object."""
    parts = [
        token
        for token in range(server.serving.llm.target.vocab_size)
        if server.serving.llm.tokenizer.decode([token]) == "\ufffd"
    ][:20]
    assert len(parts) == 20
    bias = {str(token): 100 for token in parts}
    values = server.complete(max_tokens=4, logprobs=20, logit_bias=bias)["choices"][0]["logprobs"]
    assert all(len(top) >= 20 for top in values["top_logprobs"])
    assert all(token in top for token, top in zip(values["tokens"], values["top_logprobs"], strict=True))
    assert all(token.startswith("bytes:\\x") for token in values["tokens"])


# -- tokenising ------------------------------------------------------------------------------------------------------


def test_messages_are_tokenised_as_chat_does(templated: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for more in ({}, {"tools": [TOOL]}, {"add_generation_prompt": False}):
        expected = chat(templated, messages=messages, return_token_ids=True, **more).json()
        tokenized = templated.client.post("/tokenize", json={"messages": messages, **more}).json()
        assert tokenized["tokens"] == expected["choices"][0]["prompt_token_ids"]


def test_messages_have_one_beginning_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that writes it behind other signs, and a tokenizer that puts one before every text."""
    from tokenizers import processors

    def make(settings: ServerSettings) -> Llm:
        llm = make_with_template(settings)
        tokenizer = llm.tokenizer
        begin = tokenizer.eos_token
        tokenizer.bos_token = begin
        tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {begin}", special_tokens=[(begin, tokenizer.eos_token_id)]
        )
        return llm

    with served(make) as running:
        mark = running.serving.llm.tokenizer.eos_token_id
        tokenized = running.client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
        assert tokenized["tokens"].count(mark) == 1 and tokenized["tokens"][0] == mark


def test_a_gguf_file_is_served_like_any_model(tmp_path: Path) -> None:
    gguf_files = pytest.importorskip("gguf_files")
    gguf_files.need_packages()
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    file = gguf_files.builtin(tmp_path / "model.gguf", "target")

    def make(settings: ServerSettings) -> Llm:
        return ft.load(str(file), "ngram", controller="constant", known=True)

    with served(make, model=str(file), served_name="builtin") as running:
        tokenized = running.client.post("/tokenize", json={"prompt": "def f", "return_token_strs": True}).json()
        assert len(tokenized["token_strs"]) == tokenized["count"] and "def" in "".join(tokenized["token_strs"])
        assert running.client.get("/tokenizer_info").json()["eos_token"]
        choice = running.complete(structured_outputs={"choice": ["red", "green"]}, max_tokens=8)["choices"][0]
        assert choice["text"] in ("red", "green") and choice["finish_reason"] == "stop"
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        text = running.complete(response_format=form, max_tokens=30, logprobs=3)["choices"][0]["text"]
        assert 0 <= json.loads(text)["x"] <= 9


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:The `root_path` parameter")
@pytest.mark.parametrize("root", ["/model", "/model/"])
def test_keys_behind_a_root_path(root: str) -> None:
    """Probes stay open and everything else shut, whether the proxy leaves the prefix in the path or not."""
    with served(api_keys=("one",), root_path=root) as running:
        for prefix in ("", "/model"):
            assert running.client.get(f"{prefix}/health").status_code == 200
            assert running.client.get(f"{prefix}/ready").status_code == 200
            assert running.client.get(f"{prefix}/v1/models").status_code == 401
            assert "Basic" in running.client.get(f"{prefix}/").headers["WWW-Authenticate"]
            key = {"Authorization": "Bearer one"}
            assert running.client.get(f"{prefix}/v1/models", headers=key).status_code == 200
        assert running.client.get("/model/health/../v1/models").status_code == 401
