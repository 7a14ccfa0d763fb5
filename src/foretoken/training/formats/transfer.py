"""Export and import: check everything, write to a temporary folder, rename."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.io.hub_ids import expanded
from foretoken.loading import BUILTIN, build_drafter
from foretoken.models.base import LanguageModel
from foretoken.registry import find, parse_spec
from foretoken.training.formats.base import Format, Target
from foretoken.training.formats.catalogue import LAYOUTS, Layout, find_layout, layouts_of, methods
from foretoken.training.formats.engines import ready_line
from foretoken.training.formats.folders import Found, new_folder
from foretoken.training.formats.values import class_of


@dataclass
class Imported:
    """An imported drafter before it is moved to its destination.

    Attributes:
        folder: its temporary folder.
        spec: its spec, with ``{}`` in place of the folder.
        model: its target; ``target`` is the source of that.
        tokenizer: the target's, if it has one.
    """

    source: Path
    folder: Path
    spec: str
    model: LanguageModel
    target: str
    tokenizer: Any


Check = Callable[[Imported], Mapping[str, Any]]
"""Checks a new drafter; returns additions to the report, including ``warnings``, and raises ``ValueError`` to refuse
it."""


def export_drafter(
    drafter: str,
    out: str | Path,
    format: str | None = None,
    target: str | Path = BUILTIN,
    engine: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write a drafter in another project's layout; the folder appears whole or not at all.  Raises ``ValueError`` for
    an unknown name, a drafter for another target, and one that the layout cannot hold.

    Args:
        drafter: spec ``METHOD[:FOLDER]``; for ``early_exit`` and ``layer_skip`` with their options.
        format: name of the layout; by default the engine's or the usual one.
        target: the model that the drafter belongs to (``builtin``, a folder or a hub id).
        engine: ``vllm``, ``sglang`` or ``huggingface``: refuse drafters that it cannot load, and report how to start
            it.

    Returns:
        ``method``, ``format``, ``out``, ``files``, ``bytes``, ``engine``, ``ready`` (options of the engine, or
        ``None``) and ``warnings``.
    """
    spec = parse_spec(drafter)
    layout = find_layout(find("drafter", spec.name).name, format, engine)
    writer = layout.load()
    out_folder = expanded(out)
    with new_folder(out_folder, force, [*writer.inputs(spec, str(target)), *_folder(target)]) as folder:
        opened = Target.open(str(target))
        writer.write_folder(spec, opened, folder)
        refusal = None if engine is None else writer.refusal(engine, folder, opened)
        if refusal is not None:
            raise ValueError(refusal)
        ready = None if engine is None else ready_line(engine, layout.method, out_folder, folder)
        report = _report(layout, out_folder, folder)
    warning = layout.engines.get(engine or "", "")
    return {**report, "engine": engine, "ready": ready, "warnings": [warning] * bool(warning) + writer.warnings}


def import_drafter(
    source: str | Path,
    out: str | Path,
    target: str | Path = BUILTIN,
    method: str = "auto",
    force: bool = False,
    check: Check | None = None,
) -> dict[str, Any]:
    """Read a drafter in a public layout, check it against its target, and write it as ours.  Raises ``ValueError`` for
    an unknown layout, another target, missing, superfluous or misshapen tensors, pickled weights, and if the check
    refuses it.

    Args:
        source: the folder (or, for lists of layers, the JSON file).
        target: the model that the drafter belongs to (``builtin``, a folder or a hub id).
        method: its method; ``auto`` detects it.
        check: runs before the drafter is moved to ``out``, for example
            :class:`foretoken.lab.acceptance.AcceptanceCheck`, which drafts with it.

    Returns:
        ``method``, ``format``, ``out``, ``files``, ``bytes``, ``drafter`` (the spec that loads it), ``warnings``, and
        the check's additions.
    """
    source_files = Found(Path(source))
    layout, reader = _recognise(source_files, method)
    out_folder = expanded(out)
    if set(",()") & set(str(out_folder.absolute())):
        raise ValueError(f"{out_folder} has a comma or a parenthesis in its path, which a spec string cannot contain")
    with new_folder(out_folder, force, [source_files.path, *_folder(target)]) as folder:
        opened = Target.open(str(target))
        spec = reader.read_folder(source_files, opened, folder)
        parts: dict[str, Any] = {"target_source": str(target), "tokenizer": opened.tokenizer}
        build_drafter(spec.format(folder), opened.model, **parts)  # check that it loads
        checked: Mapping[str, Any] = {}
        if check is not None:
            checked = check(
                Imported(source_files.path, folder, spec, opened.model, target=str(target), tokenizer=opened.tokenizer)
            )
        report = _report(layout, out_folder, folder)
    warnings = [*reader.warnings, *checked.get("warnings", ())]
    return {**report, **checked, "drafter": spec.format(out_folder), "warnings": warnings}


def _recognise(source: Found, method: str) -> tuple[Layout, Format]:
    for layout in LAYOUTS if method == "auto" else layouts_of(method):
        reader = layout.load()
        if reader.recognises(source):
            return layout, reader
    if source.path.is_file():
        raise ValueError(f"{source.path} is no list of layers: give the folder of a checkpoint, {source.path.parent}")
    inner, is_drafter = source.inside, any(layout.load().recognises(source) for layout in LAYOUTS)
    if inner is not None and not is_drafter:
        raise ValueError(
            f"{source.path} is not a drafter, but its subfolder {inner.name} holds a drafter: import {inner}"
        )
    if (source.path / "config.json").exists():
        source.check_whole()
    kind = source.config.get("speculators_model_type") or class_of(source.config) or "no config.json"
    names = ", ".join(methods()) if method == "auto" else method
    raise ValueError(f"{source.path} ({kind}) is in no layout that can be imported as {names}: see docs/formats.md")


def _folder(source: str | Path) -> list[Path]:
    """The folder of a target, or of its file; none for a target that is not here."""
    path = expanded(source)
    if str(source) == BUILTIN or not path.exists():
        return []
    return [path if path.is_dir() else path.parent]


def _report(layout: Layout, out: Path, folder: Path) -> dict[str, Any]:
    files = sorted(folder.iterdir())
    return {
        "method": layout.method,
        "format": layout.name,
        "out": str(out),
        "files": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
    }
