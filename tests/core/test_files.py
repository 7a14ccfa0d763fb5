"""Files and folders appear whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from foretoken.cli.output import check_out, place_of
from foretoken.core.io.files import (
    checksum,
    remove_abandoned,
    replacing,
    save_described,
    save_model,
    write_json,
    write_text,
)
from foretoken.core.io.streams import is_stream


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_are_written(tmp_path: Path) -> None:
    assert write_text(tmp_path / "c.txt", "é").read_text(encoding="utf-8") == "é"
    assert json.loads(write_json(tmp_path / "a/d.json", {"x": [1]}).read_text()) == {"x": [1]}
    assert names(tmp_path) == {"a", "c.txt"} and names(tmp_path / "a") == {"d.json"}
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "none/c.txt", "a wrong path is said, not made")


def test_pipes_and_open_files_are_written_to_and_stay(tmp_path: Path) -> None:
    """As ``--out /dev/null`` and ``--out /dev/stdout``, which root could replace by files."""
    pipe, log, link = tmp_path / "pipe", tmp_path / "log", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through it")
        assert os.read(reader, 100) == b"through it" and pipe.is_fifo()
    finally:
        os.close(reader)
    with log.open("w") as opened:
        opened.write("before, ")
        opened.flush()
        link.symlink_to(f"/proc/self/fd/{opened.fileno()}")
        write_text(link, "after")
        check_out(link)
        assert link.is_symlink() and log.read_text() == "before, after"
    assert names(tmp_path) == {"pipe", "log", "link"}
    assert is_stream(os.devnull) and is_stream("/dev/stdout") and not is_stream(log) and not is_stream(tmp_path)
    check_out(Path(os.devnull))  # also for who may not write beside it
    assert place_of(Path(os.devnull), True, lambda text: False) == Path(os.devnull)
    write_text(tmp_path / "alias", "old")
    (tmp_path / "other").symlink_to(tmp_path / "alias")
    assert not is_stream(tmp_path / "other")


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("folder", [False, True])
def test_what_is_broken_off_leaves_what_was_there(folder: bool, raised: BaseException, tmp_path: Path) -> None:
    place = tmp_path / "place"
    for text in ("old", "new"):
        with replacing(place) as draft:
            draft.mkdir() if folder else None
            (draft / "x" if folder else draft).write_text(text)
    with pytest.raises(type(raised)), replacing(place) as draft:
        draft.mkdir() if folder else None
        (draft / "y" if folder else draft).write_text("half")
        raise raised
    assert names(tmp_path) == {"place"} and (place / "x" if folder else place).read_text() == "new"
    assert not folder or names(place) == {"x"}


def test_an_old_folder_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place/x").write_text("old")

    def fails(self: Path, other: Path) -> Path:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(Path, "replace", fails)
        with replacing(tmp_path / "place") as draft:
            draft.mkdir()
    assert names(tmp_path) == {"place"} and (tmp_path / "place/x").read_text() == "old"


@pytest.mark.skipif(os.name != "posix", reason="on Windows no process is asked whether it runs")
def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Not what a process that runs is writing, one of another machine perhaps, nor files of others."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = {f".tmp-{os.getpid()}-a", ".tmp-model", ".tmp-name-b", f"{ended.pid}-c", f".tmp-{ended.pid}-fresh"}
    left = {f".tmp-{ended.pid}-a", f".tmp-{10**20}-b"}
    for name in kept | left:
        (tmp_path / name).write_text("half")
        if "fresh" not in name:
            os.utime(tmp_path / name, (0, 0))
    (tmp_path / f".tmp-{ended.pid}-folder").mkdir()
    (tmp_path / f".tmp-{ended.pid}-folder/x").write_text("half")
    os.utime(tmp_path / f".tmp-{ended.pid}-folder", (0, 0))
    remove_abandoned(tmp_path, tmp_path / "none")
    assert names(tmp_path) == kept


class Saved:
    """Writes the files and folders of a model or a tokenizer."""

    def __init__(self, **files: str) -> None:
        self.files = files

    def save_pretrained(self, folder: Path) -> None:
        for name, text in self.files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def test_a_model_with_several_chat_templates_is_saved_again(tmp_path: Path) -> None:
    save_model(Saved(config="old"), Saved(templates__a="old", templates__b="old"), tmp_path)
    save_model(Saved(config="new"), Saved(templates__a="new"), tmp_path)
    assert names(tmp_path) == {"config", "templates"} and names(tmp_path / "templates") == {"a"}
    assert (tmp_path / "config").read_text() == (tmp_path / "templates/a").read_text() == "new"


def test_a_draft_that_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    with replacing(tmp_path / "place") as draft:
        draft.touch()
        leftover = draft
    (tmp_path / "place").unlink()
    (leftover / "deep").mkdir(parents=True)
    with replacing(tmp_path / "place") as draft:
        draft.mkdir()
    assert names(tmp_path) == {"place"} and names(tmp_path / "place") == set()


def test_a_tensor_file_that_cannot_be_written_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write .*w\.safetensors: .*No space"):  # noqa: SIM117
        with replacing(tmp_path / "w.safetensors"):
            raise SafetensorError("I/O error: No space left on device")


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as error, replacing(tmp_path / "place"):
        raise OSError(28, "No space left on device")  # as a write does, which knows no name
    assert error.value.filename == str(tmp_path / "place")


def test_weights_and_what_describes_them(tmp_path: Path) -> None:
    save_described(tmp_path, ("w.safetensors", {"a": torch.ones(2)}), ("about.json", {"b": 1}))
    assert names(tmp_path) == {"w.safetensors", "about.json"}
    assert torch.equal(load_file(tmp_path / "w.safetensors")["a"], torch.ones(2))
    modes = {(tmp_path / name).stat().st_mode for name in names(tmp_path)}
    assert len(modes) == 1, "who may read one may read the other"


def test_checksums() -> None:
    assert checksum("a") == checksum(b"a") != checksum("b")
    assert len(checksum("a", 4)) == 8
