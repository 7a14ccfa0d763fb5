"""A folder appears whole or not at all, and nothing of the user's is replaced by mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from tiny_nets import same_drafter, save_net

from foretoken.training.formats import export_drafter, import_drafter
from foretoken.training.formats.folders import new_folder


def names(folder: Path) -> set[str]:
    """Everything in it, hidden files too."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), OSError)],
)
@pytest.mark.parametrize("place", ["write_tensors", "write_json"])
def test_a_broken_export_leaves_nothing(
    place: str, raised: BaseException, seen: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)

    def broken(file: Path, _: Any) -> None:
        file.write_bytes(b"half")
        raise raised

    monkeypatch.setattr(f"foretoken.training.formats.base.{place}", broken)
    with pytest.raises(seen):
        export_drafter(f"medusa:{drafter}", tmp_path / "out", "vllm", target)
    assert names(tmp_path) == {"mine"}


def test_a_broken_export_leaves_what_was_there(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    export_drafter(f"medusa:{drafter}", tmp_path / "out", "vllm", target)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"cannot write .*out: .*No space left"):
        patch.setattr("foretoken.training.formats.base.write_tensors", full)
        export_drafter(f"medusa:{drafter}", tmp_path / "out", "original", target, force=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert names(tmp_path) == {"mine", "out"}
    export_drafter(f"medusa:{drafter}", tmp_path / "out", "original", target, force=True)
    assert names(tmp_path / "out") == {"config.json", "foretoken.json", "medusa_lm_head.safetensors"}
    assert names(tmp_path) == {"mine", "out"}


def test_a_broken_import_leaves_nothing(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    export_drafter(f"medusa:{drafter}", tmp_path / "theirs", "vllm", target)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("foretoken.training.formats.transfer.build_drafter", interrupted)
        import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert names(tmp_path) == {"mine", "theirs"}
    import_drafter(tmp_path / "theirs", tmp_path / "deep" / "back", target)
    assert same_drafter(drafter, tmp_path / "deep" / "back")


def test_a_failed_rename_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")

    def refuses(self: Path, to: Any) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", refuses)
    with pytest.raises(OSError, match="Input/output"), new_folder(out, force=True) as folder:
        (folder / "config.json").write_text("new")
    assert names(tmp_path) == {"out"} and (out / "config.json").read_text() == "old"


def test_what_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    photos, nested = tmp_path / "photos", tmp_path / "nested"
    (nested / "sub").mkdir(parents=True)
    photos.mkdir()
    (photos / "cat.png").write_text("x")
    (nested / "config.json").write_text("{}")
    for out, force, words in (
        (tmp_path / "file", True, "is a file"),
        (photos, False, "is not empty: give another --out, or --force"),
        (photos, True, "does not contain a drafter"),
        (nested, True, "does not contain a drafter"),
    ):
        with pytest.raises(ValueError, match=words), new_folder(out, force):
            pass
    for source in (photos, photos / "below"):
        with pytest.raises(ValueError, match="is the source"), new_folder(photos, True, [source]):
            pass
    with new_folder(tmp_path / "empty") as folder:
        (folder / "x").write_text("x")
    assert names(tmp_path / "empty") == {"x"} and (photos / "cat.png").exists()
    assert names(tmp_path) == {"file", "empty", "photos", "nested"}


def test_the_drafter_itself_is_never_replaced(target: Path, tmp_path: Path) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    before = {file.name: file.read_bytes() for file in drafter.iterdir()}
    for out in (drafter, target):
        with pytest.raises(ValueError, match="is the source: --out must be another folder"):
            export_drafter(f"medusa:{drafter}", out, "vllm", target, force=True)
    assert {file.name: file.read_bytes() for file in drafter.iterdir()} == before


def test_files_can_be_read_by_a_server_of_another_user(target: Path, tmp_path: Path) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    export_drafter(f"medusa:{drafter}", tmp_path / "out", "vllm", target)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}
