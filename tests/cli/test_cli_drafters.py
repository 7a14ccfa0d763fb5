"""``foretoken drafters``: what works for a target, what fits in folders, what is refused and why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TEXT, save_model
from transformers import AutoTokenizer

import foretoken.registry as registry
from foretoken.loading import load_model
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.forward.parts import TargetParts
from foretoken.registry import rows
from foretoken.training.corpus import train_tokenizer

FIELDS = {"name", "spec", "works", "why", "gain"}
FEW = ("model", "shared_vocab", "retokenize", "ngram", "recycling", "prediction", "medusa")
"""Rows that the tests of folders and of measuring keep: the others take time and no other way through the code."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ROWS", tuple(r for r in rows() if r.role != "drafter" or r.name in FEW))


def save_head(folder: Path, target: str) -> Path:
    """Untrained Medusa heads, as training would leave them."""
    parts = TargetParts(load_model(target))
    shape = MedusaConfig(hidden_size=32, vocab_size=320, heads=2)
    measured = {"accuracies": [[0.5, 0.3], [0.4, 0.2]]}
    save_drafter(folder, "medusa", asdict(shape), MedusaHeads(shape), parts.fingerprint(), measured)
    return folder


def rows_by_spec(result: Any, place: Path | str = "") -> dict[str, dict[str, Any]]:
    """The rows of a result by spec; those of one place if there is one."""
    assert result.code == 0, result.err
    assert set(result.json) == {"drafters"}
    return {row["spec"]: row for row in result.json["drafters"] if str(place) in row["spec"]}


# -- what comes with the target --------------------------------------------------------------------------------------


def test_everything_works_for_the_builtin_target(run: Any) -> None:
    by_spec = rows_by_spec(run("drafters", "--json"))
    assert {row["name"] for row in by_spec.values()} == {row.name for row in rows("drafter")}
    for row in by_spec.values():
        assert set(row) == FIELDS
        assert row["works"] is True and row["gain"] is None, row
    assert {row.example for row in rows("drafter")} == set(by_spec)
    marked = {row["name"]: row["why"] for row in by_spec.values() if row["why"].startswith("only for")}
    assert marked == {
        "prediction": "only for requests with prediction=...",
        "scripted": "only for tests and demonstrations",
    }
    assert [row["name"] for row in by_spec.values()][-2:] == list(marked)


def test_another_target_has_no_draft_model_and_no_trained_heads(run: Any, target: str, few: None) -> None:
    by_name = {row["name"]: row for row in rows_by_spec(run("drafters", target, "--json")).values()}
    assert {name for name, row in by_name.items() if row["works"]} == {
        "ngram", "recycling", "prediction",
    }  # fmt: skip
    assert by_name["model"]["why"] == (
        "drafter 'model' needs a path for this target: model:PATH (a draft LM of the same tokenizer)"
    )
    assert "medusa:FOLDER" in by_name["medusa"]["why"]
    assert all(row["why"] for row in by_name.values())


def test_a_group_falls_back_on_members_that_the_target_has(run: Any, target: str, monkeypatch: Any) -> None:
    kept = tuple(r for r in rows() if r.name in ("ensemble", "ngram", "suffix", "constant", "auto"))
    monkeypatch.setattr(registry, "ROWS", kept)
    by_spec = rows_by_spec(run("drafters", target, "--json"))
    assert set(by_spec) == {"ensemble", "ngram", "suffix"} and by_spec["ensemble"]["works"]


def test_what_cannot_be_rolled_back_is_refused_by_the_engine(run: Any, tmp_path: Path, few: None) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    by_name = {row["name"]: row for row in rows_by_spec(run("drafters", str(tmp_path), "--json")).values()}
    assert by_name["ngram"]["works"]
    assert not by_name["recycling"]["works"] and "ALiBi" in by_name["recycling"]["why"]


# -- what is in folders ----------------------------------------------------------------------------------------------


def test_folders(run: Any, target: str, tokenizer: Any, tmp_path: Path, few: None) -> None:
    save_model(tmp_path / "draft", tokenizer, noise=0.02)
    other = tmp_path / "elsewhere" / "tokenizer"
    train_tokenizer(["zebra quagga okapi " * 20], 290, other)
    save_model(tmp_path / "foreign", AutoTokenizer.from_pretrained(other))
    save_head(tmp_path / "head", target)
    save_head(tmp_path / "other_head", str(save_model(tmp_path / "elsewhere" / "target", tokenizer, seed=7)))
    broken = save_model(tmp_path / "broken", tokenizer)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "notes.txt").write_text("contains no drafter", encoding="utf-8")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "drafter.json").write_text("{", encoding="utf-8")

    by_spec = rows_by_spec(run("drafters", target, str(tmp_path), "--json"), tmp_path)
    works = {spec: row["works"] for spec, row in by_spec.items()}
    assert works == {
        f"model:{tmp_path / 'draft'}": True,
        f"medusa:{tmp_path / 'head'}": True,
        f"shared_vocab:{tmp_path / 'foreign'}": True,
        f"retokenize:{tmp_path / 'foreign'}": True,
        f"model:{tmp_path / 'foreign'}": False,
        f"medusa:{tmp_path / 'other_head'}": False,
        f"model:{broken}": False,
        str(damaged): False,
    }
    assert "another tokenizer" in by_spec[f"model:{tmp_path / 'foreign'}"]["why"]
    assert "trained for another target" in by_spec[f"medusa:{tmp_path / 'other_head'}"]["why"]
    assert "half-written" in by_spec[f"model:{broken}"]["why"]
    assert "damaged" in by_spec[str(damaged)]["why"]


def test_a_datastore_fits_by_its_tokenizer(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("retrieval", "ngram_cache", "model", "recycling", "auto", "constant")
    monkeypatch.setattr(registry, "ROWS", tuple(r for r in rows() if r.name in kept))
    text, store = tmp_path / "text.txt", tmp_path / "store.bin"
    text.write_text(TEXT, encoding="utf-8")
    assert run("datastore", "build", str(text), "--target", target, "--out", str(store)).code == 0
    by_spec = rows_by_spec(run("drafters", target, str(tmp_path), "--json"), tmp_path)
    assert [(spec, row["works"]) for spec, row in by_spec.items()] == [(f"retrieval:{store}", True)]
    by_spec = rows_by_spec(run("drafters", "builtin", str(store), "--json"), store)
    assert [(spec, row["works"]) for spec, row in by_spec.items()] == [(str(store), False)]
    assert "another tokenizer" in by_spec[str(store)]["why"]


def test_other_projects_layouts_are_named(run: Any, target: str, tmp_path: Path, few: None) -> None:
    head = save_head(tmp_path / "head", target)
    out = tmp_path / "exported"
    assert run("export", f"medusa:{head}", "--target", target, "--format", "vllm", "--out", str(out)).code == 0
    by_spec = rows_by_spec(run("drafters", target, str(out), "--json"), out)
    assert by_spec[str(out)]["name"] == "medusa" and not by_spec[str(out)]["works"]
    assert f"foretoken import {out}" in by_spec[str(out)]["why"]


def test_the_target_is_no_draft_model_of_its_own(run: Any, target: str, few: None) -> None:
    by_spec = rows_by_spec(run("drafters", target, str(Path(target).parent), "--json"))
    assert not [spec for spec in by_spec if target in spec]


@pytest.mark.parametrize("name", ["empty", "a,b"])
def test_places_of_which_nothing_can_be_made(
    run: Any, target: str, tokenizer: Any, tmp_path: Path, few: None, name: str
) -> None:
    place = tmp_path / name
    place.mkdir() if name == "empty" else save_model(place, tokenizer)
    row = rows_by_spec(run("drafters", target, str(place), "--json"), place)[str(place)]
    assert not row["works"] and ("contains no" in row["why"] or "comma" in row["why"])


def test_a_table_of_80_columns(run: Any, target: str, draft: str, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("drafters", target, draft)
    assert result.code == 0
    *lines, last = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "does not work" in result.out and "medusa" in result.out
    assert last == "drafter=auto means here: ngram"


def test_a_long_spec_is_whole_on_a_line_of_its_own(
    run: Any, target: str, tokenizer: Any, tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    place = save_model(tmp_path / ("a draft model whose folder has a very long name " * 2), tokenizer)
    lines = run("drafters", target, str(place)).out.splitlines()
    at = lines.index(f" model:{place}")
    assert lines[at + 1].startswith("     ") and lines[at + 1].strip()  # why
    assert not [line for line in lines if line.startswith(" model:") and line != f" model:{place}"]


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("./no/such/target",), ("no/such/target", "not a folder")),
        (("builtin", "./no/such/folder"), ("no such folder or file: no/such/folder",)),
        (("builtin", "--verifier", "nosuch"), ("unknown verifier 'nosuch'", "traversal")),
        (("builtin", "--measure"), ("foretoken tune builtin --minutes",)),
        (("builtin", "./heads", "--measure"), ("foretoken tune builtin --draft ./heads --minutes",)),
    ],
)
def test_wrong_arguments_are_one_line(run: Any, few: None, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run("drafters", *arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    for word in words:
        assert word in result.err
