"""Terminal output for people, one JSON line for programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.io.finite import finite
from foretoken.core.io.streams import is_stream

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def screen(stderr: bool = False, live: bool = False) -> Console:
    """A rich console that prints text unchanged: no markup, no highlighting, line breaks by the terminal.

    ``live`` output, which is redrawn, must not be wider than the terminal.
    """
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=not live)


def print_text(console: Console, text: str | Text, style: str = "", end: str = "\n") -> None:
    """Print model text, tabs included: rich alone would turn them into spaces."""
    from rich.segment import Segments
    from rich.text import Text

    styled = Text(text, style) if isinstance(text, str) else text
    console.print(Segments(styled.render(console, end)), end="", soft_wrap=True)


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """Show a status line on a terminal's stderr during a slow step."""
    console = screen(stderr=True, live=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


def table(title: str | None = None, words: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """A table with a rule below its header; text columns wrap, number columns are right-aligned."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in words:
        result.add_column(name, overflow="fold")
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    return result


def print_table(console: Console, grid: Table) -> None:
    """Print a table whose first column and numbers are never cut, even in a narrow terminal.

    Other text columns, and number headers that may break, share the remaining width; if there is none, lines overflow.
    Rich alone would truncate numbers and drop columns.
    """
    from rich.cells import cell_len

    needed = console.measure(grid, options=console.options.update(width=10_000)).maximum
    least = 12  # minimum width of a text column
    for i, column in enumerate(grid.columns):
        head, cells = cell_len(str(column.header)), max((cell_len(str(cell)) for cell in column.cells), default=0)
        whole = max(head, cells)
        if i == 0 or column.no_wrap:
            column.no_wrap, column.min_width = True, whole
        else:
            word = max(map(cell_len, str(column.header).split()), default=0)  # a header breaks between its words first
            column.min_width = max(cells, min(word, least)) if column.justify == "right" else min(whole, least)
            needed -= whole - column.min_width
    if needed > console.width:
        grid.width = needed
    console.print(grid, crop=False, soft_wrap=False)


def check_out(out: Path, option: str = "--out", new_folders: bool = False) -> None:
    """Raise ``ValueError`` for a file that cannot be written, before minutes of work.  Leaves nothing behind.

    With ``new_folders``, missing parent folders are allowed, as they will be created.
    """
    from tempfile import TemporaryFile

    if out.is_dir():
        raise ValueError(f"{option} {out} is a folder: give the name of a file")
    if is_stream(out):
        if not os.access(out, os.W_OK):
            raise ValueError(f"{option} {out} cannot be written: choose another file")
        return
    folder = out.absolute().parent
    while new_folders and not folder.exists():
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):  # permissions alone are not conclusive
            pass
    except OSError as error:
        raise ValueError(f"{option} {out} cannot be written: {error.strerror}; choose another folder") from None


def place_of(out: Path, interrupted: bool, is_unfinished: Callable[[str], bool]) -> Path:
    """The file for a result: another one beside ``out``, which is told, if an interrupted run would replace a complete
    one.

    Args:
        is_unfinished: whether a file's text is that of an interrupted run; errors count as no.
    """
    if not interrupted or not out.exists() or is_stream(out):
        return out
    with contextlib.suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        if is_unfinished(out.read_text(encoding="utf-8")):
            return out
    file = out.with_name(f"{out.stem}.interrupted{out.suffix}")
    print(f"{out} is kept, because this run was interrupted: its results so far are in {file}", file=sys.stderr)
    return file


def check_inputs(paths: Iterable[Path]) -> None:
    """Raise ``ValueError`` for a missing path, before a model is loaded."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")


def has_colour(console: Console) -> bool:
    """Whether colours are visible (a terminal or FORCE_COLOR, and no NO_COLOR)."""
    return console.color_system is not None and not console.no_color


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal's stderr; call it with the next text.

    Drawn only on changes: animation would take time from measurements.
    """
    from rich.live import Live
    from rich.text import Text

    console = screen(stderr=True, live=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(f"{text} ...", style="dim"), refresh=console.is_terminal)


@contextlib.contextmanager
def progress_bar(stays: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on a terminal's stderr; call it with (steps done, total or 0, next step).

    Drawn only on changes, as :func:`status_line`.  With ``stays``, its last state remains, even in a file.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = screen(stderr=True, live=True)
    is_shown = stays or console.is_terminal
    with Progress(*columns, console=console, auto_refresh=False, transient=not stays, disable=not is_shown) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, text: str) -> None:
            if is_shown:
                bar.update(task, completed=done, total=total or None, description=text, refresh=True)

        yield tell


@contextlib.contextmanager
def json_only(active: bool) -> Iterator[None]:
    """While ``active``, redirect prints to stderr, so that stdout has only the JSON line."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout; NaN and infinity become null."""
    sys.stdout.write(json.dumps(finite(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()
