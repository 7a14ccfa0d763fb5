"""Where output goes: people read the terminal, programs read one JSON line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.io.finite import finite

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

LEAST = 12
"""A column of words is no narrower."""
WIDEST = 10_000


def screen(stderr: bool = False, live: bool = False) -> Console:
    """A rich console that prints text as it is: no markup, no highlighting, and lines that the terminal breaks.

    What is drawn over and over, which is ``live``, may not be wider than the terminal.
    """
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=not live)


def print_text(console: Console, text: str | Text, style: str = "", end: str = "\n") -> None:
    """Print what a model reads or writes, tabs included: rich alone would print spaces in their place."""
    from rich.segment import Segments
    from rich.text import Text

    styled = Text(text, style) if isinstance(text, str) else text
    console.print(Segments(styled.render(console, end)), end="", soft_wrap=True)


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """A line on a terminal's stderr for as long as something takes: nobody should wonder whether it hangs."""
    console = screen(stderr=True, live=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


def table(title: str | None = None, words: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """A table with a line below its head; columns of words break their lines, those of numbers end at the right."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in words:
        result.add_column(name, overflow="fold")
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    return result


def print_table(console: Console, grid: Table) -> None:
    """Print a table whose first column and numbers are whole, however narrow the terminal is.

    Other columns of words, and the heads of numbers that may break, take what room is left; where there is none, lines
    run over.  Rich alone would cut numbers off and leave columns out.
    """
    from rich.cells import cell_len

    needed = console.measure(grid, options=console.options.update(width=WIDEST)).maximum
    for i, column in enumerate(grid.columns):
        head, cells = cell_len(str(column.header)), max((cell_len(str(cell)) for cell in column.cells), default=0)
        whole = max(head, cells)
        if i == 0 or column.no_wrap:
            column.no_wrap, column.min_width = True, whole
        else:
            word = max(map(cell_len, str(column.header).split()), default=0)  # a head breaks between its words first
            column.min_width = max(cells, min(word, LEAST)) if column.justify == "right" else min(whole, LEAST)
            needed -= whole - column.min_width
    if needed > console.width:
        grid.width = needed
    console.print(grid, crop=False, soft_wrap=False)


def check_out(out: Path, option: str = "--out", new_folders: bool = False) -> None:
    """Refuse, by a ``ValueError``, a file that cannot be written, before minutes are spent on what goes into it;
    nothing is left behind.  With ``new_folders`` the folders that are not there yet will be made for it."""
    from tempfile import TemporaryFile

    if out.is_dir():
        raise ValueError(f"{option} {out} is a folder: give the name of a file")
    folder = out.absolute().parent
    while new_folders and not folder.exists():
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):  # permissions alone do not tell
            pass
    except OSError as error:
        raise ValueError(f"{option} {out} cannot be written: {error.strerror}; choose another folder") from None


def check_inputs(paths: Iterable[Path]) -> None:
    """Refuse, by a ``ValueError``, a path that leads nowhere, before a model is loaded for it."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")


def has_colour(console: Console) -> bool:
    """Whether colours will be seen (a terminal or FORCE_COLOR, and no NO_COLOR)."""
    return console.color_system is not None and not console.no_color


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that says what is being done; call it with the next text.

    Drawn only when it changes: an animated one would take time from what is being measured.
    """
    from rich.live import Live
    from rich.text import Text

    console = screen(stderr=True, live=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(f"{text} ...", style="dim"), refresh=console.is_terminal)


@contextlib.contextmanager
def progress_bar(stays: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal's stderr; call it with (steps done, steps in all or 0, what begins).

    Drawn only when it changes, as :func:`status_line`.  Where it ``stays``, its last state is left behind, even in a
    file.
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
    """While ``active``, everything that is printed goes to stderr: stdout is for the JSON line alone."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on one line of stdout; what JSON cannot hold (NaN, infinity) becomes null."""
    sys.stdout.write(json.dumps(finite(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()
