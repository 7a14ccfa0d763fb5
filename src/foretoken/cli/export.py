"""``foretoken export`` and ``foretoken import``: drafters in the layouts of other projects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.model_argument import HELP, Target, existing_model, model_before
from foretoken.cli.options import Json
from foretoken.cli.output import json_only, print_json
from foretoken.training.formats.catalogue import ENGINES, methods, names

Out = Annotated[Path, typer.Option(help="New folder; it appears whole or not at all.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier drafter at --out.")]


def export_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] DRAFTER",
            help=f"DRAFTER: METHOD[:FOLDER] with METHOD one of {', '.join(methods())}. "
            f"MODEL, which it belongs to: {HELP}",
        ),
    ],
    out: Out,
    format: Annotated[str | None, typer.Option(help=f"{', '.join(names())}; by default the usual one.")] = None,
    target: Target = None,
    engine: Annotated[
        str | None, typer.Option(help=f"Refuse what it cannot load, and print how to start it: {', '.join(ENGINES)}.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a drafter in a layout that vLLM, SGLang, Hugging Face and others load."""
    model, (drafter,) = model_before(words, "DRAFTER")
    chosen = existing_model(model, target)
    with json_only(as_json):
        from foretoken.training.formats import export_drafter

        report = export_drafter(drafter, out, format, chosen, engine, force)
    _show(report, as_json, f"{report['method']} in the format {report['format']}")
    if report["ready"] and not as_json:
        typer.echo(f"{engine}: {report['ready']}")


def import_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] SOURCE",
            help=f"SOURCE: folder (or JSON file) in a public layout. MODEL, which it belongs to: {HELP}",
        ),
    ],
    out: Out,
    target: Target = None,
    method: Annotated[str, typer.Option(help=f"auto, {', '.join(methods())}.")] = "auto",
    expect: Annotated[
        float | None,
        typer.Option(
            help="Tokens a round expected with MODEL on ordinary text, as a chain; less than .8 of them is an error."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Draft with it on ordinary text, and compare tokens a round with its card."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Read a drafter that another project trained, check it against its target, and store it in our layout."""
    model, (source,) = model_before(words, "SOURCE")
    chosen = existing_model(model, target)
    with json_only(as_json):
        from foretoken.lab.acceptance import AcceptanceCheck
        from foretoken.training.formats import import_drafter

        trial = AcceptanceCheck(expect) if check or expect is not None else None
        report = import_drafter(Path(source), out, chosen, method, force, trial)
    _show(report, as_json, f"{report['method']} from the format {report['format']}")
    if not as_json:
        if "acceptance" in report:
            typer.echo(_accepted(report["acceptance"]))
        typer.echo(f"use it with --drafter {report['drafter']}")
        if "acceptance" not in report:
            typer.echo("its acceptance was not measured: --check does, in short and in long texts")


def _show(report: Mapping[str, Any], as_json: bool, title: str) -> None:
    for warning in report["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json(dict(report))
    else:
        typer.echo(f"{title}: {len(report['files'])} files, {report['bytes'] / 1e6:.1f} MB -> {report['out']}")


def _accepted(acceptance: Mapping[str, Any]) -> str:
    shares = " ".join(f"{share:.0%}" for share in acceptance["by_position"])
    expected = "" if acceptance["expected"] is None else f"; {acceptance['expected']:g} expected"
    lengths = ", ".join(f"{tokens:.2f} behind {length} tokens" for length, tokens in acceptance["by_length"].items())
    text = f"{acceptance['tokens_a_round']:.2f} tokens a round as a chain (accepted by position {shares}){expected}"
    return f"{text}; by length of the text {lengths}" if lengths else text
