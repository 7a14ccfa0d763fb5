"""``foretoken show FILE``: a trace of any engine, in the terminal or as a page."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.cli.output import check_out, has_colour, print_json, screen

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.report.show.run import Shown
    from foretoken.lab.report.show.totals import Total
    from foretoken.lab.report.show.trace_file import Trace

SUFFIX = ".jsonl"
OWN = frozenset({"words", "out", "request", "number", "as_json"})
"""What a trace can be asked with."""
MOST_ROWS = 40


@dataclass(frozen=True)
class Asked:
    """What is wanted of a trace.

    Attributes:
        out: a page or picture; ``None``: the terminal.
        request: which request; ``None``: the first.
        number: which round, from 1; ``None``: the first ones, or of a picture the most telling.
        as_json: print totals as JSON.
    """

    out: Path | None
    request: str | None
    number: int | None
    as_json: bool


def trace_file(words: Sequence[str] | None, given: Collection[str]) -> Path | None:
    """The trace that is the only argument, or ``None`` where a prompt is meant.

    Args:
        words: the arguments.
        given: names of what stands on the command line.

    Raises:
        ValueError: there is no such file, or options of a run stand beside it.
    """
    if words is None or len(words) != 1 or not words[0].endswith(SUFFIX) or len(words[0].split()) != 1:
        return None
    file = Path(words[0]).expanduser()
    if not file.is_file():
        raise ValueError(f"no such trace: {file}")
    if wrong := sorted(set(given) - OWN):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"{file} is a trace, which was run already: leave out {options}")
    return file


def show_trace(file: Path, asked: Asked) -> None:
    """Show a trace.

    Raises:
        ValueError: a broken trace, no such request or round, or a page that cannot be written.
    """
    from foretoken.lab.report.show.trace_file import read_trace

    if asked.out is not None:
        check_out(asked.out)
    trace = read_trace(file)
    run = trace.choose(asked.request)
    if asked.number is not None and not 1 <= asked.number <= len(run.rounds):
        raise ValueError(f"there is no round {asked.number}: the request has {len(run.rounds)}")
    if asked.out is not None:
        _write(asked.out, trace, run, asked.number)
    if asked.as_json:
        totals = [dict(vars(total)) for total in trace.totals]
        print_json({"out": str(asked.out) if asked.out else None, "facts": dict(trace.facts), "totals": totals})
    elif asked.out is None:
        _print(screen(), trace, run, asked.number)
    else:
        print(f"{len(trace.requests)} requests, {len(run.rounds)} rounds drawn -> {asked.out}", file=sys.stderr)


def _write(out: Path, trace: Trace, run: Shown, number: int | None) -> None:
    from foretoken.lab.report.show import page, picture

    if out.suffix.lower() == ".html":
        text = page.render(run, _table(trace))
    elif not run.rounds:
        raise ValueError(f"{out}: the trace tells no rounds, only totals, so there is none to draw")
    else:
        text = picture.render(run, run.best() if number is None else number - 1)
    write_whole(out, text)


def write_whole(out: Path, text: str) -> None:
    """A file, whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    from foretoken.core.io.files import write_text

    try:
        write_text(out, text)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}") from None


def _table(trace: Trace) -> list[Total]:
    """The totals, where they say more than the rounds below them."""
    return trace.totals if trace.given or len(trace.requests) > 1 else []


def _print(console: Console, trace: Trace, run: Shown, number: int | None) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from foretoken.cli.explain import coloured, legend, print_rounds
    from foretoken.lab.report.show.totals import HEADS

    colour = has_colour(console)
    for name, value in run.facts:
        console.print(Text(f"{name}: ", "dim").append(value, ""), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    totals = trace.totals
    rows = [total.cells for total in totals[:MOST_ROWS]]
    told = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
    for i in told:
        table.add_column(HEADS[i], justify="left" if i in (0, len(HEADS) - 1) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[i] for i in told))
    console.print(table)
    if len(totals) > MOST_ROWS:
        console.print(f"{len(totals) - MOST_ROWS} more rows: --out page.html shows them", style="dim", soft_wrap=True)
    if not run.rounds:
        console.print("the engine told totals, not rounds: there is no tree to draw", style="dim", soft_wrap=True)
        return
    console.print(legend(colour), end="", soft_wrap=True)
    words = [(word.origin, word.text) for one in run.rounds for word in one.words]
    console.print(Text(run.prompt, "dim").append_text(coloured(words, colour)), soft_wrap=True)
    print_rounds(console, run.rounds, colour, "--round N, or --out page.html", (number or 1) - 1)
