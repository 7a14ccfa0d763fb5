"""MODEL comes first, in every command; ``--target`` says the same."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from foretoken.cli.main import app
from foretoken.cli.model_argument import existing_model, model_and_prompt, model_before, names_model, one_model
from foretoken.loading import ZOO, LoadError

NOWHERE = "/no/such/model"
PROMPT = "for item in"
HEAVY = {"torch", "transformers", "numpy", "safetensors", "matplotlib"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """What commands need besides a model."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text\n" * 50)
    return {"jobs": str(tmp_path / "in.jsonl"), "data": str(tmp_path / "text"), "out": str(tmp_path / "out")}


LOADING = (
    "generate MODEL hello", "generate MODEL", "show MODEL hello --out x.html", "chat MODEL", "doctor MODEL",
    "parity MODEL", "bench MODEL", "bench --max-new-tokens 4 MODEL --drafter ngram", "tune MODEL --out {out}",
    "tune --minutes 1 MODEL --out {out}", "tune layer-skip MODEL --out {out}", "tune tree MODEL --out {out}",
    "drafters MODEL", "drafters MODEL {data}", "batch MODEL {jobs} {out}",
    "train medusa MODEL --data {data} --out {out}",
    "train distill MODEL --data {data} --out {out}", "train boost MODEL --data {data} --out {out}",
    "train specdec_pp MODEL --data {data} --out {out}",
    "export MODEL medusa --out {out}", "import MODEL {data} --out {out}",
    "datastore build MODEL {data} --out {out}", "serve MODEL",
)  # fmt: skip


@pytest.mark.parametrize("line", LOADING)
def test_every_command_loads_the_model_that_comes_first(
    run: Any, files: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    result = run(*line.replace("MODEL", NOWHERE).format(**files).split())
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith("error: ") and NOWHERE in result.err, result.err


@pytest.mark.parametrize("line", [line for line in LOADING if "drafters" not in line and line != "generate MODEL"])
def test_two_different_models_are_refused(run: Any, files: dict[str, str], line: str) -> None:
    words = line.replace("MODEL", NOWHERE).format(**files).split()
    result = run(*words, "--target", "builtin")
    assert result.code == 2
    assert result.err == f"error: MODEL is {NOWHERE!r} and --target is 'builtin': give one of them\n"


@pytest.mark.parametrize("command", ["generate", "show", "chat", "parity", "doctor", "bench", "batch", "drafters"])
def test_the_help_names_both(run: Any, command: str) -> None:
    page = run(command, "--help").out
    assert "[MODEL]" in page.split("\n\n")[0] + page and "--target" in page


WITHOUT_MODEL = {"demo", "methods", "models", "plan", "bench cards", "bench report", "bench serve", "train lm"}
"""Commands that run no model of the user's, or make one."""


def commands(group: Any = None, name: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something by itself, with its name."""
    group = typer.main.get_command(app) if group is None else group
    inner = getattr(group, "commands", {})
    if not inner or group.invoke_without_command:
        yield " ".join(name), group
    for word, command in inner.items():
        yield from commands(command, (*name, word))


def test_every_command_takes_model_and_target(run: Any) -> None:
    assert {name for name, _ in commands()} >= WITHOUT_MODEL
    for name, command in commands():
        takes_target = any("--target" in parameter.opts for parameter in command.params)
        usage = next(line for line in run(*name.split(), "--help").out.splitlines() if "Usage:" in line)
        assert takes_target is ("[MODEL]" in usage) is (name not in WITHOUT_MODEL), name


def test_a_wrong_path_is_told_before_anything_heavy_is_imported(files: dict[str, str]) -> None:
    lines = [line.replace("MODEL", NOWHERE).format(**files).split() for line in (*LOADING, "generate MODEL x --seed 3")]
    code = f"""
import sys
from foretoken.cli.main import main
for line in {lines!r}:
    assert main(line) == 2, line
    assert not {HEAVY!r} & set(sys.modules), (line, {HEAVY!r} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == len(lines) and all(NOWHERE in line and line.startswith("error: ") for line in errors), errors


def test_a_damaged_model_is_told_as_early(tmp_path: Path) -> None:
    half, file = tmp_path / "half", tmp_path / "w.gguf"
    half.mkdir()
    (half / "config.json").write_text("{}")
    (half / "model.safetensors").write_bytes((100).to_bytes(8, "little") + b"{")
    file.write_bytes(b"PK\x03\x04")
    for source, words in ((half, "half-written"), (file, "is not a GGUF file"), ("builtin:nosuch", "builtin:hybrid")):
        with pytest.raises(LoadError, match=words) as error:
            existing_model(str(source), None)
        assert "\n" not in str(error.value)
    for source in ("builtin", "builtin:early_exit", str(ZOO / "target")):
        assert existing_model(source, None) == source


def test_serve_has_the_model_of_target_and_of_neither(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.lifecycle.listener", lambda settings: settings.model)
    chosen: list[str] = []
    monkeypatch.setattr("foretoken.server.lifecycle.run", lambda settings, sock: chosen.append(sock) or 0)
    monkeypatch.setenv("FORETOKEN_MODEL", "builtin:hybrid")
    for line in ("serve", "serve --target builtin", "serve builtin", "serve builtin --target builtin"):
        assert run(*line.split()).code == 0
    assert chosen == ["builtin:hybrid", "builtin", "builtin", "builtin"]


def test_no_help_page_lists_all_methods(run: Any) -> None:
    for command, _ in commands():
        page = " ".join(run(*command.split(), "--help").out.split())
        assert not {"ngram_cache", "shared_vocab", "pass_tokens"} <= set(page.replace(",", " ").split()), command


def test_the_model_first_and_as_an_option_give_the_same(run: Any, target: str) -> None:
    common = ("--max-new-tokens", "8", "--json")
    report = run("generate", target, PROMPT, *common).json
    assert report["token_ids"] == run("generate", PROMPT, "--target", target, *common).json["token_ids"]
    assert report["token_ids"] == run("generate", target, PROMPT, "--target", target, *common).json["token_ids"]


def test_a_model_alone_reads_its_prompt_from_stdin(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("--max-new-tokens", "8", "--json")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    from_stdin = run("generate", target, *common).json
    assert from_stdin["token_ids"] == run("generate", target, PROMPT, *common).json["token_ids"]


def test_with_target_a_model_folder_is_a_prompt(run: Any, target: str) -> None:
    result = run("generate", target, "--target", target, "--max-new-tokens", "4", "--json")
    assert result.json["stats"]["num_prompt_tokens"] > 10  # the folder's name, as text


def test_drafters_are_written_and_read_for_the_model_that_comes_first(run: Any, tmp_path: Path) -> None:
    exported, imported = tmp_path / "one", tmp_path / "other"
    assert run("export", "builtin", "medusa", "--out", str(exported), "--json").json["method"] == "medusa"
    assert run("import", "builtin", str(exported), "--out", str(imported), "--json").json["method"] == "medusa"
    for command, what in (("export", "medusa"), ("import", str(exported))):
        result = run(command, NOWHERE, what, "--target", "builtin", "--out", str(tmp_path / "third"))
        assert result.code == 2 and "give one of them" in result.err


@pytest.mark.parametrize("command", ["generate", "show"])
def test_a_file_alone_is_no_prompt(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A lone word that is a file name would be completed as a prompt; as the second of two words it is a prompt."""
    (tmp_path / "notes.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    for word in ("notes.txt", str(tmp_path / "notes.txt")):
        for more in ((), ("--target", target)):
            result = run(command, word, *more)
            assert result.err == f"error: {word} is a file: give --prompt-file {word} for the text in it\n"
    assert model_and_prompt([target, "notes.txt"], False) == (target, "notes.txt")


def test_too_many_words_ask_for_quotes(run: Any) -> None:
    result = run("generate", "Write", "a", "haiku")
    assert result.code == 2 and "quotes" in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize("words", [("a",), ("a", "b", "c", "d")])
def test_batch_names_its_places(run: Any, words: tuple[str, ...]) -> None:
    assert run("batch", *words).err == f"error: expected the arguments [MODEL] IN OUT, not {len(words)} arguments\n"


def test_a_mistyped_subcommand_is_no_model(run: Any) -> None:
    for line, meant in (("tune tre", "tree"), ("bench reprt x", "report")):
        result = run(*line.split())
        assert result.code == 2 and f"Did you mean '{meant}'?" in result.err


def test_a_model_in_front_of_a_subcommand_is_put_right(run: Any, tmp_path: Path) -> None:
    result = run("tune", NOWHERE, "tree", "--out", str(tmp_path / "x"))
    assert result.err == f"error: put {NOWHERE} after the subcommand: foretoken tune tree {NOWHERE} ...\n"


# -- what is a model -------------------------------------------------------------------------------------------------


def test_names_of_models(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    models = ("builtin", "builtin:hybrid", target, "w.gguf", "adapter", "org/name", "org-1/n.a_me-2", NOWHERE, "./x")
    texts = (
        "empty",
        "gpt2",
        "hello",
        "and / or",
        "org/name please",
        "a/b/c",
        "",
        "-",
        "x" * 5000,
        "nul\0",
        "/ is root",
    )
    assert [model for model in models if not names_model(model)] == []
    assert [text for text in texts if names_model(text)] == []


def test_one_or_two_words() -> None:
    assert model_and_prompt(["builtin", "hi"], False) == ("builtin", "hi")
    assert model_and_prompt(["builtin"], False) == ("builtin", None)
    assert model_and_prompt(["builtin"], True) == (None, "builtin")
    assert model_and_prompt(["hi"], False) == (None, "hi")
    assert model_and_prompt([], False) == (None, None)
    assert model_before(["a", "b"], "IN OUT") == (None, ["a", "b"])
    assert model_before(["m", "a", "b"], "IN OUT") == ("m", ["a", "b"])
    assert (one_model(None, None), one_model("a", None), one_model(None, "b")) == ("builtin", "a", "b")
    for empty in (("", None), (None, ""), ("a", "")):  # of an unset variable the built-in model would write nonsense
        with pytest.raises(ValueError, match="MODEL is empty"):
            one_model(*empty)
