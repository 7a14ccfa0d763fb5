"""Which messages of a conversation are learned, which are held out, and what is not learned without a word."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_chat_data import CHAT, CHATML, chat_tokenizer, command, learned_text, target, write_rows

from foretoken.cli.main import main
from foretoken.llm import load
from foretoken.training.answers import answered, read_questions
from foretoken.training.chat import ChatBlocks, chat_pieces
from foretoken.training.config import AnswerConfig
from foretoken.training.corpus import build_corpus, read_chat

__all__ = ["target"]  # the fixture

CALLING = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.name }}{% endfor %}")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


def test_the_answers_of_question_rows_are_learned(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "response": "xy"}, {"instruction": "a", "input": "b", "output": "xy"}]
    tokenizer = chat_tokenizer()
    for row in rows:
        corpus = build_corpus([write_rows(tmp_path / "a.jsonl", [row])], tokenizer, tmp_path / "corpus")
        assert corpus["train"]["conversations"] == 1
        tokens, learned, _ = read_chat(tmp_path / "corpus", "train", corpus["dtype"])
        assert tokenizer.decode(tokens[learned]) == "xy</s>"


def test_an_answer_of_weight_0_is_not_learned() -> None:
    tokenizer = chat_tokenizer()
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}]
    (piece,) = chat_pieces({"messages": messages}, tokenizer)
    assert learned_text(tokenizer, piece) == "z</s>" and "xy" in tokenizer.decode(piece[0])
    turns = [{"from": who, "value": "x", "weight": weight} for who, weight in (("human", 1), ("gpt", 0), ("gpt", 1))]
    (piece,) = chat_pieces({"conversations": [{"from": "human", "value": "q"}, *turns]}, tokenizer)
    assert learned_text(tokenizer, piece).count("x</s>") == 1
    with pytest.raises(ValueError, match="all answers of the assistant have the weight 0"):
        chat_pieces({"messages": messages[:2]}, tokenizer)
    with pytest.raises(ValueError, match=r"message 2 has the weight 0\.5: it is learned \(1\) or not \(0\)"):
        chat_pieces({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, tokenizer)


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_a_call_that_the_template_does_not_write_is_refused(key: str, tmp_path: Path) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "", key: [{"name": "f"}]}
    messages = [CHAT[0], message, {"role": "tool", "content": "7"}, CHAT[1]]
    data = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": messages}])
    words = "a.jsonl, line 2: message 2 calls a tool, which the chat template does not render: leave the row out"
    with pytest.raises(ValueError, match=words):
        build_corpus([data], chat_tokenizer(), tmp_path / "corpus")
    tokenizer = chat_tokenizer()
    (piece,) = chat_pieces({"messages": [CHAT[0], {**message, "weight": 0}, *messages[2:]]}, tokenizer)
    assert learned_text(tokenizer, piece) == "xy</s>"


def test_a_call_that_the_template_writes_is_learned() -> None:
    strict = (
        "{% for m in messages if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('no') }}{% endfor %}"
    )
    for template in (CALLING, CALLING + strict):
        tokenizer = chat_tokenizer(template)
        (piece,) = chat_pieces({"messages": [CHAT[0], CALL]}, tokenizer)
        assert learned_text(tokenizer, piece) == "!f</s>"


def test_calls_are_looked_at_before_the_target_answers(target: Path, tmp_path: Path) -> None:
    messages = [CHAT[0], CALL, {"role": "tool", "content": "7"}]
    data = write_rows(tmp_path / "a.jsonl", [{"prompt": "x"}, {"messages": messages}])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: conversation 2: message 2 calls a tool"):
        next(answered(load(str(target), drafter=None), read_questions([data]), AnswerConfig(), lambda: False))


def test_the_target_does_not_answer_for_a_message_of_weight_0(tmp_path: Path) -> None:
    """Such a message is context that is not learned."""
    unlearned = {**CHAT[1], "weight": 0}
    data = write_rows(tmp_path / "a.jsonl", [{"messages": [CHAT[0], unlearned, *CHAT[2:]]}])
    assert read_questions([data])[0].script == [CHAT[0], unlearned, CHAT[2], None]
    write_rows(data, [{"messages": [CHAT[0], unlearned]}])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: all answers of the assistant have the weight 0"):
        read_questions([data])


def test_a_piece_of_which_only_the_first_token_is_learned_fills_no_row() -> None:
    tokens, learned = np.arange(1, 19), np.ones(18, bool)
    learned[10:] = False  # the second piece starts at 9
    blocks = ChatBlocks(tokens, learned, np.array([0]), 8, 1, seed=0, filler=0)
    assert blocks.num_blocks == 1 and blocks.rows[0].tolist() == tokens[:9].tolist()


def test_a_conversation_that_is_there_twice_is_not_held_out_and_learned(tmp_path: Path) -> None:
    """The row's number does not matter; ``--answers target`` numbers rows."""
    rows = [
        {
            "id": i,
            "messages": [{"role": "user", "content": f"{i % 10}?"}, {"role": "assistant", "content": f"{i % 10}"}],
        }
        for i in range(100)
    ]
    tokenizer = chat_tokenizer()
    corpus = build_corpus([write_rows(tmp_path / "a.jsonl", rows)], tokenizer, tmp_path / "corpus")
    sides = []
    for split in ("train", "held"):
        tokens, _, starts = read_chat(tmp_path / "corpus", split, corpus["dtype"])
        sides.append({tokenizer.decode(part) for part in np.split(tokens, starts[1:])})
    assert sides[1] and not sides[0] & sides[1]


def test_questions_keep_what_stands_beside_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"instruction": "a", "input": "b", "output": "c"}, {"system_prompt": "s", "question": "q"}]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = (dialogue.script for dialogue in read_questions([tmp_path]))
    assert not caplog.messages
    (tmp_path / "b.txt").write_text("Words.")
    assert len(read_questions([tmp_path])) == 2 and "contain no questions and are skipped: 1" in caplog.text
    assert first == [{"role": "user", "content": "a\n\nb"}, None]
    assert second == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, None]


def test_a_damaged_line_is_one_error_of_the_command(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes((json.dumps({"messages": CHAT}) + '\n{"text": "caf\u00e9"}').encode("latin-1"))
    for more in ([], ["--answers", "target"]):
        assert main(command(target, data, tmp_path / "out", *more)) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        assert errors == [f"error: {data} is not UTF-8 text: line 2 has the byte 0xe9"]
