"""``foretoken drafters``: drafters that work for a target on this machine, and reasons for the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.model_argument import HELP
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, progress_bar, screen, table
from foretoken.options import COMMAND_LINE

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.bench.fitting import Fit


@with_common(omit=("drafter", "profile", *COMMAND_LINE), model="own")
def drafters_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [FOLDER]...",
            help=f"MODEL: {HELP} FOLDER: where to look for draft models, trained drafters, datastores and GGUF files; "
            "subfolders too. With --target, all are folders.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """List the drafters that work for a target without a download and those in FOLDERs that fit; name a reason for
    each that does not.

    `foretoken tune MODEL --draft FOLDER` measures which of them pays.
    """
    if measure:
        model, *folders = words or ["MODEL"]
        offers = "".join(f" --draft {folder}" for folder in folders)
        raise ValueError(f"drafters only lists, without measuring: foretoken tune {model}{offers} --minutes 3 measures")
    with json_only(as_json):
        common, more_folders = _common_and_folders(common, words or ())
        fits, default = _listing(common, more_folders)
        if not as_json:
            _print(fits, default)
    if as_json:
        print_json({"drafters": [fit.public for fit in fits]})


def _common_and_folders(common: Common, words: Sequence[str]) -> tuple[Common, list[Path]]:
    """The options with their MODEL, and the folders after it.

    With ``--target``, all words are folders except a first word that repeats the target.
    """
    if "target" not in common.explicit:
        return common.of(next(iter(words), None)), [Path(word) for word in words[1:]]
    repeated = words[:1] == [common.target]
    return common.of(None), [Path(word) for word in words[repeated:]]


def _listing(common: Common, folders: Sequence[Path]) -> tuple[list[Fit], str | None]:
    """The drafters in order, and the default drafter."""
    from foretoken.lab.bench.fitting import candidates_in, fits, ordered
    from foretoken.loading import default_drafter

    common.check()
    for folder in folders:
        candidates_in(folder)
    subject = common.subject()
    default = default_drafter(subject.target, common.target)
    with progress_bar() as on_progress:
        return ordered(fits(subject, folders, on_progress)), default


def _print(fits: Sequence[Fit], default: str | None) -> None:
    """Print the drafters that work, then the others."""
    console = screen()
    for title, works in (("works", True), ("does not work", False)):
        some = [fit for fit in fits if fit.works is works]
        if some:
            _print_group(console, title, some)
    console.print(f"drafter=auto means here: {default or 'plain decoding'}")


def _print_group(console: Console, title: str, fits: Sequence[Fit]) -> None:
    """Print a table of drafters.  A spec too long for its column gets a line of its own, so that it can be copied."""
    from rich.padding import Padding

    style = "bold cyan" if fits[0].works else "bold"
    grid = table(title)
    grid.add_column("--drafter", no_wrap=True, style=style)
    grid.add_column("why", overflow="fold")
    long = [fit for fit in fits if len(fit.spec) > 36]
    for fit in fits:
        if fit not in long:
            grid.add_row(fit.spec, fit.why)
    console.print(grid, soft_wrap=False)
    for fit in long:
        console.print(f" {fit.spec}", style=style)
        console.print(Padding(fit.why, (0, 0, fit is long[-1], 5)), soft_wrap=False)
