"""Chats as training data: which tokens are learned, how rows are packed, answers by the target, and bad rows."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import foretoken as ft
from foretoken.cli.main import main
from foretoken.cli.train_drafter import corpus_line
from foretoken.core.conversation import from_sharegpt
from foretoken.core.io.files import write_json
from foretoken.llm import load
from foretoken.loading import load_model
from foretoken.loading.networks import from_pretrained
from foretoken.models.forward.parts import TargetParts
from foretoken.training.answers import AnswerFile, read_questions
from foretoken.training.chat import ChatBlocks, chat_pieces
from foretoken.training.config import AnswerConfig, TrainConfig
from foretoken.training.corpus import build_corpus, text_identity
from foretoken.training.recipes import RECIPES, find_recipe
from foretoken.training.recipes.base import Batch, some_positions
from foretoken.training.recipes.features import some_rows
from foretoken.training.trainer import Trainer

CHATML = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<s>{{ m.role }} "
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('/')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)
"""As templates that drop the reasoning of earlier turns."""
CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "xy"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "z"},
]


def chat_tokenizer(template: str | None = CHATML) -> Any:
    """A token per byte, and ``<s>`` and ``</s>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **names
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def chats(count: int) -> list[dict[str, Any]]:
    turns = [("human", "say {i}"), ("gpt", "one {i} two"), ("human", "more"), ("gpt", "three {i} four")]
    return [{"conversations": [{"from": who, "value": text.format(i=i)} for who, text in turns]} for i in range(count)]


def learned_text(tokenizer: Any, piece: tuple[list[int], list[bool]]) -> str:
    ids, learned = piece
    text: str = tokenizer.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned])
    return text


# -- which tokens are learned ------------------------------------------------------------------------------------------


def test_all_answers_and_their_ends_are_learned_and_nothing_else() -> None:
    tokenizer = chat_tokenizer()
    (piece,) = chat_pieces({"messages": CHAT}, tokenizer)
    assert tokenizer.decode(piece[0]) == "".join(f"<s>{m['role']} {m['content']}</s>\n" for m in CHAT)
    assert learned_text(tokenizer, piece) == "xy</s>z</s>"
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]
    assert chat_pieces({"conversations": sharegpt}, tokenizer) == [piece]


def test_a_template_that_writes_earlier_turns_otherwise_gives_a_piece_per_answer() -> None:
    tokenizer = chat_tokenizer(FORGETFUL)
    messages = [*CHAT[:1], {"role": "assistant", "content": "why/xy"}, *CHAT[2:]]
    whole, apart = chat_pieces({"messages": messages}, tokenizer)
    assert "why" not in tokenizer.decode(whole[0]) and learned_text(tokenizer, whole) == "z</s>"
    assert learned_text(tokenizer, apart) == "why/xy</s>"


def test_an_answer_that_was_cut_does_not_teach_an_end() -> None:
    tokenizer = chat_tokenizer()
    (piece,) = chat_pieces({"messages": CHAT, "unfinished": [3]}, tokenizer)
    assert learned_text(tokenizer, piece) == "xy</s>z"


# -- packing -----------------------------------------------------------------------------------------------------------


def test_rows_hold_whole_conversations_in_an_order_of_seed_and_step() -> None:
    sizes = [5, 3, 4, 2, 11]
    starts = np.cumsum([0, *sizes[:-1]])
    tokens, learned = np.arange(1, 1 + sum(sizes)), np.ones(sum(sizes), bool)
    learned[starts] = False
    blocks = ChatBlocks(tokens, learned, starts, 8, 2, seed=1, filler=0)
    seen = blocks.rows[blocks.rows > 0]
    assert sorted(seen.tolist()) == tokens.tolist()  # the long one is cut, nothing is lost
    assert set(blocks.learned_ids.tolist()) == set(tokens[learned].tolist())
    assert not blocks.learned[blocks.rows == 0].any()
    for start, size in zip(starts, sizes, strict=True):
        first = np.argwhere(blocks.rows == tokens[start])
        row, place = first[0]
        end = min(size, 9)
        assert blocks.rows[row, place : place + end].tolist() == tokens[start : start + end].tolist()
    again = ChatBlocks(tokens, learned, starts, 8, 2, seed=1, filler=0)
    assert all((blocks(step) == again(step)).all() for step in range(5))
    epoch = [row for step in range(blocks.num_blocks) for row in blocks.chosen(step)][: blocks.num_blocks]
    assert sorted(epoch) == list(range(blocks.num_blocks))
    with pytest.raises(ValueError, match="too short: 5 conversations of 25 tokens fill"):
        ChatBlocks(tokens, learned, starts, 8, 9, seed=1, filler=0)


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_places_are_those_whose_first_guess_is_learned(target: Path) -> None:
    tokens = torch.arange(24).view(2, 12)
    learned = torch.zeros(2, 12, dtype=torch.bool)
    learned[0, 5:8], learned[1, 9] = True, True
    batch = Batch(tokens, {}, TargetParts(load_model(target)), learned=learned)
    generator = torch.Generator().manual_seed(0)
    rows, columns = some_positions(batch, 200, 3, generator, ahead=2)
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == {(0, 3), (0, 4), (0, 5), (1, 7)}
    places = some_rows(batch, 2, generator)
    assert set(places[0].tolist()) == {3, 4, 5} and 7 in places[1].tolist() and places.shape == (2, 3)


@pytest.mark.parametrize("method", RECIPES)
def test_only_learned_tokens_are_in_the_loss(method: str, target: Path) -> None:
    """Other text behind unlearned labels changes no loss."""
    model = load_model(target, dtype="float32")
    recipe = find_recipe(method)(model, TargetParts(model), {"dropout": "0"} if method == "early_exit" else {}, 0)
    tokens = torch.randint(256, (2, 25), generator=torch.Generator().manual_seed(1))
    none = torch.zeros(tokens.shape, dtype=torch.bool)
    some = none.clone()
    some[:, 12:20] = True
    with torch.no_grad():
        taps = recipe.parts.features(tokens[:, :-1], recipe.taps)

    def loss(learned: torch.Tensor) -> float:
        batch = Batch(tokens, taps, recipe.parts, learned=learned)
        return float(recipe.loss(batch, torch.Generator().manual_seed(3)).detach())

    assert loss(none) == 0 and loss(some) > 0


# -- the corpus --------------------------------------------------------------------------------------------------------


def test_several_documents_always_leave_one_held_out(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    data = write_rows(tmp_path / "two.jsonl", chats(2))
    corpus = build_corpus([data], tokenizer, tmp_path / "corpus")
    assert corpus["chat"] and corpus["held"]["conversations"] == corpus["train"]["conversations"] == 1
    assert 0 < corpus["train"]["learned"] < corpus["train"]["tokens"]
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "one"}, {"text": "two"}])
    corpus = build_corpus([texts], tokenizer, tmp_path / "texts")
    assert corpus["held"]["documents"] == corpus["train"]["documents"] == 1 and "chat" not in corpus
    write_rows(texts, [{"text": "one"}, {"text": "two"}, {"text": "three"}])
    assert build_corpus([texts], tokenizer, tmp_path / "texts")["train"]["documents"] == 2  # the file has grown


def test_messages_and_the_same_in_sharegpt_form_are_one_text(tmp_path: Path) -> None:
    """Of many, the same ones are held out: else a cache of one form was none of the other."""
    sharegpt, tokenizer = chats(24), chat_tokenizer()
    messages = [{"messages": from_sharegpt(row["conversations"])} for row in sharegpt]
    identities, sizes = [], []
    for name, rows in (("sharegpt", sharegpt), ("messages", messages)):
        corpus = build_corpus([write_rows(tmp_path / f"{name}.jsonl", rows)], tokenizer, tmp_path / name)
        identities.append(text_identity(tmp_path / name, corpus))
        sizes.append([corpus["train"], corpus["held"]])
    assert identities[0] == identities[1] and sizes[0] == sizes[1]


def test_an_edit_that_keeps_the_length_is_noticed(tmp_path: Path) -> None:
    text, tokenizer, out = tmp_path / "a.txt", chat_tokenizer(), tmp_path / "corpus"
    text.write_text("The sky is blue.")
    first, tokens = build_corpus([text], tokenizer, out), (out / "train.bin").read_bytes()
    identity = text_identity(out, first)
    os.utime(text, (1, 1))  # as a copy has it: read again, and the same text
    second = build_corpus([text], tokenizer, out)
    assert second["files"] != first["files"] and text_identity(out, second) == identity
    text.write_text("The sky is grey.")
    assert text_identity(out, build_corpus([text], tokenizer, out)) != identity
    assert (out / "train.bin").read_bytes() != tokens


def test_a_corpus_that_was_broken_off_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_file, other_file = tmp_path / "a.txt", tmp_path / "b.txt"
    tokenizer, out = chat_tokenizer(), tmp_path / "corpus"
    first_file.write_text("The sky is blue.")
    other_file.write_text("The grass is green, and high.")
    identity = text_identity(out, build_corpus([first_file], tokenizer, out))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("foretoken.training.corpus.write_json", lambda *args: raise_interrupt())
        build_corpus([other_file], tokenizer, out)  # its tokens are there, and what says so is not
    assert text_identity(out, build_corpus([first_file], tokenizer, out)) == identity


@pytest.mark.skipif(os.name == "nt", reason="folders are locked on Unix only")
def test_two_runs_that_share_a_corpus_encode_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another run begins with other data while the first one writes its card: their files would be mixed."""
    first_file, other_file = tmp_path / "a.txt", tmp_path / "b.txt"
    tokenizer, out = chat_tokenizer(), tmp_path / "corpus"
    first_file.write_text("The sky is blue.")
    other_file.write_text("The grass is green, and high.")
    rivals: list[threading.Thread] = []
    second: dict[str, Any] = {}

    def write(path: Path, content: Any) -> Path:
        if not rivals:
            rivals.append(threading.Thread(target=lambda: second.update(build_corpus([other_file], tokenizer, out))))
            rivals[0].start()
            rivals[0].join(0.5)
            assert not second and "another run writes to" in caplog.text
            assert first_tokens(out) == tokenizer("The sky is blue.")["input_ids"]
        return write_json(path, content)

    monkeypatch.setattr("foretoken.training.corpus.write_json", write)
    build_corpus([first_file], tokenizer, out)
    rivals[0].join()
    assert second["files"] == json.loads((out / "corpus.json").read_text())["files"]
    assert first_tokens(out) == tokenizer("The grass is green, and high.")["input_ids"]


def first_tokens(corpus: Path) -> list[int]:
    return np.fromfile(corpus / "train.bin", np.uint16).tolist()[:-1]


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_a_single_document_is_learned_and_what_is_missing_is_said(tmp_path: Path) -> None:
    corpus = build_corpus([write_rows(tmp_path / "one.jsonl", chats(1))], chat_tokenizer(), tmp_path / "corpus")
    assert corpus["train"]["documents"] == 1
    assert corpus_line(corpus).endswith(
        "nothing is held out, because the data is one document: acceptance is not measured"
    )


def command(target: Path, data: Path, out: Path, *more: str, method: str = "medusa") -> list[str]:
    options = ["--target", str(target), "--data", str(data), "--out", str(out), "--context", "64", "--batch-size", "2"]
    return ["train", method, *options, *more]


BAD = {
    "no answer": ({"messages": CHAT[:1]}, "no answer of the assistant to learn from: add one, or let the target"),
    "unknown role": (
        {"messages": [{"role": "robot", "content": "x"}]},
        "message 1 has the role 'robot', which is unknown: use one of",
    ),
    "unknown speaker": (
        {"conversations": [{"from": "robot", "value": "x"}]},
        "message 1 is from 'robot', which is unknown: use one of",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "message 1 needs a 'content'"),
    "no messages": ({"messages": []}, "the conversation is empty"),
    "both": ({"messages": CHAT, "conversations": []}, "messages or conversations, not both"),
    "broken": ('{"messages": [{"role"', "is not JSON"),
    "no text": ({"title": "x"}, "has no conversation: a row is an object with 'messages', 'conv"),
    "no object": ("[1, 2]", "has no conversation: a row is an object"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_line_that_names_file_and_line(
    name: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, words = BAD[name]
    data = write_rows(tmp_path / "chats.jsonl", [*chats(3), row])
    assert main(command(target, data, tmp_path / "out")) == 2
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert f"{data}, line 4" in error and words in error
    assert not (tmp_path / "out" / "corpus" / "train.bin").exists()  # no half corpus


def test_a_target_without_a_template_reads_no_chats(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(3))
    corpus = tmp_path / "corpus"
    with pytest.raises(ValueError, match=r"chats.jsonl, line 1: this model has no chat template"):
        build_corpus([data], chat_tokenizer(None), corpus)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_from_chats_to_a_drafter(method: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(24))
    out, features = tmp_path / "head", tmp_path / "features"
    assert main(command(target, data, out, "--steps", "6", "--features", str(features), method=method)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("loading ") and "parameters to train" in lines[1] and "MiB" in lines[1]
    assert lines[2] == "24 documents read" and "of them learned; 3 documents of" in lines[3]
    progress = [line for line in lines if "tokens/s" in line]  # no terminal: lines, the first one at once
    assert progress[0].startswith("1/6  loss ") and "acceptance " in progress[0] and "left" in progress[-1]
    assert any(line.startswith("step 0: mean acceptance length") for line in lines)
    llm = ft.load(str(target), drafter=f"{method}:{out}")
    ask = [{"role": "user", "content": "say 3"}]
    assert llm.chat(ask, max_new_tokens=12).token_ids == llm.plain.chat(ask, max_new_tokens=12).token_ids


def trainer(target: Path, data: Path, out: Path, **more: Any) -> Trainer:
    model, kind = load_model(target), find_recipe("medusa")
    recipe = kind(model, TargetParts(model), {}, 0)
    config = TrainConfig(steps=4, batch_size=2, context=64, lr=1e-3)
    return Trainer(recipe, [data], out, config, chat_tokenizer(), **more)


def test_features_of_conversations_are_kept_by_row(target: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(24))
    kept = trainer(target, data, tmp_path / "a", features=tmp_path / "features")
    fresh = trainer(target, data, tmp_path / "b")
    for step in range(20):
        assert torch.equal(kept._batch(step).taps["last"], fresh._batch(step).taps["last"])
    shards = len(list((tmp_path / "features" / "last").iterdir()))
    assert isinstance(kept.sampler, ChatBlocks) and kept.sampler.num_blocks < 40
    assert shards == -(-kept.sampler.num_blocks // 16)  # every pass reads the same rows


def test_a_run_is_not_gone_on_with_for_another_model_of_the_same_shape(target: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(24))
    trainer(target, data, tmp_path / "out").run()
    other = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(0.01)
    other.save_pretrained(tmp_path / "other")
    chat_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="trained with other settings"):
        trainer(tmp_path / "other", data, tmp_path / "out").run()
    with pytest.raises(ValueError, match="another target: the shapes agree, but the weights differ"):
        load(str(tmp_path / "other"), drafter=f"medusa:{tmp_path / 'out'}")


# -- answers by the target ---------------------------------------------------------------------------------------------


def answer_file(target: Path, data: Path, out: Path, **config: Any) -> tuple[AnswerFile, AnswerConfig]:
    how = AnswerConfig(tokens=5, batch=3, **config)
    parts = TargetParts(load_model(target))
    return AnswerFile(out, parts.fingerprint().__dict__, how, read_questions([data])), how


def stop_after(count: int) -> Callable[[], bool]:
    calls = iter(range(10_000))
    return lambda: next(calls) >= count


QUESTIONS = [{"turns": ["ab", "cd"]}, *chats(4), {"prompt": "one"}, {"question": "two"}, {"messages": CHAT[:1]}]


def test_the_target_answers_every_turn_and_a_stopped_run_goes_on(target: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "questions.jsonl", QUESTIONS)
    llm = load(str(target), drafter=None)
    answers, config = answer_file(target, data, tmp_path)
    assert answers.write(llm, config, stop=stop_after(14)) is None
    first = len(answers.rows())
    assert 0 < first < len(QUESTIONS) and not answers.file.exists()
    with answers.part.open("a") as half:
        half.write('{"id": 99, "mess')  # killed while it wrote
    written = []
    answers, config = answer_file(target, data, tmp_path)
    assert answers.write(llm, config, on_progress=written.append) == answers.file
    assert (written[0].done, written[-1].done, written[-1].count) == (first, len(QUESTIONS), len(QUESTIONS))
    rows = [json.loads(line) for line in answers.file.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(len(QUESTIONS))) and not answers.part.exists()
    for row, turns in zip(rows, [2, 2, 2, 2, 2, 1, 1, 1], strict=True):
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * turns
    whole, config = answer_file(target, data, tmp_path / "again")
    file = whole.write(llm, config)
    assert file is not None and file.read_text() == answers.file.read_text()


def test_a_finished_file_that_lost_its_end_is_completed(target: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "questions.jsonl", QUESTIONS)
    llm = load(str(target), drafter=None)
    answers, config = answer_file(target, data, tmp_path)
    answers.write(llm, config)
    whole = answers.file.read_text()
    answers.file.write_text("".join(whole.splitlines(keepends=True)[:-2]) + '{"id": 6, "mess')
    for stop, file in ((stop_after(3), None), (stop_after(1000), answers.file)):  # stopped again before the end
        answers, config = answer_file(target, data, tmp_path)
        assert answers.write(llm, config, stop=stop) == file
    assert answers.file.read_text() == whole and not answers.part.exists()


def test_a_conversation_that_fills_the_context_ends_at_its_last_answer(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The context has 256 tokens, a token per byte: the third question of the first row has no room."""
    rows = [{"turns": ["a" * 100, "b" * 90, "c" * 100]}, {"prompt": "d" * 300}, {"prompt": "e"}]
    data = write_rows(tmp_path / "questions.jsonl", rows)
    llm = load(str(target), drafter=None)
    answers, config = answer_file(target, data, tmp_path)
    assert answers.write(llm, config) == answers.file
    warnings = [line for line in caplog.messages if "target's context" in line]
    assert len(warnings) == 1 and "context of 256 tokens" in warnings[0]
    assert f": 2, of which 1 have none and are left out; the first is {data}, line " in warnings[0]
    written = [json.loads(line) for line in answers.file.read_text().splitlines()]
    assert [(row["id"], [m["role"] for m in row["messages"]]) for row in written] == [
        (0, ["user", "assistant"] * 2),
        (2, ["user", "assistant"]),
    ]
    whole = answers.file.read_text()
    answers, config = answer_file(target, data, tmp_path)
    assert answers.is_complete  # the second row is not asked again
    assert answers.write(llm, config) == answers.file and answers.file.read_text() == whole
    only = write_rows(tmp_path / "long.jsonl", rows[1:2])
    answers, config = answer_file(target, only, tmp_path / "none")
    with pytest.raises(ValueError, match="no conversation fits into the target's context of 256 tokens"):
        answers.write(llm, config)


def test_greedy_answers_are_what_the_target_says(target: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "questions.jsonl", [{"prompt": "ab"}])
    llm = load(str(target), drafter=None)
    answers, config = answer_file(target, data, tmp_path, temperature=0.0)
    answers.write(llm, config)
    text = llm.chat([{"role": "user", "content": "ab"}], max_new_tokens=5, temperature=0.0).text
    assert answers.rows()[0]["messages"][-1] == {"role": "assistant", "content": text}


def test_answers_of_another_target_or_temperature_are_not_gone_on_with(target: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "questions.jsonl", QUESTIONS)
    answer_file(target, data, tmp_path)
    with pytest.raises(ValueError, match=r"answers of another run \(temperature\): give the same"):
        answer_file(target, data, tmp_path, temperature=0.0)
    write_rows(data, QUESTIONS[1:])
    with pytest.raises(ValueError, match=r"answers of another run \(questions\)"):
        answer_file(target, data, tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [({"title": "x"}, "a row without a question"), ([1], "a row is an object"), ({"turns": [3]}, "without a question")],
)
def test_a_row_that_asks_nothing(row: Any, words: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "questions.jsonl", [{"prompt": "x"}, row])
    with pytest.raises(ValueError, match=f"questions.jsonl, line 2: .*{words}"):
        read_questions([data])


def test_the_command_lets_the_target_answer_and_trains_on_it(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "questions.jsonl", [{"prompt": f"say {i}"} for i in range(16)])
    more = ["--answers", "target", "--answer-tokens", "24", "--steps", "2"]
    assert main(command(target, data, tmp_path / "out", *more)) == 0
    stderr = capsys.readouterr().err
    assert "16 conversations for the target to answer" in stderr and "the target answers" in stderr
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 16
    assert "--answers target" in (tmp_path / "out" / "README.md").read_text()
    assert main(command(target, data, tmp_path / "out", *more[:-1], "2")) == 0  # nothing is done twice
    assert "for the target to answer" not in capsys.readouterr().err
    assert main(command(target, data, tmp_path / "out", "--answers", "mine")) == 2
    assert "--answers must be data or target, not 'mine'" in capsys.readouterr().err


def test_answers_in_the_data_folder_are_no_questions(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command goes on, after a finished run too."""
    write_rows(tmp_path / "questions.jsonl", [{"prompt": f"say {i}"} for i in range(16)])
    run = command(target, tmp_path, tmp_path / "out", "--answers", "target", "--answer-tokens", "24", "--steps", "1")
    assert main(run) == 0
    assert main(run) == 0, capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_one_target_at_a_time(
    precision: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers before it is loaded to train, and with all answers written it is not loaded to answer."""
    data = write_rows(tmp_path / "questions.jsonl", [{"prompt": f"say {i}"} for i in range(16)])
    alive: list[int] = []
    networks: weakref.WeakSet[Any] = weakref.WeakSet()

    def counted(*args: Any) -> Any:
        alive.append(len(networks))
        network = from_pretrained(*args)
        networks.add(network)
        return network

    monkeypatch.setattr("foretoken.loading.models.from_pretrained", counted)
    run = command(target, data, tmp_path / "out", "--answers", "target", "--answer-tokens", "24")
    run += ["--precision", precision, "--steps"]
    loads = 1 if precision == "bfloat16" else 2
    assert main([*run, "1"]) == 0
    assert alive == [0] * (2 * loads + 1)
    networks.clear()
    assert main([*run, "2"]) == 0
    assert alive[2 * loads + 1 :] == [0] * loads


EARLY = {
    "text": (["--text", "target"], "--answers target gives conversations, and --text target continues texts"),
    "bits": (["--weight-bits", "7"], "weights are stored in 16 or 8 bits, not 7"),
    "ahead": (["--set", "heads=20", "--context", "16"], "--context of 16 tokens is too short"),
    "features": (["--set", "mode=joint", "--features", "FOLDER"], "leave --features out"),
}


@pytest.mark.parametrize("name", EARLY)
def test_wrong_options_are_refused_before_the_target_writes(
    name: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, words = EARLY[name]
    more = [str(tmp_path / "features") if word == "FOLDER" else word for word in more]
    data = write_rows(tmp_path / "questions.jsonl", [{"prompt": f"say {i}"} for i in range(16)])
    assert main(command(target, data, tmp_path / "out", "--answers", "target", "--answer-tokens", "24", *more)) == 2
    stderr = capsys.readouterr().err
    assert words in stderr and "for the target to answer" not in stderr
    assert ("loading" in stderr) == (name in ("ahead", "features"))  # these depend on the target
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("row", [{"question": "say {}"}, {"turns": ["say {}", "more"]}])
def test_questions_alone_are_answered_before_they_are_text(row: dict[str, Any], target: Path, tmp_path: Path) -> None:
    rows = [json.dumps(row).replace("{}", str(i)) for i in range(16)]
    data = write_rows(tmp_path / "questions.jsonl", rows)
    more = ["--answers", "target", "--answer-tokens", "24", "--steps", "1"]
    assert main(command(target, data, tmp_path / "out", *more)) == 0
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 16
