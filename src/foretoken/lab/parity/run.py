"""Parity: speculative against plain decoding on a target, greedy and sampled.

Greedy outputs are compared token by token with plain decoding through the same loop and with ``transformers.generate``,
seeded samples with plain decoding of the same seed.  Unseeded samples are tested against the target's exact
distribution.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.core.outside import OutsideError
from foretoken.core.values import one_line
from foretoken.lab.parity.checks import (
    Reference,
    Tested,
    always_drafting,
    check_batch,
    check_greedy,
    check_seed,
    check_stop,
    check_transformers,
    stop_cases,
    transformers_output,
)
from foretoken.lab.parity.distribution import check_sampled
from foretoken.lab.parity.report import MODES, PLAIN, Check, Report
from foretoken.lab.parity.report import Settings as Settings
from foretoken.lab.prompts import BenchPrompt
from foretoken.lab.workload import REFUSALS
from foretoken.llm import Llm, load
from foretoken.loading import build_drafter, default_drafter, read_profile
from foretoken.methods.drafters.base import Drafter
from foretoken.models.base import LanguageModel
from foretoken.options import Prompt
from foretoken.registry import rows

OnProgress = Callable[[int, int, str], None]
"""Called with (checks done, total, next check)."""
PARTS: dict[str, Callable[[Tested], Check | None]] = {
    "greedy": check_greedy,
    "transformers": check_transformers,
    "batch": check_batch,
    "stop": check_stop,
    "seed": check_seed,
}


def run_parity(
    target: LanguageModel,
    tokenizer: Any | None,
    drafters: Sequence[str | Drafter] | None,
    prompts: Sequence[Prompt | BenchPrompt],
    settings: Settings,
    on_progress: OnProgress = lambda done, total, text: None,
    report: Report | None = None,
) -> Report:
    """Compare every drafter with plain decoding on ``target``.  Raises ``ValueError`` for a listed drafter that does
    not fit, and for invalid prompts or settings.

    Args:
        drafters: specs or drafters; ``None`` tries all and skips those that do not fit.
        prompts: from a file, or as for :func:`foretoken.core.prompts.encode`.
        report: filled as checks finish, for callers that use partial results after an interrupt.
    """
    report = Report() if report is None else report
    report.exactness, report.exactness_why = target.exactness, target.exactness_why
    if not prompts:
        raise ValueError("parity needs at least one prompt")
    on_progress(0, 0, "drafters that fit")
    if drafters is None:
        specs, report.skipped = _fitting(target, tokenizer, settings)
    else:  # fail before anything runs
        specs = list(drafters)
        for spec in specs:
            _llm(spec, target, tokenizer, settings)
    on_progress(0, 0, "plain decoding")
    reference, plain = _reference(target, tokenizer, prompts, settings)
    report.prompts, report.plain, report.seeded = reference.prompts, reference.plain, list(reference.seeded)
    modes = [mode for mode in MODES if mode in settings.modes]
    report.planned = len(specs) * len(modes)
    outside = check_transformers(Tested(PLAIN, plain, plain, reference))
    if outside is not None:
        report.checks.append(outside)
        report.planned, report.done = report.planned + 1, 1
    report.limit = settings.false_alarm / max(1, len(specs))
    for i, spec in enumerate(specs):
        subject = _subject(spec, reference, tokenizer)
        for j, mode in enumerate(modes):
            on_progress(i * len(modes) + j, len(specs) * len(modes), f"{subject.spec}: {mode}")
            check = _checked(subject, mode, report.limit)
            report.done += 1
            if check is not None:
                report.checks.append(check)
    report.complete = True
    return report


def _reference(
    target: LanguageModel, tokenizer: Any | None, prompts: Sequence[Prompt | BenchPrompt], settings: Settings
) -> tuple[Reference, Llm]:
    plain = Llm(target, None, None, None, tokenizer)
    encoded = [p.encode(tokenizer) if isinstance(p, BenchPrompt) else plain.encode(p) for p in prompts]
    expected = [plain.generate(prompt, **settings.greedy_options).token_ids for prompt in encoded]
    outside = None
    if "transformers" in settings.modes:
        outputs = [transformers_output(target, prompt, settings) for prompt in encoded]
        outside = [output for output in outputs if output is not None] or None
    stops = stop_cases(plain, encoded, expected, settings) if "stop" in settings.modes else []
    reference = Reference(target, encoded, settings, expected, outside, stops)
    if "seed" in settings.modes:
        pairs, options = zip(2 * encoded, reference.seeds, strict=True), settings.sampled_options
        seeded = [plain.generate(prompt, seed=seed, **options).token_ids for prompt, seed in pairs]
        reference = replace(reference, seeded=seeded)
    return reference, plain


def _checked(subject: Tested, mode: str, limit: float) -> Check | None:
    """Run one check.  An exception counts as a difference, as plain decoding had none."""
    try:
        return check_sampled(subject, limit) if mode == "sampled" else PARTS[mode](subject)
    except MemoryError:
        raise
    except Exception as error:
        for llm in (subject.always_drafting, subject.as_requested):
            llm.engine.close()
        check = subject.check(mode)
        check.differences, check.broke_off = check.prompts, True
        frame = traceback.extract_tb(error.__traceback__)[-1]
        # An error from a user's drafter already names its line; ours would be a second one.
        where = "" if isinstance(error, OutsideError) else f" ({Path(frame.filename).name}, line {frame.lineno})"
        check.notes.append(f"broke off: {' '.join(f'{type(error).__name__}: {error}'.split())}{where}")
        return check


def _fitting(target: LanguageModel, tokenizer: Any, settings: Settings) -> tuple[list[str | Drafter], list[str]]:
    """The drafter of ``auto`` and every registered drafter that runs on this target, and reasons for the others."""
    first = _auto(target, settings)
    specs = [] if first is None else [first]
    specs += [row.example for row in rows("drafter") if row.example not in specs]
    fitting: list[str | Drafter] = []
    skipped = []
    for spec in specs:
        try:
            _llm(spec, target, tokenizer, settings)
        except REFUSALS as error:
            skipped.append(f"{spec}: {one_line(error)}")
        else:
            fitting.append(spec)
    return fitting, skipped


def _subject(spec: str | Drafter, reference: Reference, tokenizer: Any) -> Tested:
    settings = reference.settings
    as_requested = _llm(spec, reference.target, tokenizer, settings)
    # auto may never draft, and then nothing would be checked.
    is_auto = settings.controller == "auto"
    drafting = always_drafting(as_requested, settings.allow_lossy) if is_auto else as_requested
    name = spec if isinstance(spec, str) else spec.spec or spec.name
    return Tested(name, drafting, as_requested, reference)


def _auto(target: LanguageModel, settings: Settings) -> str | None:
    """The profile's drafter (``"none"``: plain decoding), else the target's default one."""
    tuned = {} if settings.profile is None else read_profile(settings.profile)
    drafter: str = tuned.get("drafter", "auto") or "none"
    return default_drafter(target, settings.target_source) if drafter == "auto" else drafter


def _llm(spec: str | Drafter, target: LanguageModel, tokenizer: Any, settings: Settings) -> Llm:
    resolved = _auto(target, settings) if spec == "auto" else spec
    if resolved is None:
        raise ValueError("this target's state cannot be rolled back: it supports plain decoding only")
    drafter = build_drafter(
        resolved, target, target_source=settings.target_source, tokenizer=tokenizer, device=settings.device
    )
    if drafter is None:
        raise ValueError("parity compares a drafter with plain decoding: 'none' is plain decoding itself")
    return load(
        target,
        drafter,
        settings.verifier,
        settings.controller,
        tokenizer=tokenizer,
        allow_lossy=settings.allow_lossy,
        profile=settings.profile,
    )
