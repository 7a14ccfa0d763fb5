"""``foretoken datastore build``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken.cli.main import main
from foretoken.loading import ZOO

pytestmark = pytest.mark.skipif(
    not (ZOO / "target" / "tokenizer.json").exists(), reason="the built-in tokenizer is not there"
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "one.py").write_text("def area(width, height):\n    return width * height\n" * 3)
    (folder / "two.jsonl").write_text(json.dumps({"text": "The quick brown fox jumps over the lazy dog."}) + "\n")
    return folder


def test_build_and_use(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "store"
    assert main(["datastore", "build", str(corpus), "--target", "builtin", "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    report: dict[str, Any] = json.loads(printed.out.splitlines()[-1])
    assert report["documents"] == 2 and report["bytes"] == out.stat().st_size and report["out"] == str(out)
    if not (ZOO / "target" / "model.safetensors").exists():
        return
    prompt = "def area(width, height):\n    return width"
    plain = foretoken.load("builtin", drafter=None, dtype="float32").generate(prompt, max_new_tokens=12)
    for spec in (f"retrieval:{out}", f"sam:{out}"):
        llm = foretoken.load("builtin", drafter=spec, dtype="float32", controller="constant")
        drafted = llm.generate(prompt, max_new_tokens=12)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_draft_tokens > 0


def test_the_model_may_come_first(corpus: Path, tmp_path: Path) -> None:
    stores = [tmp_path / name for name in ("one", "two", "three")]
    lines = (["builtin", str(corpus)], [str(ZOO / "target"), str(corpus)], [str(corpus), "--target", "builtin"])
    for words, out in zip(lines, stores, strict=True):
        assert main(["datastore", "build", *words, "--out", str(out)]) == 0
    assert stores[0].read_bytes() == stores[1].read_bytes() == stores[2].read_bytes()


def test_several_texts_are_no_model(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["datastore", "build", str(corpus), str(corpus / "one.py"), "--out", str(tmp_path / "s"), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["documents"] == 3


def test_people_read_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["datastore", "build", str(corpus / "one.py"), "--out", str(tmp_path / "store")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and out[0].startswith("1 documents") and "retrieval:" in out[0]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["datastore", "build", *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "store")]
    assert "no such file or folder" in fails(capsys, str(tmp_path / "missing"), *out)
    assert "is a folder" in fails(capsys, str(corpus), "--out", str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert "no text in" in fails(capsys, str(tmp_path / "empty"), *out)
    (corpus / "three.jsonl").write_text("{not json\n")
    assert "not JSON" in fails(capsys, str(corpus), *out)
    assert not (tmp_path / "store").exists()


def test_an_interrupt_leaves_the_old_file(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    assert main(["datastore", "build", str(corpus), "--out", str(out)]) == 0
    before = out.read_bytes()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.methods.drafters.datastore.suffix_order", interrupt)
    assert main(["datastore", "build", str(corpus / "one.py"), "--out", str(out)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]


def test_without_a_terminal_no_bar_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 20)
    assert main(["datastore", "build", str(text), "--out", str(tmp_path / "store.bin")]) == 0
    assert capsys.readouterr().err == ""
