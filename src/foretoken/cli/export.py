"""``foretoken export`` and ``foretoken import``: drafters in the layouts of other projects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.options import Json
from foretoken.cli.output import json_only, print_json
from foretoken.formats.catalogue import ENGINES, methods, names

Out = Annotated[Path, typer.Option(help="New folder; it appears whole or not at all.")]
Target = Annotated[str, typer.Option(help="The model it belongs to: builtin, a folder or a Hugging Face id.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier drafter at --out.")]


def export_command(
    drafter: Annotated[str, typer.Argument(help=f"METHOD[:FOLDER] with METHOD one of {', '.join(methods())}.")],
    out: Out,
    format: Annotated[str | None, typer.Option(help=f"{', '.join(names())}; by default the usual one.")] = None,
    target: Target = "builtin",
    engine: Annotated[
        str | None, typer.Option(help=f"Refuse what it cannot load, and print how to start it: {', '.join(ENGINES)}.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a drafter in a layout that vLLM, SGLang, Hugging Face and others load."""
    with json_only(as_json):
        from foretoken.formats import export_drafter

        report = export_drafter(drafter, out, format, target, engine, force)
    _show(report, as_json, f"{report['method']} in the format {report['format']}")
    if report["ready"] and not as_json:
        typer.echo(f"{engine}: {report['ready']}")


def import_command(
    source: Annotated[Path, typer.Argument(help="Folder (or JSON file) in a public layout.")],
    out: Out,
    target: Target = "builtin",
    method: Annotated[str, typer.Option(help=f"auto, {', '.join(methods())}.")] = "auto",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Read a drafter that another project trained, check it against its target, and keep it as one of ours."""
    with json_only(as_json):
        from foretoken.formats import import_drafter

        report = import_drafter(source, out, target, method, force)
    _show(report, as_json, f"{report['method']} from the format {report['format']}")
    if not as_json:
        typer.echo(f"use it with --drafter {report['drafter']}")


def _show(report: Mapping[str, Any], as_json: bool, what: str) -> None:
    for warning in report["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json(dict(report))
    else:
        typer.echo(f"{what}: {len(report['files'])} files, {report['bytes'] / 1e6:.1f} MB -> {report['out']}")
