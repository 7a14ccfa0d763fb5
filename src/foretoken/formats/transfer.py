"""Export and import: check everything, write beside, rename."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretoken.formats.base import Format, Target
from foretoken.formats.catalogue import LAYOUTS, Layout, find_layout, layouts_of, methods
from foretoken.formats.engines import ready_line
from foretoken.formats.folders import Found, new_folder
from foretoken.loading import BUILTIN, build_drafter
from foretoken.registry import find, parse_spec


def export_drafter(
    drafter: str,
    out: str | Path,
    format: str | None = None,
    target: str | Path = BUILTIN,
    engine: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write a drafter in a layout that other projects read; the folder appears whole or not at all.

    Args:
        drafter: spec ``METHOD[:FOLDER]``; for ``early_exit`` and ``layer_skip`` with their options.
        out: a new or an empty folder.
        format: name of the layout; the engine's or the usual one by default.
        target: the model that the drafter belongs to (``builtin``, a folder or a hub id).
        engine: ``vllm``, ``sglang`` or ``huggingface``: refuse what it cannot load, and say how to start it.
        force: replace an earlier drafter at ``out``.

    Returns:
        ``method``, ``format``, ``out``, ``files``, ``bytes``, ``engine``, ``ready`` (what to pass to the engine, or
        ``None``) and ``warnings``.

    Raises:
        ValueError: an unknown name, a drafter for another target, or one that the layout cannot hold.
        OSError: ``out`` cannot be written.
    """
    spec = parse_spec(drafter)
    layout = find_layout(find("drafter", spec.name).name, format, engine)
    writer = layout.load()
    place = Path(out).expanduser()
    with new_folder(place, force, [*writer.inputs(spec, str(target)), *_folder(target)]) as folder:
        writer.write_folder(spec, Target.open(str(target)), folder)
        ready = None if engine is None else ready_line(engine, layout.method, place, folder)
        report = _report(layout, place, folder)
    return {**report, "engine": engine, "ready": ready, "warnings": [*_warnings(layout, engine), *writer.warnings]}


def import_drafter(
    source: str | Path, out: str | Path, target: str | Path = BUILTIN, method: str = "auto", force: bool = False
) -> dict[str, Any]:
    """Read a drafter in a public layout, check it against its target, and write it as ours.

    Args:
        source: the folder (or, for lists of layers, the JSON file).
        out: a new or an empty folder.
        target: the model that the drafter belongs to (``builtin``, a folder or a hub id).
        method: what it is; ``auto`` finds out.
        force: replace an earlier drafter at ``out``.

    Returns:
        ``method``, ``format``, ``out``, ``files``, ``bytes``, ``drafter`` (the spec that loads it) and ``warnings``.

    Raises:
        ValueError: no known layout, another target, missing, superfluous or misshapen tensors, or pickled weights.
        OSError: ``out`` cannot be written.
    """
    found = Found(Path(source))
    layout, reader = _recognise(found, method)
    place = Path(out).expanduser()
    if set(",()") & set(str(place.absolute())):
        raise ValueError(f"{place} has a comma or a parenthesis in its path, which a drafter's spec cannot hold")
    with new_folder(place, force, [found.path, *_folder(target)]) as folder:
        opened = Target.open(str(target))
        spec = reader.read_folder(found, opened, folder)
        parts = {"target_source": str(target), "tokenizer": opened.tokenizer}
        build_drafter(spec.format(folder), opened.model, **parts)  # it loads
        report = _report(layout, place, folder)
    return {**report, "drafter": spec.format(place), "warnings": reader.warnings}


def _recognise(found: Found, method: str) -> tuple[Layout, Format]:
    for layout in LAYOUTS if method == "auto" else layouts_of(method):
        reader = layout.load()
        if reader.recognises(found):
            return layout, reader
    if (found.path / "config.json").exists():
        found.check_whole()
    kind = found.config.get("speculators_model_type") or found.config.get("architectures") or "no config.json"
    kind = kind[0] if isinstance(kind, list) else kind
    wanted = ", ".join(methods()) if method == "auto" else method
    raise ValueError(f"{found.path} ({kind}) is in no layout that can be imported as {wanted}: see docs/formats.md")


def _folder(source: str | Path) -> list[Path]:
    """A target's folder, when it is one."""
    path = Path(source).expanduser()
    return [path] if str(source) != BUILTIN and path.is_dir() else []


def _warnings(layout: Layout, engine: str | None) -> list[str]:
    said = layout.engines.get(engine or "", "")
    return [said] if said else []


def _report(layout: Layout, out: Path, folder: Path) -> dict[str, Any]:
    files = sorted(folder.iterdir())
    return {
        "method": layout.method,
        "format": layout.name,
        "out": str(out),
        "files": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
    }
