"""Files of JSON lines that grow by one line at a time, so that a run that was killed can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from foretoken.core.io.locks import lock

T = TypeVar("T")


def open_locked(path: Path) -> IO[bytes]:
    """Open a file for :func:`append`.  Raises ``ValueError`` if another run has it open: their lines would mix."""
    file = path.open("ab", buffering=0)  # what a full disk refused must not be written again when the file is closed
    try:
        lock(file.fileno(), path)
    except BaseException:
        file.close()
        raise
    return file


def append(file: IO[bytes], row: Mapping[str, Any]) -> None:
    """Write one line and sync it to disk.  Raises ``OSError``, with the file's name, if there is no room for it."""
    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    try:
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
    except OSError as error:
        say = f"{error.strerror} (whole lines are kept, and a resumed run goes on after them)"
        raise OSError(error.errno, say, file.name) from None


def rows_of(path: Path, parse: Callable[[Any], T], wrong: str, cut: bool = True) -> list[T]:
    """What ``parse`` makes of the rows of a file, if it exists.  An unfinished last line, which a kill leaves, is left
    out, and with ``cut`` removed from the file.

    Raises ``ValueError``, with the line's number and ``wrong``, for a line that is not JSON or that ``parse`` refuses,
    and for a file that is only part of a line, which may be anyone's.  The file is then unchanged.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:whole].splitlines() or [data] * bool(data), 1):
        try:
            rows.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: {wrong}") from None
    if cut and whole < len(data):
        os.truncate(path, whole)
    return rows if whole else []
