"""Conversations as prompts: rendered by the model's template, wherever a prompt is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.tiny_tokenizer import chat_tokenizer, eos, tokenizer
from foretoken.core.conversation import SET_HERE, control_tokens, from_sharegpt, has_template, is_messages, render
from foretoken.engine.background import AsyncLlm
from foretoken.llm import Llm
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.other.table import TableModel
from foretoken.options import encode

ASK = [{"role": "system", "content": "The cat."}, {"role": "user", "content": "The dog?"}]
OTHER = [{"role": "user", "content": "return n"}]
WRITTEN = "<eos>system: The cat.\nuser: The dog?\nassistant: "


def llm(tokens: Any) -> Llm:
    """Its answer depends on the whole prompt."""
    size = len(tokenizer())

    def distribution(prefix: Sequence[int]) -> list[float]:
        return [1.0 + size * (i == sum(prefix) * 7 % size) for i in range(size)]

    target = TableModel(distribution, size)
    return Llm(target, NgramDrafter(), None, ConstantController(), tokens)


def test_a_conversation_is_what_the_template_writes_with_one_beginning() -> None:
    tokens = chat_tokenizer()
    ids = render(ASK, tokens)
    assert tokens.decode(ids) == WRITTEN and ids.count(eos()) == 1
    assert tokens(WRITTEN)["input_ids"].count(eos()) == 2, "the tokenizer adds another, so this test can fail"
    assert encode(ASK, tokens) == encode(tuple(ASK), tokens) == ids
    assert tokens.decode(render(ASK, tokens, add_generation_prompt=False)) == WRITTEN.removesuffix("assistant: ")
    assert tokens.decode(render(OTHER, tokens, mood="gently")) == "<eos>user: return n\ngently\nassistant: "


def test_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "The "}, {"text": "dog?"}]
    assert render([ASK[0], {"role": "user", "content": parts}], chat_tokenizer()) == render(ASK, chat_tokenizer())


def test_an_answer_that_is_begun_goes_on() -> None:
    tokens = chat_tokenizer()
    begun = [*ASK, {"role": "assistant", "content": "The"}]
    assert tokens.decode(render(begun, tokens)) == WRITTEN + "The"
    assert tokens.decode(render(begun, tokens, add_generation_prompt=False)) == WRITTEN + "The\n"


def test_control_tokens_that_a_text_spells_out_are_found() -> None:
    tokens = chat_tokenizer()
    tokens.add_tokens(
        ["<|fim_prefix|>", "<|fim_suffix|>", "word", "<table>"]
    )  # not marked as special, as in Qwen2.5-Coder
    text = "<|fim_suffix|>a word<eos> in a <table><|fim_prefix|>b<|fim_suffix|><|fim_middle|>"
    assert control_tokens(text, tokens) == ["<|fim_suffix|>", "<eos>", "<|fim_prefix|>"]
    assert control_tokens("a < b | c > d", tokens) == []


def test_what_counts_as_messages() -> None:
    assert is_messages(ASK) and is_messages([ASK[0], "text"])
    for other in ("text", [1, 2], [], [ASK], ASK[0], [{"input_ids": [1]}], None):
        assert not is_messages(other)
    assert has_template(chat_tokenizer()) and not has_template(tokenizer()) and not has_template(None)


def test_one_conversation_gives_an_output_and_a_list_of_them_a_list() -> None:
    chat_llm = llm(chat_tokenizer())
    options: dict[str, Any] = {"max_new_tokens": 9}
    expected = [chat_llm.generate(render(c, chat_llm.tokenizer), **options).token_ids for c in (ASK, OTHER)]
    assert expected[0] != expected[1]
    assert chat_llm.generate(ASK, **options).token_ids == chat_llm.chat(ASK, **options).token_ids == expected[0]
    assert [out.token_ids for out in chat_llm.generate([ASK, OTHER], **options)] == expected
    assert [out.token_ids for out in chat_llm.chat([ASK, OTHER], **options)] == expected
    assert [out.token_ids for out in chat_llm.chat([OTHER], **options)] == expected[1:]
    mixed = chat_llm.generate([ASK, "return n", render(OTHER, chat_llm.tokenizer)], **options)
    assert [mixed[0].token_ids, mixed[2].token_ids] == expected
    assert [token for piece in chat_llm.stream(ASK, **options) for token in piece.token_ids] == expected[0]
    moody = render(ASK, chat_llm.tokenizer, mood="gently")
    assert (
        chat_llm.chat(ASK, template_kwargs={"mood": "gently"}, **options).token_ids
        == chat_llm.generate(moody, **options).token_ids
    )


def test_seeds_and_samples_of_conversations() -> None:
    chat_llm = llm(chat_tokenizer())
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0}
    alone = [
        [chat_llm.generate(c, seed=s + i, **options).token_ids for i in range(2)] for c, s in ((ASK, 5), (OTHER, 8))
    ]
    assert alone[0][0] != alone[0][1]
    assert [out.token_ids for out in chat_llm.chat(ASK, n=2, seed=5, **options)] == alone[0]
    groups: Any = chat_llm.chat([ASK, OTHER], n=2, seed=[5, 8], **options)
    assert [[out.token_ids for out in group] for group in groups] == alone


def test_the_background_engine_takes_conversations() -> None:
    chat_llm = llm(chat_tokenizer())
    expected = chat_llm.generate(ASK, max_new_tokens=6).token_ids

    async def asked() -> tuple[list[int], list[int]]:
        background = AsyncLlm(chat_llm)
        await background.start()
        whole = await background.generate(ASK, max_new_tokens=6)
        pieces = [piece async for piece in background.stream(ASK, max_new_tokens=6)]
        await background.close()
        return whole.token_ids, [token for piece in pieces for token in piece.token_ids]

    assert asyncio.run(asked()) == (expected, expected)


USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, "text"], "message 2 is text"),
        ([[USER], USER], "message 1 is a list"),
        ([{"content": "Hello"}], "message 1 needs a 'role'"),
        ([{"role": 3, "content": "Hello"}], "message 1 needs a 'role'"),
        ([{"role": "user"}], "message 1 needs a 'content'"),
        ([{"role": "user", "content": 7}], "'content' must be text or a list of text parts, not of type int"),
        ([{"role": "user", "content": ["Hello"]}], "only text parts .* not one that is text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "not one of type 'image_url'"),
        ([{"role": "robot", "content": "Hello"}], "the chat template rejects these messages: no robots here"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
        ([USER, {"role": "assistant", "content": " "}], "no text to continue"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, USER],
            "message 1: the arguments of its tool call are not valid JSON",
        ),
    ],
)
@pytest.mark.parametrize("way", ["generate", "chat", "encode"])
def test_messages_of_another_shape_are_refused_in_one_line(messages: Any, words: str, way: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        getattr(llm(chat_tokenizer()), way)(messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "give one or a list of them, not an empty list"),
        (USER, "give one or a list of them, not a single message"),
        ("Hello", "give one or a list of them, not text"),
        (None, "give one or a list of them, not None"),
        ([[USER], []], "conversation 2: .* not an empty list"),
        ([[USER], "Hello"], "conversation 2: .* not text"),
        ([[[USER]]], "give one or a list of them, not a list"),
    ],
)
def test_chat_wants_conversations(messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        llm(chat_tokenizer()).chat(messages)
    assert "\n" not in str(error.value)


def test_of_several_conversations_the_wrong_one_is_named() -> None:
    with pytest.raises(ValueError, match="prompt 2 of 2: message 1 needs a 'content'"):
        llm(chat_tokenizer()).chat([[USER], [{"role": "user"}]])


def test_tools_reach_the_template_or_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}"
    out = llm(chat_tokenizer(template)).chat([USER], template_kwargs={"tools": tools}, max_new_tokens=2)
    assert (
        out.stats.num_prompt_tokens
        > llm(chat_tokenizer(template)).chat([USER], max_new_tokens=2).stats.num_prompt_tokens
    )
    with pytest.raises(ValueError, match="chat template does not support tools"):
        llm(chat_tokenizer()).chat([USER], template_kwargs={"tools": tools})


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ([1], "not a list"),
        ({1: 2}, "1 is not a name"),
        *(({name: True}, f"'{name}', which is set here") for name in SET_HERE),
    ],
)
def test_what_a_template_reads_is_a_mapping(keywords: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"template_kwargs must be a mapping .*{words}"):
        llm(chat_tokenizer()).chat([USER], template_kwargs=keywords)


def test_models_without_a_template_or_a_tokenizer_say_so() -> None:
    with pytest.raises(ValueError, match=r"no chat template: give its prompt as text, or set tokenizer\.chat_template"):
        llm(tokenizer()).chat(ASK)
    with pytest.raises(ValueError, match="a conversation needs a tokenizer"):
        llm(None).generate(ASK)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content.nothing.at_all }}", "{% for %}", "{{ messages[0]['content'] + 1 }}", ""]
)
def test_templates_that_break_are_one_line(template: str) -> None:
    with pytest.raises(ValueError, match="template") as error:
        render(OTHER, chat_tokenizer(template))
    assert "\n" not in str(error.value)


def test_a_template_that_writes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="renders nothing"):
        render(OTHER, chat_tokenizer("{# #}"))


def test_arguments_of_calls_reach_the_template_as_objects() -> None:
    template = "{{ messages[0]['tool_calls'][0]['function']['arguments']['city'] }}"
    call = {"function": {"name": "weather", "arguments": '{"city": "cat"}'}}
    tokens = chat_tokenizer(template)
    assert tokens.decode(render([{"role": "assistant", "content": None, "tool_calls": [call]}, USER], tokens)) == "cat"


def test_turns_of_sharegpt() -> None:
    turns = [{"from": "system", "value": "a"}, {"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]
    assert [(m["role"], m["content"]) for m in from_sharegpt(turns)] == [
        ("system", "a"), ("user", "b"), ("assistant", "c")
    ]  # fmt: skip
    assert from_sharegpt([USER]) == [USER]
    for wrong, words in (
        ("a", "must be a list"),
        ([{"from": "human"}], "message 1"),
        ([{"from": "x", "value": ""}], "'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            from_sharegpt(wrong)
