"""What ``make release`` decides: is a tree ready, which Pythons are here, what does the list of contents say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RELEASE = run_path(str(ROOT / ".ci" / "release.py"))
HERE = "{}.{}".format(*sys.version_info)
Change = Callable[[Path], object]


def git(root: Path, *words: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *settings, *words], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that is ready to be released as 1.2.3."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "foretoken"\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("title: a\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3 (2026-12-01)\n\n* A change.\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "ready")
    return tmp_path


def test_a_tree_that_is_ready(tree: Path) -> None:
    assert RELEASE["not_ready"](tree) == []


def rewrite(name: str, old: str, new: str) -> Change:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))
        git(root, "commit", "-qam", "changed")

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite("CHANGELOG.md", " (2026-12-01)", ""), "no dated part '## 1.2.3"),
        (rewrite("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n* More.\n"), "changes under 'Unreleased'"),
        (rewrite("CITATION.cff", "1.2.3", "1.2.2"), "CITATION.cff names another version than 1.2.3"),
        (lambda root: (root / "new.py").write_text("1"), "changes that are not committed"),
        (lambda root: git(root, "tag", "v1.2.3"), "the tag v1.2.3 exists"),
    ],
)
def test_what_is_not_ready_is_said(tree: Path, change: Change, words: str) -> None:
    change(tree)
    (line,) = RELEASE["not_ready"](tree)
    assert words in line


def test_missing_pythons_are_named_and_unsupported_ones_are_not() -> None:
    pythons, missing = RELEASE["pythons"](("3.1", HERE, "3.99"), f">={HERE}")
    assert list(pythons) == [HERE] and missing == ["3.99"]


def test_an_interpreter_that_says_another_version_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = tmp_path / "python3.99"
    liar.write_text("#!/bin/sh\necho 3.98\n")
    liar.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    assert RELEASE["interpreter"]("3.99") is None
    liar.write_text("#!/bin/sh\necho 3.99\n")
    assert RELEASE["interpreter"]("3.99") == str(liar)


def test_weights_are_listed_with_their_checksums(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "model.safetensors").write_bytes(b"weights")
    (entry,) = RELEASE["weights"](tmp_path, ROOT)
    checksum = subprocess.run(["sha256sum", tmp_path / "target" / "model.safetensors"], capture_output=True, text=True)
    assert entry["name"] == "target/model.safetensors" and entry["type"] == "machine-learning-model"
    assert entry["hashes"] == [{"alg": "SHA-256", "content": checksum.stdout.split()[0]}]


@pytest.mark.parametrize("place", ["components", "metadata"])
def test_the_package_depends_on_its_weights(place: str) -> None:
    package = {"name": "foretoken", "bom-ref": "us"}
    bom: dict[str, Any] = {"dependencies": [{"ref": "torch"}, {"ref": "us", "dependsOn": ["torch"]}], "components": []}
    bom[place] = [package] if place == "components" else {"component": package}
    result = RELEASE["with_weights"](bom, [{"bom-ref": "weights:a", "name": "a"}])
    assert result["dependencies"] == [{"ref": "torch"}, {"ref": "us", "dependsOn": ["torch", "weights:a"]}]
    assert result["components"][-1]["name"] == "a"
    with pytest.raises(ValueError, match="does not name foretoken"):
        RELEASE["with_weights"]({"components": [{"name": "torch", "bom-ref": "torch"}]}, [])


def test_a_tree_that_is_not_ready_is_not_built(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    main = RELEASE["main"]
    monkeypatch.setitem(main.__globals__, "not_ready", lambda root: ["something"])
    monkeypatch.setitem(main.__globals__, "build", None)
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("not ready: something\n")
