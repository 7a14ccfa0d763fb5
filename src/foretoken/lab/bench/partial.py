"""The file beside ``--out`` for resuming an interrupted benchmark: a header, then one result per line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.core.io.finite import finite
from foretoken.core.io.journal import append, open_locked, rows_of
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


def kept_in(file: Path, cut: bool = False) -> tuple[dict[Key, UnitResult], dict[str, Any]]:
    """Results and notes of an unfinished run, its ``config`` among them, as :func:`~foretoken.core.io.journal.rows_of`
    reads them; none in an empty file.  Raises ``ValueError`` if it is damaged."""
    parts = rows_of(file, _part, "the file is damaged: delete it to start anew", cut)
    results = {part.key: part for part in parts if isinstance(part, UnitResult)}
    notes = [part for part in parts if not isinstance(part, UnitResult)]
    return results, {name: value for note in notes for name, value in note.items()}


def _part(row: Any) -> UnitResult | dict[str, Any]:
    if "result" in row:
        return UnitResult(**row["result"])
    return dict(row["note"]) if "note" in row else {"config": dict(row["config"])}


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
        check_run_out(out, resume)
        self._file = open_locked(self.path)
        try:
            self.results, self.notes = kept_in(self.path, cut=True)
            if "config" not in self.notes:
                self._append({"config": config})
                return
            stored, now = self.notes["config"], json.loads(dumps(config))
            differing = sorted(key for key in {*stored, *now} if stored.get(key) != now.get(key))
            if differing:
                names = ", ".join(differing)
                raise ValueError(
                    f"{self.path} was made with other settings ({names}): give the same ones, or delete it"
                )
        except BaseException:
            self.close()
            raise

    def _append(self, row: Mapping[str, Any]) -> None:
        append(self._file, finite(row))

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
