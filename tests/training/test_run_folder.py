"""The folder that ``foretoken train`` writes to: one run at a time, nothing of others in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.training.run_folder import run_folder

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
