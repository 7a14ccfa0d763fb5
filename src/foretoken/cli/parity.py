"""``foretoken parity``: does speculation change what this target says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, screen, status_line
from foretoken.registry import find, parse_spec, rows

if TYPE_CHECKING:
    from foretoken.bench.parity import Check, Report

_NAMES = ", ".join(row.name for row in rows("drafter"))


@with_common(omit=("drafter",))
def parity_command(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Spec NAME[:PATH][,KEY=VALUE...], may be given several times: {_NAMES}. "
            "By default all that need no training and fit the target."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file (one prompt a line) or JSONL with prompt, text or turns.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Sampled outputs per drafter for the law test; 0 leaves it out.")] = 256,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Compare speculative decoding with plain decoding on a target, greedy and sampled.

    Exit code 1 when there is a difference that rounding does not explain.
    """
    common.check()
    for spec in drafter or ():
        find("drafter", parse_spec(spec).name)
    if samples < 0:
        raise ValueError(f"--samples must be at least 0, not {samples}")
    with json_only(as_json):
        report = _run(common, drafter, prompts, samples)
    if as_json:
        print_json(report.public())
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _run(common: Common, drafters: list[str] | None, prompts: Path | None, samples: int) -> Report:
    from foretoken.bench.parity import Settings, read_prompts, run_parity
    from foretoken.loading import load_tokenizer
    from foretoken.sampling import SamplingParams

    SamplingParams(common.temperature, common.top_k, common.top_p, common.min_p)
    texts = read_prompts(prompts)
    target = common.load_target()
    settings = Settings(
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
        },
        samples=samples,
        seed=common.seed or 0,
    )
    with status_line() as say:
        return run_parity(target, load_tokenizer(common.target), drafters, texts, settings, say)


def _print(report: Report) -> None:
    from rich import box
    from rich.table import Table

    console = screen()
    table = Table(title="parity", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("drafter", "verifier", "against"):
        table.add_column(name, overflow="fold")
    for name in ("prompts", "identical", "ties", "differences", "p-value"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in report.checks:
        table.add_row(*_cells(check), style="red" if check.differences else "")
    console.print(table)
    for skipped in report.skipped:
        console.print(f"skipped {skipped}", style="dim", soft_wrap=True)
    for check in report.checks:
        for note in check.notes:
            console.print(f"{check.drafter}, {check.mode}: {note}", soft_wrap=True)
    verdict = "passed: speculation does not change what this target says"
    failed = "FAILED: there is a difference that rounding does not explain"
    console.print(verdict if report.passed else failed, style="bold green" if report.passed else "bold red")


def _cells(check: Check) -> list[str]:
    sampled = check.mode == "sampled"
    counts = ["", ""] if sampled else [str(check.identical), str(check.ties)]
    p_value = "" if check.p_value is None else f"{check.p_value:.3g}"
    return [check.drafter, check.verifier, check.mode, str(check.prompts), *counts, str(check.differences), p_value]
