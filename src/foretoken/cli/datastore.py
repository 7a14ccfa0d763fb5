"""``foretoken datastore``: corpora for ``retrieval:FILE`` and ``sam:FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.options import Json

app = typer.Typer(help="Build the datastores of retrieval drafters.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Build the datastores of retrieval drafters."""


@app.command("build")
def build_command(
    data: Annotated[list[Path], typer.Argument(help="Folders or files: .txt .md .rst .py, .jsonl with 'text' rows.")],
    out: Annotated[Path, typer.Option(help="File to write; an old one stays intact until the new one is complete.")],
    target: Annotated[str, typer.Option(help="Whose tokenizer: builtin, a model folder or a hub id.")] = "builtin",
    as_json: Json = False,
) -> None:
    """Encode text, sort its suffixes, and write a datastore that loads as retrieval:FILE."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder: --out names the file to write")
    missing = [path for path in data if not path.exists()]
    if missing:
        raise ValueError(f"no such file or folder: {missing[0]}")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from foretoken.cli.output import json_only, print_json
    from foretoken.drafters.datastore import build_datastore
    from foretoken.loading import load_tokenizer

    with json_only(as_json):
        tokenizer = load_tokenizer(target)
        if tokenizer is None:
            raise ValueError(f"{target} has no tokenizer: point --target to a model folder that has one")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("reading", total=None)

            def show(what: str, done: int, total: int | None) -> None:
                bar.update(task, description=what, completed=done, total=total)

            report = build_datastore(data, tokenizer, out, show)
    if as_json:
        print_json({"out": str(out), **report})
    else:
        typer.echo(
            f"{report['documents']:,} documents, {report['tokens']:,} tokens, {report['bytes'] / 1e6:.1f} MB -> {out} "
            f"(use it with --drafter retrieval:{out})"
        )
