"""``foretoken parity --certificate FILE`` and ``--verify FILE``: a run as a file, and that run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.options import Common
from foretoken.cli.output import json_only, print_json, screen
from foretoken.cli.parity_report import print_report, run_on
from foretoken.core.outside import refuse_code

if TYPE_CHECKING:
    from foretoken.lab.parity.report import Report, Settings
    from foretoken.lab.parity.verification import Verification
    from foretoken.models.base import LanguageModel

_NOT_VERIFIED, _INTERRUPTED = 1, 130
OPTIONS = ("dtype", "device", "inflate", "quantize")
"""How a target is loaded, as far as a certificate repeats it."""


def before_certifying(file: Path, common: Common) -> dict[str, str]:
    """Checksums of the target's files; what would keep the certificate from being written is found first.

    Raises:
        ValueError: there is no folder for the file, a profile, or the model's files are not on this machine.
    """
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(
            f"--certificate cannot be written to {file}: give the name of a file in a folder that is there"
        )
    if common.profile is not None:
        raise ValueError("a certificate names no profile: give --drafter, --verifier and --controller instead")
    from foretoken.lab.parity.weights import model_checksums

    return model_checksums(common.target)


def write_certificate(
    file: Path,
    report: Report,
    settings: Settings,
    target: LanguageModel,
    common: Common,
    checksums: dict[str, str],
) -> None:
    """Write the certificate of a run that came to its end; of another one nothing is written, and that is said."""
    console = screen(stderr=True)
    if not report.complete:
        console.print(f"{file} was not written: the run was broken off", soft_wrap=True)
        return
    from foretoken.core.io.files import write_text
    from foretoken.lab.parity.certificate import certify, to_json

    options = {name: getattr(common, name) for name in OPTIONS}
    write_text(file, to_json(certify(report, settings, target, options, checksums)))
    console.print(f"wrote {file}; another machine repeats it with: foretoken parity --verify {file}", soft_wrap=True)


def verify_certificate(
    file: Path, common: Common, model: str | None, drafters: list[str] | None, as_json: bool
) -> None:
    """Run a certificate's checks again and say what is equal; exit code 1 where a promise does not hold.

    Args:
        file: the certificate.
        common: its target is used where another one than the default was named.
        model: the target here; by default where the certificate found it.
        drafters: where they are here, in the certificate's order; by default as the certificate says.
        as_json: print one JSON object.

    Raises:
        ValueError: no whole certificate, or it is about another model or drafter.
    """
    from foretoken.lab.parity.certificate import check_weights, read_certificate
    from foretoken.lab.parity.verification import compare

    certificate = read_certificate(file)
    named = common.target if common.target != Common.target else certificate.model["source"]
    source, specs = model or named, drafters or certificate.specs
    for spec in certificate.specs if not drafters else ():
        refuse_code(spec, f"the certificate {file}")
    check_weights(certificate, file, source, specs)
    options: dict[str, Any] = {**certificate.model["options"], "target": source}
    settings = certificate.run_settings(source)
    with json_only(as_json):
        target = replace(common, **options).load_target()
        report, stopped = run_on(target, source, specs, certificate.prompts, settings)
        if not as_json:
            print_report(report, settings)
    if stopped:
        screen(stderr=True).print("nothing is verified: the run was broken off", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED)
    result = compare(certificate, report, settings, target)
    if as_json:
        print_json(result.public() | {"parity": report.public()})
    else:
        _print(result, file)
    if not result.verified:
        raise typer.Exit(_NOT_VERIFIED)


def _print(result: Verification, file: Path) -> None:
    console = screen()
    console.print(f"certificate {file}", style="bold", soft_wrap=True)
    width = max(len(line.name) for line in result.lines)
    for line in result.lines:
        console.print(f"{'=' if line.equal else '!'} {line.name:<{width}}  {line.text}", soft_wrap=True)
    console.print(result.outcome, style="bold green" if result.verified else "bold red", soft_wrap=True)
