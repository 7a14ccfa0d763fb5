"""Tool calls of models whose marks are special tokens, which the text of an answer otherwise leaves out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from running_server import served
from tiny_tokenizer import Writer, tokenizer
from tokenizers import Tokenizer
from tool_server import SCHEMA, TEMPLATE
from transformers import PreTrainedTokenizerFast

from foretoken.engine.ends import special_tokens
from foretoken.engine.logprobs import TokenLogprobs
from foretoken.llm import Llm
from foretoken.server.config import ServerSettings
from foretoken.server.logprobs import LEAST, TokenTexts, chat_logprobs

LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TURN = "<|turn|>"
MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", TURN]
MESSAGES = [{"role": "user", "content": "The cat"}]
ANSWERS = [
    'So.[TOOL_CALLS][{"name": "look", "arguments": {"x": 1}}]',
    'So.[TOOL_CALLS]look[ARGS]{"x": 1}',
    'So.<|python_tag|>{"name": "look", "parameters": {"x": 1}}',
    'So.<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
    'So.<|turn|><tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call><|turn|>',
]


def special_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens(MARKS)
    special: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", extra_special_tokens=MARKS)
    special.chat_template = TEMPLATE
    return special  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", ANSWERS)
def test_a_call_behind_text_is_found_by_its_special_token(text: str) -> None:
    tokens = special_tokenizer()
    assert set(MARKS) < set(special_tokens(tokens))

    def prompt_of(tools: list[Any] | None) -> int:
        prompt = tokens.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        return len(tokens(prompt, add_special_tokens=False)["input_ids"])

    target = Writer(tokens(text)["input_ids"], prompt_of([LOOK]))
    target.vocab_size = len(tokens)

    def make(settings: ServerSettings) -> Llm:
        return Llm(target, None, None, None, tokens)

    with served(make) as running:

        def ask(**body: Any) -> httpx.Response:
            answer = running.post("/v1/chat/completions", messages=MESSAGES, max_tokens=99, temperature=0, **body)
            assert answer.status_code == 200, answer.text
            return answer

        message = ask(tools=[LOOK]).json()["choices"][0]["message"]
        assert message["content"] == "So."
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"x": 1}
        lines = [line for line in ask(tools=[LOOK], stream=True).text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content") or "" for delta in deltas) == "So."
        assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["look"]
        stopped = ask(tools=[LOOK], stop=['{"x"'], include_stop_str_in_output=True).json()["choices"][0]
        assert stopped["message"]["content"].endswith('{"x"') and TURN not in stopped["message"]["content"]
        target.prompt_length = prompt_of(None)
        plain = ask().json()["choices"][0]["message"]["content"]
        assert not any(mark in plain for mark in MARKS) and "look" in plain


def test_log_probabilities_belong_to_the_text_around_a_call() -> None:
    """The call's mark has a text here, so the offsets of what follows it count it."""
    tokens = special_tokenizer()
    text = 'So.<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call> the end.'
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    prompt = tokens.apply_chat_template(MESSAGES, tools=[LOOK], tokenize=False, add_generation_prompt=True)
    target = Writer(tokens(text)["input_ids"], len(tokens(prompt, add_special_tokens=False)["input_ids"]))
    target.vocab_size = len(tokens)

    with served(lambda settings: Llm(target, None, None, None, tokens)) as running:
        asked = {"include": ["message.output_text.logprobs"], "max_output_tokens": 99, "temperature": 0}
        answer = running.post("/v1/responses", input="The cat", tools=[tool], **asked)
        items = answer.json()["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]
    for item in (items[0], items[2]):
        part = item["content"][0]
        texts = [value["token"] for value in part["logprobs"] if value["token"] not in (*MARKS, "<eos>")]
        assert "".join(texts).strip() == part["text"].strip()


def test_an_impossible_token_is_a_number_in_json() -> None:
    row = TokenLogprobs(token_id=3, logprob=float("-inf"), top=((2, 0.0), (3, float("-inf"))), rank=2)
    (entry,) = chat_logprobs([row], TokenTexts(None), 2)["content"]
    assert entry["logprob"] == entry["top_logprobs"][1]["logprob"] == LEAST
