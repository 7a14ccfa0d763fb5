"""MODEL comes first, in every command; ``--target`` says the same."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.main import app
from foretoken.cli.model_argument import model_and_prompt, model_before, names_model, one_model

NOWHERE = "/no/such/model"
PROMPT = "for item in"


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


def test_no_help_page_lists_all_methods(run: Any) -> None:
    import typer

    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for command in sorted(set(names) - {"parity"}):
        page = " ".join(run(command, "--help").out.split())
        assert not {"ngram_cache", "shared_vocab", "pass_tokens"} <= set(page.replace(",", " ").split()), command


def test_the_model_first_and_as_an_option_give_the_same(run: Any, target: str) -> None:
    common = ("--max-new-tokens", "8", "--json")
    one = run("generate", target, PROMPT, *common).json
    assert one["token_ids"] == run("generate", PROMPT, "--target", target, *common).json["token_ids"]
    assert one["token_ids"] == run("generate", target, PROMPT, "--target", target, *common).json["token_ids"]


def test_a_model_alone_reads_its_prompt_from_stdin(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("--max-new-tokens", "8", "--json")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    from_stdin = run("generate", target, *common).json
    assert from_stdin["token_ids"] == run("generate", target, PROMPT, *common).json["token_ids"]


def test_with_target_a_model_folder_is_a_prompt(run: Any, target: str) -> None:
    result = run("generate", target, "--target", target, "--max-new-tokens", "4", "--json")
    assert result.json["stats"]["num_prompt_tokens"] > 10  # the folder's name, as text


def test_drafters_are_written_and_read_for_the_model_that_comes_first(run: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert run("export", "builtin", "medusa", "--out", str(one), "--json").json["method"] == "medusa"
    assert run("import", "builtin", str(one), "--out", str(other), "--json").json["method"] == "medusa"
    for command, what in (("export", "medusa"), ("import", str(one))):
        result = run(command, NOWHERE, what, "--target", "builtin", "--out", str(tmp_path / "third"))
        assert result.code == 2 and "give one of them" in result.err


def test_too_many_words_ask_for_quotes(run: Any) -> None:
    result = run("generate", "Write", "a", "haiku")
    assert result.code == 2 and "quotes" in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize("words", [("a",), ("a", "b", "c", "d")])
def test_batch_names_its_places(run: Any, words: tuple[str, ...]) -> None:
    assert run("batch", *words).err == f"error: the arguments are [MODEL] IN OUT, and there are {len(words)}\n"


def test_a_mistyped_subcommand_is_no_model(run: Any) -> None:
    for line, meant in (("tune tre", "tree"), ("bench reprt x", "report")):
        result = run(*line.split())
        assert result.code == 2 and f"Did you mean '{meant}'?" in result.err


def test_a_model_in_front_of_a_subcommand_is_put_right(run: Any, tmp_path: Path) -> None:
    result = run("tune", NOWHERE, "tree", "--out", str(tmp_path / "x"))
    assert result.err == f"error: put {NOWHERE} behind the subcommand: foretoken tune tree {NOWHERE} ...\n"


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
    assert [one for one in models if not names_model(one)] == []
    assert [one for one in texts if names_model(one)] == []


def test_one_or_two_words() -> None:
    assert model_and_prompt(["builtin", "hi"], False) == ("builtin", "hi")
    assert model_and_prompt(["builtin"], False) == ("builtin", None)
    assert model_and_prompt(["builtin"], True) == (None, "builtin")
    assert model_and_prompt(["hi"], False) == (None, "hi")
    assert model_and_prompt([], False) == (None, None)
    assert model_before(["a", "b"], "IN OUT") == (None, ["a", "b"])
    assert model_before(["m", "a", "b"], "IN OUT") == ("m", ["a", "b"])
    assert (one_model(None, None), one_model("a", None), one_model(None, "b")) == ("builtin", "a", "b")
