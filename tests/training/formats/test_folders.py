"""A folder appears whole or not at all, and nothing of the user's is replaced by mistake."""

from __future__ import annotations

import shutil
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
    (out / "foretoken.json").write_text("{}")
    (out / "config.json").write_text("old")

    def refuses(self: Path, to: Any) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", refuses)
    with pytest.raises(OSError, match="Input/output"), new_folder(out, force=True) as folder:
        (folder / "config.json").write_text("new")
    assert names(tmp_path) == {"out"} and (out / "config.json").read_text() == "old"


def test_force_leaves_models_and_files_of_others(target: Path, tmp_path: Path) -> None:
    """A whole model is no drafter, and a drafter's folder with a file of the user's is not only a drafter's."""
    drafter = save_net("medusa", tmp_path / "mine", target)
    model = tmp_path / "model"
    shutil.copytree(target, model)
    (tmp_path / "noted").mkdir()
    for name in ("foretoken.json", "my_notes.txt"):
        (tmp_path / "noted" / name).write_text("{}")
    for out, words in ((model, "does not contain a drafter"), (tmp_path / "noted", "my_notes.txt, which is not a dra")):
        before = names(out)
        with pytest.raises(ValueError, match=words):
            export_drafter(f"medusa:{drafter}", out, "vllm", target, force=True)
        assert names(out) == before


@pytest.mark.parametrize("method", ["medusa", "uno"])
def test_force_replaces_exports_imports_and_trained_drafters(method: str, target: Path, tmp_path: Path) -> None:
    drafter = save_net(method, tmp_path / "mine", target)
    trained = save_net(method, tmp_path / "trained", target)
    for name in ("README.md", "training.json", "losses.csv", "losses.png"):
        (trained / name).write_text("{}")
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    for _ in range(2):
        export_drafter(f"{method}:{drafter}", theirs, None, target, force=True)
        import_drafter(theirs, back, target, force=True)
    import_drafter(theirs, trained, target, force=True)
    assert names(trained) == names(back) == {"drafter.json", "model.safetensors"}


def test_force_replaces_exported_models_and_layers(target: Path, other_target: Path, tmp_path: Path) -> None:
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    for drafter in (f"model:{other_target}", "early_exit,layer=2", "layer_skip,attention=1,mlp=1"):
        for _ in range(2):
            export_drafter(drafter, theirs, None, target, force=True)
            import_drafter(theirs, back, target, force=True)


def test_the_folder_of_a_target_file_is_never_replaced(target: Path, tmp_path: Path) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    for folder in ("theirs", "model"):
        export_drafter(f"medusa:{drafter}", tmp_path / folder, "vllm", target)
    file = tmp_path / "model" / "target.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is the source: --out must be another folder"):
        import_drafter(tmp_path / "theirs", tmp_path / "model", file, force=True)
    assert file.read_bytes() == b"GGUF"


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


def test_folders_inside_can_be_entered(tmp_path: Path) -> None:
    """A tokenizer with several chat templates writes ``additional_chat_templates/``."""
    with new_folder(tmp_path / "out") as draft:
        (draft / "inside").mkdir(0o700)
        (draft / "inside" / "file").touch(0o600)
    inside = tmp_path / "out" / "inside"
    assert (inside.stat().st_mode & 0o777, (inside / "file").stat().st_mode & 0o777) == (0o755, 0o644)
