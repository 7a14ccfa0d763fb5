"""Running the checks of parity under a progress bar, and their report for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from foretoken.cli.output import progress_bar, screen

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.parity.report import Check, Report
    from foretoken.lab.parity.run import Settings
    from foretoken.lab.prompts import BenchPrompt
    from foretoken.models.base import LanguageModel
    from foretoken.options import Prompt

_WIDEST = 110
"""Columns of the table, however narrow the terminal is; a longer spec is folded."""


def run_on(
    target: LanguageModel,
    source: str,
    drafters: list[str] | None,
    prompts: Sequence[Prompt | BenchPrompt],
    settings: Settings,
) -> tuple[Report, bool]:
    """The report on a target that is loaded, and whether Ctrl-C cut it short."""
    from foretoken.lab.parity.report import Report
    from foretoken.lab.parity.run import run_parity
    from foretoken.loading import load_tokenizer

    report = Report()
    bar: AbstractContextManager[Callable[[int, int, str], None]] = progress_bar()
    try:
        with bar as on_progress:
            run_parity(target, load_tokenizer(source), drafters, prompts, settings, on_progress, report)
    except KeyboardInterrupt:
        if not report.checks:
            raise
        return report, True
    return report, False


def print_report(report: Report, settings: Settings) -> None:
    from rich import box
    from rich.table import Table

    console = screen()
    table = Table(title="parity", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("drafter", overflow="fold", min_width=12)
    table.add_column("verifier", no_wrap=True)
    table.add_column("check", no_wrap=True)
    for name in ("outputs", "drafted", "identical", "ties", "differ", "p-value", "sees"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in report.checks:
        table.add_row(*_cells(check), style="red" if check.differences else "")
    # In less room Rich leaves the drafters' names out; a narrow terminal may break the lines instead.
    table.width = min(_WIDEST, console.measure(table, options=console.options.update(width=_WIDEST)).maximum)
    console.print(table, crop=False)
    for skipped in report.skipped:
        console.print(f"skipped {skipped}", style="dim", soft_wrap=True)
    for check in report.checks:
        for note in check.notes:
            console.print(f"{check.drafter}, {check.mode}: {note}", soft_wrap=True)
    _print_power(console, report, settings)
    _print_verdict(console, report)


def _print_power(console: Console, report: Report, settings: Settings) -> None:
    """What the tests of the distribution would have found."""
    sees = [check.sees for check in report.checks if check.sees is not None]
    if not sees:
        return
    span = f"{min(sees):.2f}" if f"{min(sees):.2f}" == f"{max(sees):.2f}" else f"{min(sees):.2f} to {max(sees):.2f}"
    console.print(
        f"distribution tests: {settings.samples} outputs each; one that is right fails with a chance of "
        f"{settings.false_alarm / len(sees):.2g} (all together {settings.false_alarm:.2g}), one that is off by a "
        f"total variation of {span} or more is found with a chance of 0.9",
        soft_wrap=True,
    )


def _print_verdict(console: Console, report: Report) -> None:
    from foretoken.lab.parity.verdict import verdict

    colours = {"good": "bold green", "bad": "bold red", "even": ""}
    for remark in verdict(report):
        console.print(remark.text, style=colours[remark.tone], soft_wrap=True)


def _cells(check: Check) -> list[str]:
    sampled = check.mode == "sampled"
    counts = ["", ""] if sampled else [str(check.identical), str(check.ties)]
    p_value = "" if check.p_value is None else f"{check.p_value:.3g}"
    sees = "" if check.sees is None else f"{check.sees:.2f}"
    numbers = [str(check.prompts), str(check.drafted), *counts, str(check.differences), p_value, sees]
    return [check.drafter, check.verifier, check.mode, *numbers]
