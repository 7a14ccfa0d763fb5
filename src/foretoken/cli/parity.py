"""``foretoken parity``: does speculation change what this target says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import Common, Json, check_drafter, common_parameters, with_common
from foretoken.cli.output import json_only, print_json
from foretoken.cli.parity_certificate import before_certifying, verify_certificate, write_certificate
from foretoken.cli.parity_report import print_report, run_on

if TYPE_CHECKING:
    from foretoken.lab.parity.report import Report
    from foretoken.lab.parity.run import Settings
    from foretoken.models.base import LanguageModel

_DIFFERENCE, _INTERRUPTED = 1, 130
_TOKENS, _SAMPLES, _FALSE_ALARM = 32, 128, 1e-3
"""Defaults of the run."""


@with_common(omit=("drafter",), max_new_tokens=_TOKENS)
def parity_command(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="ngram, model:PATH,k=4, auto, ...: `foretoken methods` lists all. May be given several times; "
            "by default all that fit the target."
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
    ] = _SAMPLES,
    false_alarm: Annotated[
        float, typer.Option(help="Chance that the whole report fails although every distribution is right.")
    ] = _FALSE_ALARM,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens seen before.")] = 1.0,
    certificate: Annotated[
        Path | None, typer.Option(help="Write the run to this file, for another machine to repeat it.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Run the checks of this certificate again, and say what is equal.")
    ] = None,
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
            check_drafter(spec)
    if verify is not None:
        own: dict[str, Any] = {"certificate": certificate, "prompts": prompts, "mode": mode, "samples": samples}
        own |= {"false_alarm": false_alarm, "repetition_penalty": repetition_penalty}
        _refuse_beside_verify(common, own)
        named = common.target if {"model", "target"} & common.given else None
        verify_certificate(verify, common, named, drafter, as_json)
        return
    settings = _settings(common, mode, samples, false_alarm, repetition_penalty)
    checksums = {} if certificate is None else before_certifying(certificate, common)
    with json_only(as_json):
        report, stopped, target = _run(common, drafter, prompts, settings)
    if as_json:
        print_json(report.public())
    else:
        print_report(report, settings)
    if certificate is not None:
        write_certificate(certificate, report, settings, target, common, checksums)
    if stopped:
        raise typer.Exit(_INTERRUPTED)
    if not report.passed:
        raise typer.Exit(_DIFFERENCE)


def _refuse_beside_verify(common: Common, own: dict[str, Any]) -> None:
    """Refuse options that a certificate decides.

    Raises:
        ValueError: one was given.
    """
    usual = {"samples": _SAMPLES, "false_alarm": _FALSE_ALARM, "repetition_penalty": 1.0}
    names = [name for name, value in own.items() if (value or None) != usual.get(name)]
    shared = {parameter.name for parameter in common_parameters()} - {"target", "drafter"}
    names += sorted(shared & common.given)
    if names:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"--verify runs what the certificate says: leave out {given}")


def _settings(
    common: Common, modes: list[str] | None, samples: int, false_alarm: float, repetition_penalty: float
) -> Settings:
    from foretoken.lab.parity.report import MODES
    from foretoken.lab.parity.run import Settings

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
            **common.filters,
            "repetition_penalty": repetition_penalty,
        },
        samples=samples,
        false_alarm=false_alarm,
        seed=common.seed or 0,
        modes=modes or MODES,
    )


def _run(
    common: Common, drafters: list[str] | None, prompts: Path | None, settings: Settings
) -> tuple[Report, bool, LanguageModel]:
    """The report, whether Ctrl-C cut it short, and the target."""
    from foretoken.lab.prompts import read_prompts

    texts = read_prompts(prompts)
    target = common.load_target()
    report, stopped = run_on(target, common.target, drafters, texts, settings)
    return report, stopped, target
