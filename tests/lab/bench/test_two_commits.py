"""Two commits in turns: a slower one and one that writes something else are told, and what is not a commit is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from runpy import run_path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
PACKAGE = """
import time
from types import SimpleNamespace
__version__ = "0"
print("a library may print")
class Llm:
    def __init__(self, wait, shift):
        self.wait, self.shift = wait, shift
    @property
    def plain(self):
        return Llm(WAIT, 0)
    def generate(self, prompts, max_new_tokens, seed, temperature, top_k, top_p):
        time.sleep(self.wait)
        ids = [int(10 * temperature) + top_k + own + self.shift for own in seed]
        return [SimpleNamespace(token_ids=[first + len(text)] * max_new_tokens) for first, text in zip(ids, prompts)]
def load(model, drafter, **options):
    return Llm(DRAFTED, SHIFT)
"""
"""A package with a front door like ours."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Commits ``first``, ``slower`` and ``other``."""
    root = tmp_path / "repository"
    (root / "src" / "foretoken").mkdir(parents=True)
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name, drafted, shift in (("first", 0.003, 0), ("slower", 0.02, 0), ("other", 0.003, 1)):
        text = PACKAGE.replace("WAIT, 0", "0.003, 0").replace("DRAFTED", str(drafted)).replace("SHIFT", str(shift))
        (root / "src" / "foretoken" / "__init__.py").write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        subprocess.run([*git, "tag", name], check=True)
    return root


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Callable[..., int]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = run_path(str(FOLDER / "two_commits.py"))
    few = ("--prompts", "3", "--new-tokens", "2", "--repeat", "2")
    return lambda *arguments: names["main"]([*arguments, *few], repository)


def worktrees(repository: Path) -> Sequence[str]:
    listing = subprocess.run(["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True)
    return listing.stdout.splitlines()


def test_the_same_commit_is_as_fast_and_writes_the_same(main: Callable[..., int], repository: Path) -> None:
    out = repository / "out.json"
    assert main("first", "first", "--fail-below", "0.3", "--out", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["before"] == report["after"] and len(report["before"]) == 40
    assert {row["same_texts"] for row in report["arms"].values()} == {3}
    low, high = report["arms"]["plain"]["ratio_ci95"]
    assert low <= report["arms"]["plain"]["ratio"] <= high
    assert len(worktrees(repository)) == 1  # nothing is left behind


def test_requests_are_sampled_together(main: Callable[..., int], repository: Path) -> None:
    out = repository / "out.json"
    assert main("first", "first", "--temperature", "1", "--top-k", "5", "--together", "4", "--out", str(out)) == 0
    settings = json.loads(out.read_text())["asked"]
    assert (settings["temperature"], settings["top_k"], settings["top_p"], settings["together"]) == (1.0, 5, 1.0, 4)


def test_a_slower_commit_fails(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """It sleeps seven times as long; plain decoding, which does not, is not blamed."""
    assert main("first", "slower", "--fail-below", "0.5") == 1
    captured = capsys.readouterr()
    assert "drafter: 0." in captured.err and "plain:" not in captured.err and "3 of 3 texts the same" in captured.out
    assert main("slower", "first", "--fail-below", "0.5") == 0


def test_other_texts_fail(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("first", "other") == 1
    assert capsys.readouterr().err == "drafter: 3 of 3 texts differ\n"
    assert main("first", "other", "--texts-may-differ") == 0


def test_what_is_no_commit_is_one_line(
    main: Callable[..., int], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("first", "none") == 2
    assert capsys.readouterr().err == "error: no such commit: none\n"
    assert len(worktrees(repository)) == 1
