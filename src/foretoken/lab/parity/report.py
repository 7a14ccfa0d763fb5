"""Settings and report of a parity run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.noise import check_seed
from foretoken.core.sampling import SamplingParams
from foretoken.lab.report.verdict import Remark
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.words import EXACT

MODES = ("greedy", "transformers", "batch", "stop", "sampled", "seed")
"""The checks in run order."""
PLAIN = "none"
"""Name of plain decoding among the drafters."""
OUTSIDE = "transformers"
"""The check against kernels of another library."""


@dataclass(frozen=True)
class Settings:
    """Settings of a parity run.

    Attributes:
        target_source: source of the target, for drafters without a path.
        verifier, controller, profile, device, allow_lossy: as in :func:`foretoken.llm.load`.
        max_new_tokens: length of greedy outputs.
        sampling: temperature, top_k, top_p, min_p of sampled outputs; a repetition_penalty applies to greedy ones too.
        samples: outputs per drafter for the test of the distribution; 0 skips it.
        false_alarm: probability that the report fails although every distribution is right (shared by its sampled
            checks).
        seed: of the first seeded output, incremented for the others; also makes unseeded draws reproducible.
        modes: subset of :data:`MODES` to check.
    """

    target_source: Any = "builtin"
    verifier: str | Verifier = "auto"
    controller: str = "auto"
    profile: Path | None = None
    device: str | None = None
    allow_lossy: bool = False
    max_new_tokens: int = 64
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    samples: int = 256
    false_alarm: float = 1e-3
    seed: int = 0
    modes: Sequence[str] = MODES

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling)
        check_seed(self.seed)
        if self.samples < 0:
            raise ValueError(f"--samples must be at least 0, not {self.samples}")
        if not 0 < self.false_alarm < 1:
            raise ValueError(f"--false-alarm must be between 0 and 1, not {self.false_alarm}")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ValueError(f"unknown mode {unknown[0]!r}: choose from {', '.join(MODES)}")

    @property
    def greedy(self) -> dict[str, Any]:
        """Sampling options of the greedy checks: penalties only."""
        return {name: value for name, value in self.sampling.items() if name.endswith("_penalty")}

    @property
    def greedy_options(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, **self.greedy}

    @property
    def sampled_options(self) -> dict[str, Any]:
        """Options of a sampled request, without its seed."""
        return {"max_new_tokens": self.max_new_tokens, **self.sampling}


@dataclass
class Check:
    """One drafter in one mode.

    Attributes:
        mode: one of :data:`MODES`.
        prompts: outputs compared; prompts of the test of the distribution.
        identical: number of outputs that are equal token by token.
        ties: first differences that rounding explains.
        differences: other first differences, a failed test of the distribution, or a check that raised an error.
        sees: the smallest total variation, between the merged cells of every table, that this test detects with
            probability 0.9.
        drafted: draft tokens that the target checked.
        gaps: logit gaps of the numerical ties.
        broken: number of the differences that are ties on a bitwise-exact target.
        broke_off: whether it ended with an error, so that its outputs are unknown.
    """

    drafter: str
    verifier: str
    mode: str
    prompts: int
    identical: int = 0
    ties: int = 0
    differences: int = 0
    p_value: float | None = None
    sees: float | None = None
    drafted: int = 0
    notes: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    broken: int = 0
    broke_off: bool = False

    @property
    def compares_texts(self) -> bool:
        """Whether it compares outputs token by token."""
        return self.mode != "sampled"

    @property
    def tried(self) -> bool:
        """Whether anything was drafted; plain decoding counts as tried against other kernels."""
        return self.drafted > 0 or self.drafter == PLAIN

    def public(self) -> dict[str, Any]:
        """Fields of the CLI's JSON."""
        keys = (
            *("drafter", "verifier", "mode", "prompts", "drafted", "tried"),
            *("identical", "ties", "differences", "p_value", "sees", "notes"),
        )
        return {key: getattr(self, key) for key in keys}


@dataclass
class Report:
    """All checks so far, and the progress of the run.

    Attributes:
        skipped: drafters that could not be checked, with reasons.
        complete: whether the run finished.
        exactness, exactness_why: the target's exactness, as in ``llm.describe()``.
        limit: p-value below which a sampled check fails, whether or not the others are run.
        plain: greedy outputs of plain decoding.
        seeded: sampled outputs of plain decoding, of every prompt twice.
    """

    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    complete: bool = False
    exactness: str = "rounding"
    exactness_why: str = ""
    done: int = 0
    planned: int = 0
    limit: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    seeded: list[list[int]] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether there is a difference other than ties that the target allows."""
        return any(check.differences for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether the run is complete, compared something, and found no difference except ties."""
        return self.complete and bool(self.checks) and not self.differs

    @property
    def tried(self) -> bool:
        """Whether anything was drafted in any check."""
        return any(check.drafted for check in self.checks)

    @property
    def untried(self) -> list[str]:
        """One line per drafter without drafts in some or all checks."""
        ended = [check for check in self.checks if not check.broke_off]
        lines = []
        for drafter in dict.fromkeys(check.drafter for check in ended):
            of_drafter = [check for check in ended if check.drafter == drafter]
            silent = [check.mode for check in of_drafter if not check.tried]
            if len(silent) == len(of_drafter):
                where = "on these prompts: it was not tested, and its texts are not counted"
                lines.append(f"{drafter} drafted nothing {where}")
            elif silent:
                where = f"in {', '.join(silent)}: it was not tested there, and those texts are not counted"
                lines.append(f"{drafter} drafted nothing {where}")
        return lines

    @property
    def compared(self) -> list[Check]:
        """Completed checks of outputs with at least one draft."""
        return [check for check in self.checks if not check.broke_off and check.compares_texts and check.tried]

    def public(self) -> dict[str, Any]:
        """Fields of the CLI's JSON.  ``prompts`` counts the compared outputs of all checks with drafts; ``untried``
        lists the others."""
        totals = {key: sum(getattr(check, key) for check in self.compared) for key in ("prompts", "identical", "ties")}
        return {
            "passed": self.passed,
            "tried": self.tried,
            "untried": self.untried,
            "exactness": self.exactness,
            **totals,
            "checks": [check.public() for check in self.checks],
        }


def verdict(report: Report) -> list[Remark]:
    """Summary lines: drafters without drafts, equality of outputs, and the outcome."""
    plain = [check for check in report.compared if check.mode != OUTSIDE]
    outside = [check for check in report.compared if check.mode == OUTSIDE]
    promise = f"{EXACT.get(report.exactness, report.exactness)} here ({report.exactness_why})"
    remarks = [Remark(text) for text in report.untried]
    if plain:
        reason = f": this model is {promise}"
        remarks.append(Remark(equality(plain, "plain decoding's", reason)))
    if outside:
        reason = ": its kernels differ, so near-ties may differ"
        remarks.append(Remark(equality(outside, "those of transformers.generate", reason)))
    return [*remarks, _outcome(report)]


def equality(checks: Sequence[Check], whose: str, reason: str) -> str:
    """One sentence on the number of equal outputs and on the differences of others; ``reason`` follows ties."""
    prompts, identical, ties, broken, differences = (
        sum(getattr(check, name) for check in checks)
        for name in ("prompts", "identical", "ties", "broken", "differences")
    )
    if identical == prompts:
        return f"all {prompts} texts are equal to {whose}, token by token"
    parts = [f"{identical} of {prompts} texts are equal to {whose}"]
    if ties:
        parts.append(f"{_differ(ties)} from a numerical tie on ({_gaps(checks)}){reason}")
    if broken:
        parts.append(f"{_differ(broken)} from a numerical tie on: a broken promise{reason}")
    if differences > broken:
        parts.append(f"{_differ(differences - broken)} in a way that rounding does not explain")
    return "; ".join(parts)


def _differ(count: int) -> str:
    return f"{count} {'differs' if count == 1 else 'differ'}"


def _gaps(checks: Sequence[Check]) -> str:
    gaps = [gap for check in checks for gap in check.gaps]
    low, high = (f"{gap:.2g}" for gap in (min(gaps), max(gaps)))
    return f"logit gap {low}" if low == high else f"logit gaps {low} to {high}"


def _outcome(report: Report) -> Remark:
    """The last line.  "Passed" covers only compared outputs, and known differences are stated with it."""
    checks = report.compared
    far = "" if report.complete else f", and only {report.done} of {report.planned} checks were run"
    if report.differs:
        return Remark(f"FAILED: {_failure(report.checks)}{far}", "bad")
    ties = sum(check.ties for check in checks)
    if not report.complete:
        so_far = f"{ties} numerical tie{'' if ties == 1 else 's'}" if ties else "no difference"
        far = f"after {report.done} of {report.planned} checks"
        return Remark(f"stopped before the end, {far}: {so_far} so far, the rest is unknown")
    if not report.checks:
        return Remark("FAILED: nothing could be compared", "bad")
    if not report.tried:
        return Remark("nothing was drafted on these prompts, so speculation was not tested")
    inside = [check for check in checks if check.mode != OUTSIDE]
    ties = sum(check.ties for check in inside)
    if ties:
        differ = f"{ties} of {sum(check.prompts for check in inside)} texts differ from plain decoding's"
        return Remark(
            f"passed up to rounding: {differ}, all of them from numerical ties on; nothing else differs", "good"
        )
    outside_ties = sum(check.ties for check in checks)
    beside = (
        f"; {_differ(outside_ties)} from transformers.generate's texts from numerical ties on" if outside_ties else ""
    )
    return Remark(f"passed: speculation does not change this target's output{beside}", "good")


def _failure(checks: Sequence[Check]) -> str:
    """Reasons why a run with differences failed."""
    differing = [check for check in checks if check.differences and not check.broke_off]
    reasons = []
    if any(check.differences > check.broken for check in differing):
        reasons.append("there is a difference that rounding does not explain")
    elif differing:
        reasons.append("this model claims to be exact to the last bit, and is not")
    if any(check.broke_off for check in checks):
        reasons.append("a drafter failed")
    return ", and ".join(reasons)
