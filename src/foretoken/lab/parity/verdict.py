"""What a report says, in words: how many texts are equal, why others are not, and what was not tried."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.lab.parity.report import Check, Report
from foretoken.lab.report.verdict import Remark
from foretoken.models.words import EXACT

OUTSIDE = "transformers"
"""The check against kernels that are not ours."""


def verdict(report: Report) -> list[Remark]:
    """What drafted nothing, how many texts are equal, and what follows from it."""
    texts = [check for check in report.checks if check.compares_texts and check.tried]
    plain = [check for check in texts if check.mode != OUTSIDE]
    outside = [check for check in texts if check.mode == OUTSIDE]
    promise = f"{EXACT.get(report.exactness, report.exactness)} here ({report.exactness_why})"
    remarks = [Remark(text) for text in untried(report.checks)]
    if plain:
        why = f": this model is {promise}"
        remarks.append(Remark(equality(plain, "plain decoding's", why)))
    if outside:
        why = ": its kernels are others than ours, so that near-ties may differ"
        remarks.append(Remark(equality(outside, "those of transformers.generate", why)))
    return [*remarks, _outcome(report, texts)]


def untried(checks: Sequence[Check]) -> list[str]:
    """A line for every drafter that drafted nothing, in some checks or in all of them."""
    lines = []
    for drafter in dict.fromkeys(check.drafter for check in checks):
        own = [check for check in checks if check.drafter == drafter]
        silent = [check.mode for check in own if not check.tried]
        if len(silent) == len(own):
            lines.append(f"{drafter} drafted nothing on these prompts: it was not tried, and its texts are not counted")
        elif silent:
            modes = ", ".join(silent)
            lines.append(
                f"{drafter} drafted nothing in {modes}: it was not tried there, and those texts are not counted"
            )
    return lines


def equality(checks: Sequence[Check], whose: str, why: str) -> str:
    """How many texts are equal, and how the others differ; ``why`` follows ties."""
    prompts, identical, ties, broken, differences = (
        sum(getattr(check, name) for check in checks)
        for name in ("prompts", "identical", "ties", "broken", "differences")
    )
    if identical == prompts:
        return f"all {prompts} texts are equal to {whose}, token by token"
    parts = [f"{identical} of {prompts} texts are equal to {whose}"]
    if ties:
        parts.append(f"{_differ(ties)} from a numerical tie on ({_gaps(checks)}){why}")
    if broken:
        parts.append(f"{_differ(broken)} from a numerical tie on: a broken promise{why}")
    if differences > broken:
        parts.append(f"{_differ(differences - broken)} in a way that rounding does not explain")
    return "; ".join(parts)


def _differ(count: int) -> str:
    return f"{count} {'differs' if count == 1 else 'differ'}"


def _gaps(checks: Sequence[Check]) -> str:
    gaps = [gap for check in checks for gap in check.gaps]
    low, high = (f"{gap:.2g}" for gap in (min(gaps), max(gaps)))
    return f"logit gap {low}" if low == high else f"logit gaps {low} to {high}"


def _outcome(report: Report, texts: Sequence[Check]) -> Remark:
    """The last line.  "Passed" is said only of what was compared, and with what differs beside it."""
    far = "" if report.complete else f", and only {report.done} of {report.planned} checks were run"
    if report.differs:
        if all(check.differences == check.broken for check in report.checks):
            return Remark(f"FAILED: this model is said to be exact to the last bit, and is not{far}", "bad")
        return Remark(f"FAILED: there is a difference that rounding does not explain{far}", "bad")
    ties = sum(check.ties for check in texts)
    if not report.complete:
        seen = f"{ties} numerical tie{'' if ties == 1 else 's'}" if ties else "no difference"
        far = f"after {report.done} of {report.planned} checks"
        return Remark(f"stopped before the end, {far}: {seen} so far, the rest is not known")
    if not report.checks:
        return Remark("FAILED: nothing could be compared", "bad")
    if not any(check.drafted for check in report.checks):
        return Remark("nothing was drafted on these prompts: whether speculation changes anything was not tried")
    inside = [check for check in texts if check.mode != OUTSIDE]
    ties = sum(check.ties for check in inside)
    if ties:
        differ = f"{ties} of {sum(check.prompts for check in inside)} texts differ from plain decoding's"
        return Remark(
            f"passed up to rounding: {differ}, all of them from numerical ties on; nothing else differs", "good"
        )
    other = sum(check.ties for check in texts)
    beside = f"; {_differ(other)} from transformers.generate's texts from numerical ties on" if other else ""
    return Remark(f"passed: speculation does not change what this target says{beside}", "good")
