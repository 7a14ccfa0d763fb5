"""``foretoken datastore``: corpora for ``retrieval:FILE`` and ``sam:FILE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.model_argument import HELP, Target, WordsCommand, existing_model, is_model, names_model
from foretoken.cli.options import Json
from foretoken.cli.output import check_inputs, json_only, print_json, progress_bar
from foretoken.core.io.hub_ids import expanded

app = typer.Typer(help="Build the datastores of retrieval drafters.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Build the datastores of retrieval drafters."""


@app.command("build", cls=WordsCommand)
def build_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] DATA...",
            help="DATA: folders or files, .txt .md .rst .py, .jsonl with 'text' rows. MODEL, whose tokenizer encodes "
            f"them: {HELP}",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write; an old one stays intact until the new one is complete.")],
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Encode text, sort its suffixes, and write a datastore that loads as retrieval:FILE."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder: --out names the file to write")
    model, data = _model_and_data(words)
    source = existing_model(model, target)
    check_inputs(data)

    from foretoken.loading import load_tokenizer
    from foretoken.methods.drafters.datastore import build_datastore

    with json_only(as_json):
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise ValueError(f"{source} has no tokenizer: give a MODEL that has one")
        with progress_bar() as tell:
            tell(0, 0, "reading")
            report = build_datastore(data, tokenizer, out, lambda step, done, total: tell(done, total or 0, step))
    if as_json:
        print_json({"out": str(out), **report})
    else:
        typer.echo(
            f"{report['documents']:,} documents, {report['tokens']:,} tokens, {report['bytes'] / 1e6:.1f} MB -> {out} "
            f"(use it with --drafter retrieval:{out})"
        )


def _model_and_data(words: Sequence[str]) -> tuple[str | None, list[Path]]:
    """Split ``[MODEL] DATA...``.  The first of several words is MODEL if it names a model and no existing text."""
    first = words[0]
    has_model = len(words) > 1 and names_model(first) and (is_model(first) or not expanded(first).exists())
    return (first if has_model else None), [Path(word) for word in words[has_model:]]
