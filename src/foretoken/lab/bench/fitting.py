"""Drafters that work for a target, from the registry and from folders, determined by building them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.core.io.checkpoints import ADAPTER_CONFIG
from foretoken.core.io.drafter_folders import OURS as CONFIG
from foretoken.core.io.hub_ids import expanded
from foretoken.core.values import one_line
from foretoken.lab.workload import REFUSALS, Subject
from foretoken.methods.drafters.datastore import holds_arrays
from foretoken.registry import Row, find, installed_rows, rows
from foretoken.training.formats.catalogue import LAYOUTS
from foretoken.training.formats.folders import Found

OnProgress = Callable[[int, int, str], None]


def refusal(subject: Subject, spec: str) -> str | None:
    """One-line reason why a drafter cannot be used here; ``None`` if it can."""
    try:
        subject.llm(subject.drafter(spec))
    except REFUSALS as error:
        return one_line(error)
    return None


def _is_from(subject: Subject, path: Path) -> bool:
    """Whether the target was loaded from this path."""
    source = subject.source
    return isinstance(source, str | Path) and expanded(source).resolve() == path.resolve()


@dataclass(frozen=True)
class Fit:
    """A drafter, and whether it works for a target.

    Attributes:
        name: registry name; empty if unknown.
        spec: value for ``--drafter``, or the folder or file that no drafter can be built from.
        works: whether it can be built and run.
        why: its requirement that is met, or the reason for the refusal.
        only_for: the kind of requests that it serves, if not all.
    """

    name: str
    spec: str
    works: bool
    why: str
    only_for: str = ""

    @property
    def public(self) -> dict[str, Any]:
        """Fields of ``foretoken drafters --json``; ``gain`` is left to ``foretoken tune``."""
        return {"name": self.name, "spec": self.spec, "works": self.works, "why": self.why, "gain": None}


def fits(
    subject: Subject, folders: Sequence[Path] = (), on_progress: OnProgress = lambda done, total, text: None
) -> list[Fit]:
    """All drafters for a target: those of the registry, of installed packages, and in files, folders and subfolders.

    Calls ``on_progress`` with (done, total, next item).  Raises ``ValueError`` for a path that does not exist.
    """
    candidates = [path for folder in folders for path in candidates_in(folder) if not _is_from(subject, path)]
    catalogue = [*rows("drafter"), *installed_rows()]
    total = len(catalogue) + len(candidates)
    fitting: list[Fit] = []
    for number, row in enumerate(catalogue):
        on_progress(number, total, row.name)
        fitting.append(of_target(row, subject))
    for number, path in enumerate(candidates, len(catalogue)):
        on_progress(number, total, str(path))
        fitting += fits_of(path, subject)
    return fitting


def ordered(fitting: Sequence[Fit]) -> list[Fit]:
    """Drafters for every request first, then those for some requests, then those that do not work."""
    return sorted(fitting, key=lambda fit: (not fit.works, bool(fit.only_for)))


def of_target(row: Row, subject: Subject) -> Fit:
    """The fit of a registry row without a path: its example, or its bare name with the target's defaults."""
    spec, reason = row.name, None
    for spec in dict.fromkeys((row.example, row.name)):
        reason = refusal(subject, spec)
        if reason is None:
            break
    return _fit(row, spec, reason)


def _fit(row: Row, spec: str, reason: str | None) -> Fit:
    try:
        only_for: str = row.load().traits.only_for
    except ValueError:  # an entry point that cannot be imported
        only_for = ""
    has = f"has {row.needs}" if row.needs else "needs nothing beyond the target"
    explanation = reason or (f"only for {only_for}" if only_for else has)
    return Fit(row.name, spec, reason is None, explanation, only_for)


def candidates_in(path: Path) -> list[Path]:
    """The paths to draft with, in a folder and one level below, or the file itself.  Raises ``ValueError`` for a path
    that does not exist."""
    path = expanded(path)
    if not path.exists():
        raise ValueError(f"no such folder or file: {path}")
    inside = [entry for entry in sorted(path.iterdir()) if _is_something(entry)] if path.is_dir() else []
    return [path, *inside] if not inside or _is_something(path) else inside


def _is_something(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).exists() for name in (CONFIG, "config.json", ADAPTER_CONFIG))
    return path.suffix == ".gguf" or holds_arrays(path)


def fits_of(path: Path, subject: Subject) -> list[Fit]:
    """Drafters from a folder or file, or the reason why there are none."""
    if set(",()|") & set(str(path)):
        return [
            Fit(
                "", str(path), False, "its path has a comma, a bar or a parenthesis, which a spec string cannot contain"
            )
        ]
    if (path / CONFIG).exists():
        return [_trained(path, subject)]
    if not path.is_dir():
        return _first_that_works(path, subject) if path.suffix == ".gguf" else _of_file(path, subject)
    if not _is_something(path):
        return [Fit("", str(path), False, "it contains no model, trained drafter, datastore or GGUF file")]
    foreign = _foreign(path)
    return _first_that_works(path, subject) if foreign is None else [foreign]


def offered(path: Path) -> str | None:
    """The likely spec of a folder or file, without loading it; ``None`` if there is none."""
    if set(",()|") & set(str(path)):
        return None
    if (path / CONFIG).exists():
        try:
            return f"{find('drafter', _method_of(path)).name}:{path}"
        except ValueError:
            return None
    if path.is_dir():
        return f"model:{path}" if _is_something(path) and _foreign(path) is None else None
    return f"model:{path}" if path.suffix == ".gguf" else f"retrieval:{path}" if holds_arrays(path) else None


def _method_of(folder: Path) -> str:
    """The method in the configuration that ``foretoken train`` or ``import`` wrote."""
    try:
        return str(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["method"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder / CONFIG} is damaged: copy the folder again") from None


def _trained(folder: Path, subject: Subject) -> Fit:
    """A drafter that ``foretoken train`` or ``import`` wrote; its configuration names the method."""
    try:
        method = _method_of(folder)
    except ValueError as error:
        return Fit("", str(folder), False, str(error))
    try:
        row = find("drafter", method)
    except ValueError:
        role = next((row.role for row in rows() if row.name == method), None)
        reason = f"it belongs to the {role} {method!r}" if role else f"it was trained as {method!r}, which is unknown"
        return Fit(method, str(folder), False, reason)
    return _tried(row, folder, subject)


def _foreign(folder: Path) -> Fit | None:
    """A trained drafter in another project's layout; ``None`` for anything else."""
    try:
        source = Found(folder)
        for layout in LAYOUTS:
            if find("drafter", layout.method).needs_training and layout.load().recognises(source):
                reason = f"it is in the layout of {layout.summary}: foretoken import {folder} --out FOLDER first"
                return Fit(layout.method, str(folder), False, reason)
    except REFUSALS:
        return None  # damaged: reading it as a model reports the damage
    return None


def _first_that_works(path: Path, subject: Subject) -> list[Fit]:
    """Drafters that use a language model.

    Rows that ask the same of a draft model are tried together, until some work: a draft model with the target's own
    tokenizer needs no translation.  Only the first refusal of a group is kept.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows("drafter"):
        if row.reads == "model":
            groups.setdefault(row.draft_model, []).append(row)
    refused: list[Fit] = []
    for group in groups.values():
        attempts = [_tried(row, path, subject) for row in group]
        working = [fit for fit in attempts if fit.works]
        if working:
            return [*working, *refused]
        refused += attempts[:1]
    return refused[:1]


def _tried(row: Row, path: Path, subject: Subject) -> Fit:
    spec = f"{row.name}:{path}"
    fit = _fit(row, spec, refusal(subject, spec))
    gc.collect()  # frees the reference cycle of a model and its lean forward before the next weights are read
    return fit


def _of_file(path: Path, subject: Subject) -> list[Fit]:
    """All drafters that read the file."""
    able = [row for row in rows("drafter") if not (row.needs_training or row.reads == "model")]
    attempts = [_tried(row, path, subject) for row in able]
    working = [fit for fit in attempts if fit.works]
    readers = [fit for fit, row in zip(attempts, able, strict=True) if row.reads == "datastore"]
    return working or [replace(fit, name="", spec=str(path)) for fit in readers[:1]]
