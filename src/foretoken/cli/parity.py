"""``foretoken parity``: compare speculative with plain decoding on a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.ending import INTERRUPTED, terminable
from foretoken.cli.options import Common, Json, check_drafter, common_parameters, with_common
from foretoken.cli.output import json_only, print_json, progress_bar, screen, table
from foretoken.cli.settings import FromOptions
from foretoken.core.outside import refuse_code
from foretoken.core.settings import setting

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.parity.report import Check, Report, Settings
    from foretoken.lab.parity.verification import Verification
    from foretoken.lab.prompts import BenchPrompt
    from foretoken.lab.workload import Subject
    from foretoken.models.base import LanguageModel
    from foretoken.options import Prompt

_DIFFERENCE = 1
"""Exit code."""


@dataclass(frozen=True)
class ParityOptions:
    """Drafters, prompts and checks of a parity run."""

    drafter: list[str] | None = setting(
        None,
        "ngram, model:PATH,k=4, auto, ...: `foretoken methods` lists all. May be given several times; "
        "by default all that fit the target.",
    )
    prompts: Path | None = setting(None, "Text file (one prompt a line) or JSONL with prompt, text or turns.")
    mode: list[str] | None = setting(
        None, "Check only this: transformers, greedy, batch, stop, sampled, seed. May be repeated."
    )
    samples: int = setting(128, "Outputs per drafter for the distribution test; 0 skips it.")
    false_alarm: float = setting(1e-3, "Probability that the report fails although every distribution is right.")
    repetition_penalty: float = setting(1.0, "Above 1 discourages tokens seen before.")
    certificate: Path | None = setting(None, "Write the run to this file, for another machine to repeat it.")
    verify: Path | None = setting(None, "Repeat the checks of this certificate, and compare.")


@with_common(omit=("drafter",), max_new_tokens=32)
@terminable()
def parity_command(*, options: Annotated[ParityOptions, FromOptions()], as_json: Json = False, common: Common) -> None:
    """Compare speculative decoding with plain decoding on a target, greedy and sampled.

    Greedy outputs, and sampled outputs with a seed, must equal plain decoding's token by token.  Exit code 1 when
    there is a difference that rounding does not explain.  Ctrl-C and SIGTERM print the checks so far.
    """
    common.check()
    for spec in options.drafter or ():
        if spec != "auto":
            check_drafter(spec)
    if options.verify is not None:
        _refuse_beside_verify(common, options)
        model = common.target if {"model", "target"} & common.explicit else None
        verify_certificate(options.verify, common, model, options.drafter, as_json)
        return
    settings = _settings(common, options)
    checksums = {} if options.certificate is None else before_certifying(options.certificate, common)
    with json_only(as_json):
        from foretoken.lab.prompts import read_prompts

        texts = read_prompts(options.prompts)
        subject = common.subject()
        drafters = list(dict.fromkeys(options.drafter)) if options.drafter else None
        report, stopped = run_on(subject, drafters, texts, settings)
    if as_json:
        print_json(report.public())
    else:
        print_report(report, settings)
    if options.certificate is not None:
        write_certificate(options.certificate, report, settings, subject.target, common, checksums)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if not report.passed:
        raise typer.Exit(_DIFFERENCE)


def _refuse_beside_verify(common: Common, options: ParityOptions) -> None:
    """Raise ``ValueError`` for options that the certificate sets."""
    decided = ("certificate", "prompts", "mode", "samples", "false_alarm", "repetition_penalty")
    names = [name for name in decided if (getattr(options, name) or None) != getattr(ParityOptions, name)]
    shared = {parameter.name for parameter in common_parameters()} - {"target", "drafter"}
    names += sorted(shared & common.explicit)
    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"--verify takes its settings from the certificate: leave out {flags}")


def _settings(common: Common, options: ParityOptions) -> Settings:
    from foretoken.lab.parity.report import MODES, Settings

    sampling = {"temperature": common.temperature or 1.0, **common.filters}
    return Settings(
        target_source=common.target,
        verifier=common.verifier,
        controller=common.controller,
        profile=common.profile,
        device=None if common.device == "auto" else common.device,
        allow_lossy=common.allow_lossy,
        max_new_tokens=common.max_new_tokens,
        sampling={**sampling, "repetition_penalty": options.repetition_penalty},
        samples=options.samples,
        false_alarm=options.false_alarm,
        seed=common.seed or 0,
        modes=options.mode or MODES,
    )


def run_on(
    subject: Subject, drafters: list[str] | None, prompts: Sequence[Prompt | BenchPrompt], settings: Settings
) -> tuple[Report, bool]:
    """Run parity on a loaded target; returns the report and whether Ctrl-C interrupted it."""
    from foretoken.lab.parity.report import Report
    from foretoken.lab.parity.run import run_parity

    report = Report()
    try:
        with progress_bar() as on_progress:
            run_parity(subject.target, subject.tokenizer, drafters, prompts, settings, on_progress, report)
    except KeyboardInterrupt:
        if not report.checks:
            raise
        return report, True
    return report, False


def print_report(report: Report, settings: Settings) -> None:
    from foretoken.lab.parity.report import verdict

    console = screen()
    grid = table("parity")
    grid.add_column("drafter", overflow="fold", min_width=12)
    grid.add_column("verifier", no_wrap=True)
    grid.add_column("check", no_wrap=True)
    for name in ("outputs", "drafted", "identical", "ties", "differ", "p-value", "sees"):
        grid.add_column(name, justify="right", no_wrap=True)
    for check in report.checks:
        grid.add_row(*_cells(check, settings.samples), style="red" if check.differences else "")
    # In a narrower table Rich drops the drafters' names; a narrow terminal breaks the lines instead.
    widest = 110
    grid.width = min(widest, console.measure(grid, options=console.options.update(width=widest)).maximum)
    console.print(grid, crop=False, soft_wrap=False)
    for skipped in report.skipped:
        console.print(f"skipped {skipped}", style="dim")
    for check in report.checks:
        for note in check.notes:
            console.print(f"{check.drafter}, {check.mode}: {note}")
    _print_power(console, report, settings)
    colours = {"good": "bold green", "bad": "bold red", "even": ""}
    for remark in verdict(report):
        console.print(remark.text, style=colours[remark.tone])


def _print_power(console: Console, report: Report, settings: Settings) -> None:
    """Print the power of the distribution tests."""
    sees = [check.sees for check in report.checks if check.sees is not None]
    if not sees:
        return
    span = f"{min(sees):.2f}" if f"{min(sees):.2f}" == f"{max(sees):.2f}" else f"{min(sees):.2f} to {max(sees):.2f}"
    console.print(
        f"distribution tests: {settings.samples} outputs each; a correct one fails with a probability of "
        f"{report.limit:.2g} (all together {report.limit * len(sees):.2g}), one that is off by a "
        f"total variation of {span} or more between the merged cells of every table is found with a probability of 0.9",
    )


def _cells(check: Check, samples: int) -> list[str]:
    if check.broke_off:
        return [check.drafter, check.verifier, check.mode, *7 * "-"]
    sampled = check.mode == "sampled"
    counts = ["", ""] if sampled else [str(check.identical), str(check.ties)]
    p_value = "" if check.p_value is None else f"{check.p_value:.3g}"
    sees = "" if check.sees is None else f"{check.sees:.2f}"
    outputs = samples if sampled else check.prompts
    numbers = [str(outputs), str(check.drafted), *counts, str(check.differences), p_value, sees]
    return [check.drafter, check.verifier, check.mode, *numbers]


def before_certifying(file: Path, common: Common) -> dict[str, str]:
    """Checksums of the target's files.  Raises ``ValueError`` if the certificate cannot be written: no folder for the
    file, a profile, or files that are not local."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"--certificate cannot be written to {file}: give a file in an existing folder")
    if common.profile is not None:
        raise ValueError("a certificate cannot refer to a profile: give --drafter, --verifier and --controller instead")
    from foretoken.lab.parity.weights import model_checksums

    return model_checksums(common.target)


def write_certificate(
    file: Path, report: Report, settings: Settings, target: LanguageModel, common: Common, checksums: dict[str, str]
) -> None:
    """Write the certificate of a complete run.  For an interrupted one, print that nothing was written."""
    console = screen(stderr=True)
    if not report.complete:
        console.print(f"{file} was not written: the run was interrupted")
        return
    from foretoken.core.io.files import write_text
    from foretoken.lab.parity.certificate import STAMP, certify

    options = {name: getattr(common, name) for name in ("dtype", "device", "inflate", "quantize", "backend")}
    write_text(file, STAMP.to_json(certify(report, settings, target, options, checksums)))
    console.print(f"wrote {file}; another machine repeats it with: foretoken parity --verify {file}")


def verify_certificate(
    file: Path, common: Common, model: str | None, drafters: list[str] | None, as_json: bool
) -> None:
    """Repeat a certificate's checks and compare the results; exit code 1 if a promise does not hold.

    Raises ``ValueError`` for an incomplete certificate, or one for another model or drafter.

    Args:
        common: its target is used if it is not the default.
        model: the target here; defaults to the certificate's source.
        drafters: specs here, in the certificate's order; defaults to the certificate's.
    """
    from foretoken.lab.parity.certificate import check_weights, read_certificate
    from foretoken.lab.parity.verification import compare

    certificate = read_certificate(file)
    default = common.target if common.target != Common.target else certificate.model["source"]
    source, specs = model or default, drafters or certificate.specs
    for spec in certificate.specs if not drafters else ():
        refuse_code(spec, f"the certificate {file}")
    check_weights(certificate, file, source, specs)
    options: dict[str, Any] = {**certificate.model["options"], "target": source}
    settings = certificate.run_settings(source)
    with json_only(as_json):
        subject = replace(common, **options).subject()
        report, stopped = run_on(subject, specs, certificate.prompts, settings)
        if not as_json:
            print_report(report, settings)
    if stopped:
        screen(stderr=True).print("nothing is verified: the run was interrupted")
        raise typer.Exit(INTERRUPTED)
    result = compare(certificate, report, settings, subject.target)
    if as_json:
        print_json(result.public() | {"parity": report.public()})
    else:
        _print_verification(result, file)
    if not result.verified:
        raise typer.Exit(_DIFFERENCE)


def _print_verification(result: Verification, file: Path) -> None:
    console = screen()
    console.print(f"certificate {file}", style="bold")
    width = max(len(line.name) for line in result.lines)
    for line in result.lines:
        console.print(f"{'=' if line.equal else '!'} {line.name:<{width}}  {line.text}")
    console.print(result.outcome, style="bold green" if result.verified else "bold red")
