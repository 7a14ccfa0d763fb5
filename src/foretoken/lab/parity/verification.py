"""Comparison of a certificate with the same run on this machine, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.noise import SEEDS, Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.parity.certificate import Certificate, machine_here
from foretoken.lab.parity.difference import Difference, first_difference
from foretoken.lab.parity.report import Check, Report, Settings
from foretoken.loading.measured.machine import versions
from foretoken.models.base import LanguageModel
from foretoken.models.words import exactness_line


@dataclass(frozen=True)
class Line:
    """One comparison; ``text`` describes both sides."""

    name: str
    text: str
    equal: bool


@dataclass(frozen=True)
class Verification:
    """Result of repeating a certificate's run: ``verified`` if every promise holds here."""

    lines: list[Line]
    verified: bool
    outcome: str

    def public(self) -> dict[str, Any]:
        """Fields of the CLI's JSON."""
        rows = [{"name": line.name, "equal": line.equal, "text": line.text} for line in self.lines]
        return {"verified": self.verified, "outcome": self.outcome, "lines": rows}


def compare(certificate: Certificate, report: Report, settings: Settings, target: LanguageModel) -> Verification:
    """Compare a certificate with a finished run of the same checks here.

    Outputs must be equal if machine, versions and execution are the same and the model is bitwise exact.  Otherwise
    only near-ties may differ.
    """
    description = target.describe()
    facts = [
        _facts("versions", certificate.versions, versions()),
        _facts("machine", certificate.machine, machine_here()),
        _facts("model", certificate.model, description, only=("forward", "weights")),
    ]
    texts, ties, differences = _texts(certificate, report, settings, target)
    bitwise = certificate.model["exactness"] == description["exactness"] == "bitwise"
    must_be_equal = bitwise and all(line.equal for line in facts)
    lines = [
        Line("weights", "the same files, by their checksums", True),
        *facts,
        _exactness(certificate, description),
        *_checks(certificate, report),
        *texts,
    ]
    passed = bool(certificate.result["passed"]) and report.passed
    verified = passed and not differences and not (ties and must_be_equal)
    return Verification(lines, verified, _outcome(certificate, report, ties, differences, must_be_equal))


def _outcome(certificate: Certificate, report: Report, ties: int, differences: int, must_be_equal: bool) -> str:
    if not certificate.result["passed"]:
        return "NOT verified: the certified run had failed"
    if not report.passed:
        return "NOT verified: a check that passed there fails here"
    if differences:
        return f"NOT verified: {_texts_differ(differences)} in a way that rounding does not explain"
    if ties and must_be_equal:
        return f"NOT verified: {_texts_differ(ties)}, on a machine for which the same bits were promised"
    lost = certificate.model["exactness"] == "bitwise" != report.exactness
    holds = "all checks hold here" + (", but up to rounding only: equal bits are not promised" if lost else "")
    if ties:
        return f"verified up to rounding: {holds}, and {_texts_differ(ties)} from near-ties on"
    return f"verified: {holds}, and all of plain decoding's texts are equal"


def _texts_differ(count: int) -> str:
    return "1 of plain decoding's texts differs" if count == 1 else f"{count} of plain decoding's texts differ"


def _facts(name: str, certified: Mapping[str, Any], current: Mapping[str, Any], only: Sequence[str] = ()) -> Line:
    keys = only or sorted({*certified, *current})
    differing = [key for key in keys if certified.get(key) != current.get(key)]
    if not differing:
        return Line(name, "the same", True)
    parts = [f"{key} is {_as_text(certified.get(key))} there, {_as_text(current.get(key))} here" for key in differing]
    return Line(name, "; ".join(parts), False)


def _as_text(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _exactness(certificate: Certificate, current: Mapping[str, Any]) -> Line:
    certified = certificate.model
    if certified["exactness"] == current["exactness"]:
        return Line("exactness", f"{exactness_line(current)}, there and here", True)
    return Line("exactness", f"{exactness_line(certified)} there, {exactness_line(current)} here", False)


def _checks(certificate: Certificate, report: Report) -> list[Line]:
    """One line per check, by drafter and mode.  Drafters are matched by order, since paths may differ."""
    certified_checks = certificate.result["checks"]
    lines = []
    for i, check in enumerate(report.checks):
        name = f"{check.drafter}, {check.mode}"
        certified = (
            certified_checks[i] if i < len(certified_checks) and certified_checks[i]["mode"] == check.mode else None
        )
        lines.append(_check(name, certified, check))
    if len(certified_checks) > len(lines):
        lines.append(Line("checks", f"{len(certified_checks)} there, {len(lines)} here", False))
    return lines


def _check(name: str, certified: Mapping[str, Any] | None, check: Check) -> Line:
    if certified is None:
        return Line(name, "not checked there", False)
    if not check.compares_texts:
        passed = certified["differences"] == check.differences
        return Line(name, f"{_p_value(certified['p_value'])} there, {_p_value(check.p_value)} here", passed)
    counts = ("prompts", "identical", "ties", "differences")
    differing = [key for key in counts if certified[key] != getattr(check, key)]
    if not differing:
        return Line(name, f"{check.identical} of {check.prompts} texts equal, there and here", True)
    return Line(
        name, ", ".join(f"{key} {certified[key]} there and {getattr(check, key)} here" for key in differing), False
    )


def _p_value(value: float | None) -> str:
    return "broke off" if value is None else f"p = {value:.3g}"


def _texts(
    certificate: Certificate, report: Report, settings: Settings, target: LanguageModel
) -> tuple[list[Line], int, int]:
    """Lines on plain decoding's outputs there and here, and the numbers of ties and real differences."""
    lines, ties, differences = [], 0, 0
    for kind, current in (("greedy", report.plain), ("seeded", report.seeded)):
        certified = certificate.texts[kind]
        if len(certified) != len(current):
            lines.append(Line(f"{kind} texts", f"{len(certified)} there, {len(current)} here", False))
            differences += abs(len(certified) - len(current))
            continue
        notes = []
        for i, (certified_text, current_text) in enumerate(zip(certified, current, strict=True)):
            prompt = i % len(report.prompts)
            sampler = _sampler(settings, report.prompts[prompt], i if kind == "seeded" else None)
            difference = first_difference(target, report.prompts[prompt], certified_text, current_text, sampler)
            if difference is not None:
                ties, differences = ties + difference.is_tie, differences + (not difference.is_tie)
                seed = f" with seed {(settings.seed + i) % SEEDS}" if kind == "seeded" else ""
                notes.append(f"prompt {prompt}{seed} {_note(difference)}")
        if current:
            same = len(current) - len(notes)
            text = f"{same} of {len(current)} are the certificate's, token by token"
            lines.append(Line(f"{kind} texts", "; ".join([text, *notes]), not notes))
    return lines, ties, differences


def _sampler(settings: Settings, prompt: Sequence[int], index: int | None) -> Sampler:
    """The sampler that determines a greedy output, or the seeded output at index ``index``."""
    if index is None:
        return Sampler(SamplingParams(**settings.greedy), len(prompt))
    return Sampler(SamplingParams(**settings.sampling), len(prompt), Noise((settings.seed + index) % SEEDS))


def _note(difference: Difference) -> str:
    gap = "" if difference.logit_gap is None else f", logit gap {difference.logit_gap:.3g}"
    kind = "a numerical tie" if difference.is_tie else "a real difference"
    return f"differs from token {difference.position} on{gap}, {kind}"
