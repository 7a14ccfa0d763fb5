"""The file beside ``--out`` for resuming an interrupted benchmark: a header, then one result per line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from foretoken.core.io.files import write_text
from foretoken.core.io.locks import lock
from foretoken.lab.bench.results import Key, UnitResult, dumps


def partial_of(out: Path) -> Path:
    """Path of the unfinished run."""
    return out.with_name(out.name + ".partial")


def _holds(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def check_run_out(out: Path, resume: bool) -> bool:
    """Whether an unfinished run exists.  Raises ``ValueError``, before a slow load, for an ``out`` that cannot be
    written, an unfinished run without ``resume``, or a finished one to resume."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder: --out needs a file name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out cannot be written: the folder {out.absolute().parent} does not exist")
    unfinished = _holds(partial_of(out))
    if unfinished and not resume:
        raise ValueError(
            f"{partial_of(out)} contains an unfinished run: add --resume to continue it, or delete it to start anew"
        )
    if resume and not unfinished and _holds(out):
        raise ValueError(f"{out} is finished, there is nothing to resume: leave --resume out to run it again")
    return unfinished


class Partial:
    """Finished results of a run, appended as they arrive.

    Raises ``ValueError`` for an unfinished run without ``resume``, with another configuration, damaged, or still
    running.

    Args:
        out: path of the complete run; this file is ``OUT.partial``.
        config: everything that determines the run; only an equal one is resumed.
    """

    def __init__(self, out: Path, config: Mapping[str, Any], resume: bool) -> None:
        self.out, self.path = out, partial_of(out)
        self.results: dict[Key, UnitResult] = {}
        self.notes: dict[str, Any] = {}
        unfinished = check_run_out(out, resume)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        try:
            lock(self._file.fileno(), self.path)  # two runs would mix their lines
            if unfinished:
                self._read(json.loads(dumps(config)))
            if not unfinished or self.path.stat().st_size == 0:
                self._append({"config": config})
        except BaseException:
            self.close()
            raise

    def _read(self, config: Mapping[str, Any]) -> None:
        whole, _, half = self.path.read_bytes().rpartition(b"\n")
        try:
            rows = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
            stored = rows[0]["config"] if rows else config
            results = [UnitResult(**row["result"]) for row in rows[1:] if "result" in row]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): delete it to start anew") from None
        differing = sorted(key for key in {*stored, *config} if stored.get(key) != config.get(key))
        if differing:
            raise ValueError(
                f"{self.path} was made with other settings ({', '.join(differing)}): give the same ones, or delete it"
            )
        self.results = {result.key: result for result in results}
        for row in rows[1:]:
            self.notes |= row.get("note", {})
        if half or not rows:  # a partial line from a killed run is redone
            with self.path.open("rb+") as file:
                file.truncate(len(whole) + 1 if rows else 0)

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(dumps(row) + "\n")
        self._file.flush()

    def add(self, result: UnitResult) -> None:
        """Store a finished result."""
        self.results[result.key] = result
        self._append({"result": vars(result)})

    def note(self, name: str, value: Any) -> None:
        """Store another value that a resumed run needs."""
        self.notes[name] = value
        self._append({"note": {name: value}})

    def finish(self, lines: list[str]) -> None:
        """Write the complete run and delete the partial file."""
        write_text(self.out, "".join(line + "\n" for line in lines))
        self.close()
        self.path.unlink()

    def close(self) -> None:
        """Close the file and keep it."""
        self._file.close()
