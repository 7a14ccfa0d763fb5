"""From requests to figures: percentiles, throughput, acceptance, errors, and whether texts are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from foretoken.lab.bench.load.client import Drafts, Sample
from foretoken.lab.bench.load.drive import Pass
from foretoken.lab.bench.load.settings import LARGEST_TIE, Level, LoadSettings, ServerArm

CURVE = tuple(range(0, 101, 2))
"""Percentiles of a curve."""
EXAMPLES = 5
"""Differences that are told."""


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds of values in seconds; nothing of no values."""
    known = [1000 * value for value in values if value is not None]
    if not known:
        return None
    return {"mean": fmean(known), **{f"p{share}": float(np.percentile(known, share)) for share in (50, 90, 99)}}


def curve(values: Iterable[float | None]) -> list[float]:
    """Milliseconds at the percentiles of :data:`CURVE`."""
    known = [1000 * value for value in values if value is not None]
    return np.percentile(known, CURVE).round(3).tolist() if known else []


def drafts_of(passes: Sequence[Pass]) -> Drafts | None:
    """What was drafted: as requests say, else as the server's counters do."""
    told = [sample.drafts for one in passes for sample in one.samples if sample.ok and sample.drafts is not None]
    drafts = told or [one.drafts for one in passes if one.drafts is not None]
    if not drafts:
        return None
    whole = Drafts(0)
    for one in drafts:
        whole.add(one)
    return whole


def cell(passes: Sequence[Pass], baseline: Sequence[Pass], settings: LoadSettings) -> dict[str, Any]:
    """One line of the run: an arm at a level, all passes together, beside those of the first arm at the same level (for
    the first arm itself, its own)."""
    level, arm = passes[0].level, passes[0].arm
    samples = [sample for one in passes for sample in one.samples]
    good = [sample for sample in samples if sample.ok]
    drafts = drafts_of(passes)
    own = passes[0].arm is baseline[0].arm if baseline else True
    same = None if own or not settings.fixed else equality(passes, baseline)
    return {
        "load": level.shape,
        "level": level.value,
        "burst": level.burst,
        "arm": arm.name,
        "category": "all",
        "temperature": settings.temperature,
        "batch": 1,
        "requests": len(samples),
        "completed": len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error)),
        "seconds": sum(one.seconds for one in passes),
        "requests_per_s": _per_second(passes, lambda one: sum(sample.ok for sample in one.samples)),
        "tokens_per_s": _per_second(passes, lambda one: one.tokens),
        "new_tokens": sum(sample.tokens for sample in good),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "ttft_ms": spread(sample.ttft_s for sample in good),
        "tpot_ms": spread(sample.tpot_s for sample in good),
        "e2e_ms": spread(sample.e2e_s for sample in good),
        "acceptance_rate": None if drafts is None else drafts.acceptance_rate,
        "mean_acceptance_length": None if drafts is None else drafts.mean_acceptance_length,
        "draft_tokens": None if drafts is None else drafts.drafted,
        "ratios": None if own else ratios(passes, baseline),
        "identical": None if same is None else not same["different"],
        "lag_ms": 1000 * max(one.lag_s for one in passes),
    }


def _per_second(passes: Sequence[Pass], count: Any) -> float:
    """The median over passes."""
    return median(count(one) / one.seconds if one.seconds > 0 else 0.0 for one in passes)


def ratios(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, float] | None:
    """How many times as good as the first arm, above 1 is better: the median over passes of the same number.

    Tokens per second for throughput; mean times, the baseline's over the arm's, for latencies.
    """
    others = {one.number: one for one in baseline}
    by_measure: dict[str, list[float]] = {}
    for one in passes:
        other = others.get(one.number)
        if other is None or one.cut or other.cut:
            continue
        if other.tokens and one.seconds > 0:
            value = one.tokens / one.seconds / (other.tokens / other.seconds)
            by_measure.setdefault("tokens_per_s", []).append(value)
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            own, base = _mean(one.samples, name), _mean(other.samples, name)
            if own and base:
                by_measure.setdefault(name.removesuffix("_s"), []).append(base / own)
    return {name: median(values) for name, values in by_measure.items()} or None


def _mean(samples: Sequence[Sample], name: str) -> float:
    known = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return fmean(known) if known else 0.0


def pairs(passes: Sequence[Pass], baseline: Sequence[Pass]) -> Iterator[tuple[Sample, Sample]]:
    """Requests that ended well, and beside each the same one in the baseline's pass of the same number."""
    others = {(one.number, sample.number): sample for one in baseline for sample in one.samples if sample.ok}
    for one in passes:
        for sample in one.samples:
            if sample.ok and (one.number, sample.number) in others:
                yield sample, others[one.number, sample.number]


def equality(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, Any]:
    """Texts of the same request in the same pass: how many were compared, how many differ (of those: how many by a
    numerical tie, where the server was asked), and some that do."""
    compared = list(pairs(passes, baseline))
    different = [
        (sample, other)
        for sample, other in compared
        if sample.text != other.text or sample.finish_reason != other.finish_reason
    ]
    return {
        "compared": len(compared),
        "different": len(different),
        "ties": sum(sample.gap is not None and sample.gap <= LARGEST_TIE for sample, _ in different),
        "examples": [_difference(sample, other) for sample, other in different[:EXAMPLES]],
    }


def _difference(sample: Sample, other: Sample) -> dict[str, Any]:
    pairs = zip(sample.text, other.text, strict=False)
    shorter = min(len(sample.text), len(other.text))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return {
        "request": sample.number,
        "character": place,
        "gap": sample.gap,
        "texts": [text[max(0, place - 20) : place + 20] for text in (other.text, sample.text)],
    }


def by_category(passes: Sequence[Pass]) -> dict[str, dict[str, Any]]:
    """What differs between categories: time per token and acceptance."""
    groups: dict[str, list[Sample]] = {}
    for one in passes:
        for sample in one.samples:
            if sample.ok:
                groups.setdefault(sample.category, []).append(sample)
    figures: dict[str, dict[str, Any]] = {}
    for category, samples in groups.items():
        whole = Drafts(0)
        for sample in samples:
            if sample.drafts is not None:
                whole.add(sample.drafts)
        figures[category] = {
            "completed": len(samples),
            "tpot_ms": spread(sample.tpot_s for sample in samples),
            "acceptance_rate": whole.acceptance_rate,
            "mean_acceptance_length": whole.mean_acceptance_length,
        }
    return figures


def grouped(passes: Sequence[Pass]) -> Mapping[tuple[Level, str], list[Pass]]:
    """Passes of the same arm at the same level, in the order in which they began."""
    groups: dict[tuple[Level, str], list[Pass]] = {}
    for one in passes:
        groups.setdefault((one.level, one.arm.name), []).append(one)
    return groups


def cells(arms: Sequence[ServerArm], passes: Sequence[Pass], settings: LoadSettings) -> list[dict[str, Any]]:
    """All lines of the run."""
    groups = grouped(passes)
    lines = []
    for level in settings.levels:
        baseline = groups.get((level, arms[0].name), [])
        for arm in arms:
            own = groups.get((level, arm.name))
            if own and any(one.samples for one in own):
                lines.append(cell(own, baseline, settings))
    return lines
