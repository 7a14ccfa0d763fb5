"""``foretoken parity``: does speculation change what this target says?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, progress_bar, screen
from foretoken.registry import find, parse_spec, rows

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.parity.report import Check, Report
    from foretoken.parity.run import Settings

_NAMES = ", ".join(row.name for row in rows("drafter"))
_DIFFERENCE, _INTERRUPTED = 1, 130
_WIDEST = 110
"""Columns of the table, however narrow the terminal is; a longer spec is folded."""


@with_common(omit=("drafter",), max_new_tokens=32)
def parity_command(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Spec NAME[:PATH][,KEY=VALUE...], may be given several times: auto, {_NAMES}. "
            "By default all that fit the target."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file (one prompt a line) or JSONL with prompt, text or turns.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="Check only this: transformers, greedy, batch, stop, sampled, seed. May be repeated."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Outputs per drafter for the test of the distribution; 0 leaves it out.")
    ] = 128,
    false_alarm: Annotated[
        float, typer.Option(help="Chance that the whole report fails although every distribution is right.")
    ] = 1e-3,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens seen before.")] = 1.0,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Compare speculative decoding with plain decoding on a target, greedy and sampled.

    Greedy outputs, and sampled ones of a seed, must be plain decoding's token by token.  Exit code 1 when
    there is a difference that rounding does not explain.  Ctrl-C prints what was checked so far.
    """
    common.check()
    for spec in drafter or ():
        if spec != "auto":
            find("drafter", parse_spec(spec).name)
    settings = _settings(common, mode, samples, false_alarm, repetition_penalty)
    with json_only(as_json):
        report, stopped = _run(common, drafter, prompts, settings)
    if as_json:
        print_json(report.public())
    else:
        _print(report, settings)
    if stopped:
        raise typer.Exit(_INTERRUPTED)
    if not report.passed:
        raise typer.Exit(_DIFFERENCE)


def _settings(
    common: Common, modes: list[str] | None, samples: int, false_alarm: float, repetition_penalty: float
) -> Settings:
    from foretoken.parity.report import MODES
    from foretoken.parity.run import Settings

    return Settings(
        target_source=common.target,
        verifier=common.verifier,
        controller=common.controller,
        profile=common.profile,
        device=None if common.device == "auto" else common.device,
        allow_lossy=common.allow_lossy,
        max_new_tokens=common.max_new_tokens,
        sampling={
            "temperature": common.temperature or 1.0,
            "top_k": common.top_k,
            "top_p": common.top_p,
            "min_p": common.min_p,
            "repetition_penalty": repetition_penalty,
        },
        samples=samples,
        false_alarm=false_alarm,
        seed=common.seed or 0,
        modes=modes or MODES,
    )


def _run(common: Common, drafters: list[str] | None, prompts: Path | None, settings: Settings) -> tuple[Report, bool]:
    """The report, and whether Ctrl-C cut it short."""
    from foretoken.loading import load_tokenizer
    from foretoken.parity.report import Report
    from foretoken.parity.run import read_prompts, run_parity

    texts = read_prompts(prompts)
    target = common.load_target()
    report = Report()
    bar: AbstractContextManager[Callable[[int, int, str], None]] = progress_bar()
    try:
        with bar as on_progress:
            run_parity(target, load_tokenizer(common.target), drafters, texts, settings, on_progress, report)
    except KeyboardInterrupt:
        if not report.checks:
            raise
        return report, True
    return report, False


# -- for people ------------------------------------------------------------------------------------------------------


def _print(report: Report, settings: Settings) -> None:
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
    silent = {check.drafter for check in report.checks if check.drafter != "none"}
    silent -= {check.drafter for check in report.checks if check.drafted}
    for drafter in sorted(silent):
        console.print(f"{drafter} drafted nothing on these prompts: its checks say little", soft_wrap=True)
    if report.differs:
        console.print("FAILED: there is a difference that rounding does not explain", style="bold red")
    elif not report.complete:
        console.print("stopped before the end: no difference so far", style="bold")
    elif not report.checks:
        console.print("FAILED: nothing could be compared", style="bold red")
    else:
        console.print("passed: speculation does not change what this target says", style="bold green")


def _cells(check: Check) -> list[str]:
    sampled = check.mode == "sampled"
    counts = ["", ""] if sampled else [str(check.identical), str(check.ties)]
    p_value = "" if check.p_value is None else f"{check.p_value:.3g}"
    sees = "" if check.sees is None else f"{check.sees:.2f}"
    numbers = [str(check.prompts), str(check.drafted), *counts, str(check.differences), p_value, sees]
    return [check.drafter, check.verifier, check.mode, *numbers]
