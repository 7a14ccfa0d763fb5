"""Chat models on the command line: templates, system messages, their own sampling, empty answers, conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import foretoken as ft
from foretoken.cli.chat import Session
from foretoken.cli.options import Common
from foretoken.loading.generation_defaults import GenerationDefaults

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and 'bad' in m.content %}{{ raise_exception('no bad systems') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPT = "for item in"
LENGTH = ("--max-new-tokens", "12")


def with_files(target: str, folder: Path, sampling: dict[str, Any] | None = None) -> str:
    """A copy of a model with a chat template and a generation_config.json."""
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    own = {"eos_token_id": 0, "bos_token_id": 0, **(sampling or {})}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_files(target, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def sampling_model(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    own = {"do_sample": True, "temperature": 0.7, "top_k": 5}
    return with_files(target, tmp_path_factory.mktemp("sampling") / "model", own)


def expected(model: str, prompt: str, **options: Any) -> ft.Output:
    return ft.load(model, drafter=None, generation_config=None).generate(prompt, max_new_tokens=12, **options)


# -- generate --------------------------------------------------------------------------------------------------------


def test_a_chat_model_gets_its_template_and_raw_turns_it_off(run: Any, chat_model: str) -> None:
    answered = run("generate", chat_model, PROMPT, *LENGTH, "--json").json
    assert answered["token_ids"] == expected(chat_model, f"<user>{PROMPT}<assistant>").token_ids
    completed = run("generate", chat_model, PROMPT, "--raw", *LENGTH, "--json").json
    assert completed["token_ids"] == expected(chat_model, PROMPT).token_ids != answered["token_ids"]
    streamed = run("generate", chat_model, PROMPT, *LENGTH)
    assert streamed.out == answered["text"] + "\n"
    assert "cut there: --max-new-tokens" in streamed.err
    assert "cut there" not in run("generate", chat_model, PROMPT, "--raw", *LENGTH).err


def test_control_tokens_inside_a_template_are_told(run: Any, chat_model: str, tmp_path: Path) -> None:
    """A prompt to fill a gap, or one that is in a template already, is put into one more."""
    token = ft.load(chat_model, drafter=None).tokenizer.eos_token
    line = f"the prompt holds {token}, and the model's chat template is put around it: --raw completes it as it stands"
    out = ("--out", str(tmp_path / "x.html"))
    for command in (("generate",), ("show", *out)):
        assert line in run(command[0], chat_model, PROMPT + token, *LENGTH, *command[1:]).err.splitlines()
        assert "chat template" not in run(command[0], chat_model, PROMPT + token, "--raw", *LENGTH, *command[1:]).err
        assert "chat template" not in run(command[0], chat_model, PROMPT, *LENGTH, *command[1:]).err


def test_an_answer_is_drawn_in_a_line_of_its_own(run: Any, chat_model: str, tmp_path: Path) -> None:
    """The answer is drawn as `generate --explain` prints it; a completion continues the prompt's line."""
    out = tmp_path / "x.html"
    for more, shown in (((), f"{PROMPT}\n</span>"), (("--raw",), f"{PROMPT}</span>")):
        assert run("show", chat_model, PROMPT, *more, *LENGTH, "--out", str(out)).code == 0
        assert f'class="prompt">{shown}' in out.read_text()


@pytest.mark.parametrize("more", [("--compare", "--repeat", "1", "--drafter", "ngram"), ("--explain",)])
def test_compare_and_explain_use_the_template_too(run: Any, chat_model: str, more: tuple[str, ...]) -> None:
    result = run("generate", chat_model, PROMPT, *LENGTH, *more, "--json").json
    output = result.get("plain", result)
    assert output["token_ids"] == expected(chat_model, f"<user>{PROMPT}<assistant>").token_ids


def test_the_system_message_comes_first(run: Any, chat_model: str) -> None:
    result = run("generate", chat_model, PROMPT, "--system", "return b", *LENGTH, "--json").json
    assert result["token_ids"] == expected(chat_model, f"<system>return b<user>{PROMPT}<assistant>").token_ids


@pytest.mark.parametrize("command", ["generate", "show"])
def test_a_system_message_that_cannot_be_given_is_refused(
    run: Any, chat_model: str, target: str, tmp_path: Path, command: str
) -> None:
    out = () if command == "generate" else ("--out", str(tmp_path / "x.html"))
    for words, message in (
        ((chat_model, PROMPT, "--system", "x", "--raw"), "--raw"),
        ((target, PROMPT, "--system", "x"), "no chat template"),
        ((chat_model, PROMPT, "--system", "bad"), "no bad systems"),
        ((chat_model, " "), "prompt is empty"),
    ):
        result = run(command, *words, *out)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: ") and result.err.count("\n") == 1 and message in result.err


def test_show_draws_a_chat_models_answer(run: Any, chat_model: str, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    assert run("show", chat_model, PROMPT, "--out", str(out), *LENGTH).code == 0
    assert PROMPT in out.read_text()
    # the page's tokens are those of the answer
    stats = run("show", chat_model, PROMPT, "--out", str(out), *LENGTH, "--json").json["stats"]
    assert stats["num_prompt_tokens"] == len(ft.load(chat_model).encode(f"<user>{PROMPT}<assistant>"))


def ending_at_once(chat_model: str, folder: Path, prompt: str) -> str:
    """A copy of a model whose first token after the prompt is the end of the text, a special token."""
    first = expected(chat_model, prompt).token_ids[0]
    shutil.copytree(chat_model, folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[[0, first]] = head[[first, 0]]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("more", [(), ("--json",), ("--explain",)])
def test_an_answer_that_ends_at_once_says_why(run: Any, chat_model: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    ends = ending_at_once(chat_model, tmp_path / "ends", f"<user>{PROMPT}<assistant>")
    result = run("generate", ends, PROMPT, *LENGTH, *more)
    (line,) = [line for line in result.err.splitlines() if "the answer is empty" in line]
    token = ft.load(ends).tokenizer.convert_ids_to_tokens(0)
    assert f"the model ended its answer at once, with {token}" in line and "--raw" not in line


def test_an_empty_completion_of_a_chat_model_names_the_template(run: Any, chat_model: str, tmp_path: Path) -> None:
    ends = ending_at_once(chat_model, tmp_path / "ends", PROMPT)
    assert "--raw leaves the chat template out" in run("generate", ends, PROMPT, "--raw", *LENGTH).err


def test_an_answer_that_begins_with_a_stop_string_says_so(run: Any, chat_model: str) -> None:
    text = expected(chat_model, f"<user>{PROMPT}<assistant>").text
    result = run("generate", chat_model, PROMPT, *LENGTH, "--stop", text[:2])
    assert f"the answer is empty: the output began with its stop string or token, {text[:2]!r}\n" in result.err


# -- sampling that the model brings along ----------------------------------------------------------------------------


def test_the_models_own_sampling_is_used_and_named_first(run: Any, sampling_model: str) -> None:
    result = run("generate", sampling_model, PROMPT, *LENGTH, "--seed", "3")
    assert result.err.splitlines()[0].startswith("sampling: temperature 0.7")
    assert "generation_config.json" in result.err.splitlines()[0]
    report = run("generate", sampling_model, PROMPT, *LENGTH, "--seed", "3", "--json").json
    assert report["sampling"]["temperature"] == 0.7 and report["sampling"]["top_k"] == 5
    want = expected(sampling_model, f"<user>{PROMPT}<assistant>", temperature=0.7, top_k=5, seed=3)
    assert report["token_ids"] == want.token_ids and report["seed"] == 3


def test_an_option_replaces_the_models_own(run: Any, sampling_model: str) -> None:
    report = run("generate", sampling_model, PROMPT, *LENGTH, "--temperature", "0", "--json").json
    assert report["sampling"]["temperature"] == 0 and "seed" not in report
    assert report["token_ids"] == expected(sampling_model, f"<user>{PROMPT}<assistant>").token_ids


def test_compare_fixes_a_seed_when_the_model_samples(run: Any, sampling_model: str) -> None:
    result = run(
        "generate", sampling_model, PROMPT, *LENGTH, "--compare", "--repeat", "1", "--drafter", "ngram", "--json"
    )
    assert result.json["identical"] is True and result.json["sampling"]["temperature"] == 0.7


def test_batch_uses_the_models_own_sampling(run: Any, sampling_model: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "for item in"}\n{"prompt": "for item in", "temperature": 0}\n')
    assert run("batch", sampling_model, str(tmp_path / "in"), str(tmp_path / "out"), *LENGTH, "--seed", "3").code == 0
    answers = {row["id"]: row["text"] for row in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert answers["1"] == expected(sampling_model, PROMPT, temperature=0.7, top_k=5, seed=3).text
    assert answers["2"] == expected(sampling_model, PROMPT).text


def test_other_commands_leave_the_models_own_sampling_out(sampling_model: str) -> None:
    """These commands pass every option themselves: a file beside the model must not change what they measure."""
    assert Common(target=sampling_model).load().defaults == GenerationDefaults()
    assert Common(target=sampling_model).load(own_sampling=True).defaults.sampling["temperature"] == 0.7


# -- chat ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(chat_model: str) -> Session:
    return Session(ft.load(chat_model, drafter="ngram"), {"max_new_tokens": 12, "temperature": 0.0})


def test_the_second_turn_reads_only_what_is_new(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    # A random model's answer is spelled again by other tokens, unless it has signs only that are never joined.
    session.options["allowed_token_ids"] = session.llm.tokenizer.convert_tokens_to_ids(["!", "$", "%", "&"])
    session.handle("add a and b and go on with it")
    capsys.readouterr()
    answer = session.messages[1]["content"]
    session.handle("and c")
    line = capsys.readouterr().err
    whole = len(session.llm.encode(f"<user>add a and b and go on with it<assistant>{answer}<user>and c<assistant>"))
    new = int(line.split(" prompt tokens read")[0].rsplit(", ", 1)[1].split(" of ")[0])
    assert f"{new} of {whole} prompt tokens read" in line
    assert new <= len(session.llm.encode("<user>and c<assistant>")) + 2


def test_figures_follow_every_answer_until_they_are_switched_off(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.handle("one")
    assert "12 tokens" in (err := capsys.readouterr().err) and "tokens/s" in err and "--max-new-tokens" in err
    session.handle("/stats")
    assert "off; so far: 12 tokens" in capsys.readouterr().out
    session.handle("two")
    assert capsys.readouterr().err == ""
    session.handle("/stats")
    assert "on; so far: 24 tokens" in capsys.readouterr().out


def test_help_and_history(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.handle("/history")
    assert "nothing said yet" in capsys.readouterr().out
    session.system = "be brief"
    session.handle("one")
    capsys.readouterr()
    session.handle("/history")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["system: be brief", "user: one"] and lines[2].startswith("assistant: ")
    session.handle("/help")
    text = capsys.readouterr().out
    assert all(word in text for word in ("/reset", "/history", "/stats", "/quit", "Ctrl-C"))


def test_the_system_message_is_never_forgotten(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.system = "be brief"
    for _ in range(8):
        session.handle("a message that is long enough to fill the context in some turns")
    assert "of 160 tokens is full: forgot the oldest 2 messages" in capsys.readouterr().err
    assert session.llm.tokenizer.decode(session._prompt()).startswith("<system>be brief<user>")


def test_a_template_that_refuses_a_turn_is_one_line_and_the_chat_goes_on(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.llm.tokenizer.chat_template = "{{ raise_exception('not today') }}"
    session.handle("one")
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and "not today" in captured.err
    assert session.messages == []
    session.llm.tokenizer.chat_template = TEMPLATE
    session.handle("two")
    assert len(session.messages) == 2


def test_chat_refuses_a_system_message_without_a_template(run: Any, target: str) -> None:
    result = run("chat", target, "--system", "x")
    assert result.code == 2 and result.err.count("\n") == 1 and "no chat template" in result.err
