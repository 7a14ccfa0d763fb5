"""Prompt files: every format is read from a small file of its own; what is wrong is named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.lab.prompts import FORMATS, USUAL, BenchPrompt, load_prompts, prompts_of_kind, select

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "Hi"}]}]}
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "jsonl": ({"prompt": "one", "category": "a"}, "a", "one"),
    "spec_bench": ({"question_id": 1, "category": "rag", "turns": ["one", "two"]}, "rag", "one"),
    "mt_bench": ({"question_id": 1, "category": "math", "turns": ["one"]}, "math", "one"),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}, "humaneval", "def f():\n"),
    "mbpp": (
        {"text": "Add.", "code": "x", "test_list": ["assert f(1) == 2"]},
        "mbpp",
        '"""\nAdd.\nassert f(1) == 2\n"""\n',
    ),
    "gsm8k": ({"question": "1 + 1?", "answer": "2"}, "gsm8k", "Question: 1 + 1?\nAnswer:"),
    "chat": (CHAT, "chat", "system: Be brief.\n\nuser: Hi\n\nassistant:"),
    "sharegpt": (
        {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        "chat",
        "user: Hi\n\nassistant:",
    ),
}


def written(folder: Path, name: str, *rows: Any) -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("way", ["auto", "by name"])
def test_every_format_is_read_and_found_out(tmp_path: Path, name: str, way: str) -> None:
    row, category, text = ROWS[name]
    (prompt,) = load_prompts(written(tmp_path, "p.jsonl", row), name if way == "by name" else "auto")
    assert (prompt.category, prompt.text) == (category, text)
    assert name in FORMATS


def test_rows_of_several_formats_and_blank_lines_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row, _, _ in ROWS.values()) + "\n")
    assert [prompt.text for prompt in load_prompts(file)] == [text for _, _, text in ROWS.values()]


def test_compressed_files_text_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "from gz"}'))
    (tmp_path / "b.txt").write_text("line one\n\nline two\n")
    (tmp_path / "c.json").write_text(json.dumps([{"role": "user", "content": "Hello"}]))
    (tmp_path / "d.csv").write_text("not, read")
    with pytest.warns(UserWarning, match=r": d\.csv left out"):
        prompts = load_prompts(tmp_path)
    assert [p.text for p in prompts] == ["from gz", "line one", "line two", "user: Hello\n\nassistant:"]


def test_a_folder_names_what_is_not_read_in_it(tmp_path: Path) -> None:
    written(tmp_path, "a.jsonl", {"prompt": "one"})
    (tmp_path / "README.md").write_text("# Prompts\n\nThese are ours.\n")
    (tmp_path / ".hidden").write_text("x")
    with pytest.warns(UserWarning, match=r": README\.md left out; prompts are read from \.jsonl") as caught:
        assert [prompt.text for prompt in load_prompts(tmp_path)] == ["one"]
    assert len(caught) == 1 and load_prompts(tmp_path / "README.md")[0].text == "# Prompts"
    for i in range(6):
        (tmp_path / f"{i}.csv").write_text("a")
    with pytest.warns(UserWarning, match=r": 0\.csv, 1\.csv, 2\.csv, 3\.csv, 4\.csv and 2 more left out"):
        load_prompts(tmp_path)


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_the_built_in_prompts_have_no_format_to_choose(name: str) -> None:
    with pytest.raises(ValueError, match=f"--format {name} is the format of your own prompts: give --prompts too"):
        load_prompts(None, name)


def test_a_line_separator_inside_a_text_does_not_break_the_row(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
    assert load_prompts(file)[0].text == "a\u2028b"
    plain = tmp_path / "p.txt"
    plain.write_bytes("a\u2028b\r\n\r\nc\x0cd\n".encode())
    assert [prompt.text for prompt in load_prompts(plain)] == ["a\u2028b", "c\x0cd"]


def test_a_transcript_ends_before_the_answer_that_is_asked_for(tmp_path: Path) -> None:
    answered = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Hello."}]}
    (prompt,) = load_prompts(written(tmp_path, "p.jsonl", answered))
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_a_tool_call_without_content_is_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    row = {"messages": [call, {"role": "tool", "content": "found"}]}
    (prompt,) = load_prompts(written(tmp_path, "p.jsonl", row))
    assert "search" in prompt.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2]", "a row must be a JSON object, not list"),
        ("{broken", "this is not JSON"),
        ("Write a poem.", "plain text needs a name that ends in .txt or .md"),
        ('{"prompt": 7}', "'prompt' must be a string"),
        ('{"prompt": " "}', "'prompt' must be a string"),
        ('{"prompt": "a", "category": 3}', "'category' must be a string"),
        ('{"turns": []}', "'turns' must be a list of strings"),
        ('{"turns": "a"}', "'turns' must be a list of strings"),
        ('{"messages": "a"}', "'messages' must be a list"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message to answer"),
        ('{"messages": [{"content": "a"}]}', "needs a 'role'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "'content' must be text"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text parts"),
        ('{"messages": ["a"]}', "message 1 is text"),
        ('{"conversations": "a"}', "'conversations' must be a list"),
        ('{"conversations": [{"from": "human"}]}', "message 1 needs strings 'from' and 'value'"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "no message to answer"),
        ('{"title": "a"}', "no known prompt in the keys 'title'"),
        ("{}", "no known prompt in the keys (none)"),
        pytest.param("[" * 100_000, "this is nested too deeply", id="nested"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        load_prompts(file)
    message = str(error.value)
    assert message.startswith(f"{file}, line 3: ") and words in message and "\n" not in message


def test_the_line_of_an_error_in_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{\n"messages": [\n}')
    with pytest.raises(ValueError, match="line 3: this is not JSON"):
        load_prompts(file)


def test_a_format_that_was_asked_for_is_not_guessed(tmp_path: Path) -> None:
    file = written(tmp_path, "p.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match=r"line 1: 'question' must be a string \(--format gsm8k\)"):
        load_prompts(file, "gsm8k")
    assert load_prompts(file, "text")[0].text == '{"prompt": "a"}'
    with pytest.raises(ValueError, match=r"unknown prompt format 'xml': choose one of auto, jsonl"):
        load_prompts(file, "xml")


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt", "folder"])
def test_no_prompts(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "folder":
        file.mkdir()
    else:
        file.write_text("\n  \n")
    with pytest.raises(ValueError, match="contains no prompts"):
        load_prompts(file)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
    packed = gzip.compress(b'{"prompt": "a"}')
    (tmp_path / "c.jsonl.gz").write_bytes(packed[:10] + b"\xff" * 8 + packed[18:])
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz"):
        with pytest.raises(ValueError, match="cannot be read as text"):
            load_prompts(tmp_path / name)
    with pytest.raises(OSError):
        load_prompts(tmp_path / "missing.jsonl")


def test_the_built_in_prompts_have_several_of_each_category() -> None:
    groups = select(load_prompts(None))
    assert {"code", "prose", "agentic", "repetitive", "maths", "noise"} == set(groups)
    assert min(map(len, groups.values())) >= 4


def test_categories_are_chosen_and_their_prompts_spread() -> None:
    prompts = [BenchPrompt("a", str(i)) for i in range(10)] + [BenchPrompt("b", "x")]
    assert [p.text for p in select(prompts, ["a"], 4)["a"]] == ["0", "2", "5", "7"]
    assert list(select(prompts, ["b", "a"])) == ["a", "b"]
    with pytest.raises(ValueError, match=r"no prompts of category 'c': choose from a \(10\), b \(1\)"):
        select(prompts, ["a", "c"])


class Templated:
    """A tokenizer that shows which way was taken: the text's length, plus 1000 for special tokens."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        assert how == {"tokenize": False, "add_generation_prompt": True}
        return "m" * len(messages)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1000 * add_special_tokens + len(text)]}


def test_the_chat_template_is_for_conversations_only() -> None:
    tokenizer, chat = Templated(), BenchPrompt("a", "text", ({"role": "user", "content": "hi"},))
    assert chat.encode(tokenizer) == [1]
    assert chat.encode(tokenizer, chat=False) == [1004]
    assert BenchPrompt("a", "text").encode(tokenizer) == [1004]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        chat.encode(None)


def test_rows_of_text_alone_are_prompts(tmp_path: Path) -> None:
    assert load_prompts(written(tmp_path, "p.jsonl", {"text": "one"}))[0] == BenchPrompt("default", "one")


def test_calls_of_tools_stay_in_the_messages(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    row = {"messages": [call, {"role": "tool", "content": "found"}]}
    (prompt,) = load_prompts(written(tmp_path, "p.jsonl", row))
    assert prompt.messages[0]["tool_calls"] == call["tool_calls"]


def test_prompts_are_of_the_kind_that_a_model_is_for() -> None:
    """Questions for a chat template, texts to go on with without one; a few in a row are of several categories."""
    chat = prompts_of_kind(SimpleNamespace(chat_template="{{ messages }}"))
    assert len(chat) >= 16 and all(prompt.messages and prompt.messages[-1]["role"] == "user" for prompt in chat)
    assert {prompt.category for prompt in chat[:2]} == {"chat", "code"}
    texts = prompts_of_kind(None)
    assert len(texts) >= 16 and not any(prompt.messages for prompt in texts)
    assert [prompt.category for prompt in texts[:4]] == list(USUAL) and "noise" not in {
        prompt.category for prompt in texts
    }
