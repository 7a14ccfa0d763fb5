"""The folder that ``foretoken train`` writes to: one run at a time, nothing of others in it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from test_chat_data import chat_tokenizer

from foretoken.cli.main import main
from foretoken.models import wrap
from foretoken.models.forward.parts import TargetParts
from foretoken.training.captured import FeatureStore
from foretoken.training.chat import RowBlocks
from foretoken.training.corpus import build_corpus
from foretoken.training.run_folder import run_folder
from foretoken.training.written import stored_continuations
from toys import llama

KINDS = ("uno", "distill", "boost", "specdec_pp", "lm")


def refused(kind: str, out: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a training into ``out`` ends with."""
    data = folder / "text.txt"
    data.write_text("one two three\n" * 50)
    assert main(["train", kind, "--data", str(data), "--out", str(out), "--steps", "1"]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert captured.out == ""
    return lines[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_folder_holds_is_not_written_over(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "project"
    out.mkdir()
    (out / "README.md").write_text("# mine\n")
    assert "holds README.md and no checkpoint" in refused(kind, out, tmp_path, capsys)
    assert [file.name for file in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "# mine\n"


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_do_not_share_a_folder(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with run_folder(out):
        draft = out / ".tmp-1-target"  # of the run that is going on
        draft.mkdir()
        assert "another run writes to" in refused(kind, out, tmp_path, capsys)
        assert draft.exists()
    with run_folder(out):  # which then was killed
        assert not draft.exists()


@pytest.mark.skipif(os.name != "posix", reason="on Windows no process is asked whether it runs")
@pytest.mark.parametrize("place", ["corpus", "features", "written"])
def test_what_a_killed_run_left_in_a_shared_folder_is_removed(place: str, tmp_path: Path) -> None:
    def left(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".tmp-{10**20}-part"  # no process has such a number
        draft.write_text("half")
        os.utime(draft, (0, 0))
        return draft

    model = wrap(llama(dtype=torch.float32))
    rows = np.zeros((2, 9), np.int64)
    if place == "corpus":
        (tmp_path / "a.txt").write_text("one two three")
        drafts = [left(tmp_path / "corpus")]
        build_corpus([tmp_path / "a.txt"], chat_tokenizer(), tmp_path / "corpus")
    elif place == "features":
        drafts = [left(tmp_path), left(tmp_path / "last")]
        FeatureStore(tmp_path, TargetParts(model), RowBlocks(rows, 2, 0), {})
    else:
        prompts = torch.from_numpy(rows[:, :4])
        stored_continuations(tmp_path, model, prompts, 2, 0.0, 0, writer="x")
        drafts = [left(next(tmp_path.glob("written-*")))]
        stored_continuations(tmp_path, model, prompts, 2, 0.0, 0, writer="x")
    assert not any(draft.exists() for draft in drafts)


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    assert "is a file" in refused("uno", out, tmp_path, capsys)
    assert out.read_text() == "mine"


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_folder(tmp_path / "a" / "out"):
        raise ZeroDivisionError
    assert not (tmp_path / "a" / "out").exists()
    (tmp_path / "empty").mkdir()
    with run_folder(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").exists()  # it was there before
