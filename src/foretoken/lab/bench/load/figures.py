"""Figures of a load test: percentiles, throughput, acceptance, errors and equality of texts."""

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


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds of values in seconds; ``None`` without values."""
    times_ms = [1000 * value for value in values if value is not None]
    if not times_ms:
        return None
    return {"mean": fmean(times_ms), **{f"p{share}": float(np.percentile(times_ms, share)) for share in (50, 90, 99)}}


def curve(values: Iterable[float | None]) -> list[float]:
    """Milliseconds at the percentiles of :data:`CURVE`."""
    times_ms = [1000 * value for value in values if value is not None]
    return np.percentile(times_ms, CURVE).round(3).tolist() if times_ms else []


def drafts_of(passes: Sequence[Pass]) -> Drafts | None:
    """Speculation counts from requests, else from the server's counters."""
    of_requests = [
        sample.drafts for pass_ in passes for sample in pass_.samples if sample.ok and sample.drafts is not None
    ]
    drafts = of_requests or [pass_.drafts for pass_ in passes if pass_.drafts is not None]
    if not drafts:
        return None
    whole = Drafts(0)
    for part in drafts:
        whole.add(part)
    return whole


def cell(passes: Sequence[Pass], baseline: Sequence[Pass], settings: LoadSettings) -> dict[str, Any]:
    """One result row: an arm at a level over all passes, compared with ``baseline``, the first arm's passes at that
    level."""
    level, arm = passes[0].level, passes[0].arm
    samples = [sample for pass_ in passes for sample in pass_.samples]
    good = [sample for sample in samples if sample.ok]
    drafts = drafts_of(passes)
    is_baseline = passes[0].arm is baseline[0].arm if baseline else True
    same = None if is_baseline or not settings.fixed else equality(passes, baseline)
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
        "seconds": sum(pass_.seconds for pass_ in passes),
        "requests_per_s": _per_second(passes, lambda pass_: sum(sample.ok for sample in pass_.samples)),
        "tokens_per_s": _per_second(passes, lambda pass_: pass_.tokens),
        "new_tokens": sum(sample.tokens for sample in good),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "ttft_ms": spread(sample.ttft_s for sample in good),
        "tpot_ms": spread(sample.tpot_s for sample in good),
        "e2e_ms": spread(sample.e2e_s for sample in good),
        "acceptance_rate": None if drafts is None else drafts.acceptance_rate,
        "mean_acceptance_length": None if drafts is None else drafts.mean_acceptance_length,
        "draft_tokens": None if drafts is None else drafts.drafted,
        "ratios": None if is_baseline else ratios(passes, baseline),
        "identical": None if same is None else not same["different"],
        "lag_ms": 1000 * max(pass_.lag_s for pass_ in passes),
    }


def _per_second(passes: Sequence[Pass], count: Any) -> float:
    """Median rate over passes, without those cut by an interrupt if a whole one exists."""
    passes = [pass_ for pass_ in passes if not pass_.cut] or passes
    return median(count(pass_) / pass_.seconds if pass_.seconds > 0 else 0.0 for pass_ in passes)


def ratios(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, float] | None:
    """Ratios to the first arm, above 1 for better: medians over passes of the same number.

    Throughput in tokens per second; latencies as the baseline's mean time over the arm's.
    """
    baseline_passes = {pass_.number: pass_ for pass_ in baseline}
    by_measure: dict[str, list[float]] = {}
    for pass_ in passes:
        base_pass = baseline_passes.get(pass_.number)
        if base_pass is None or pass_.cut or base_pass.cut:
            continue
        if base_pass.tokens and pass_.seconds > 0:
            value = pass_.tokens / pass_.seconds / (base_pass.tokens / base_pass.seconds)
            by_measure.setdefault("tokens_per_s", []).append(value)
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            mean_s, base_s = _mean(pass_.samples, name), _mean(base_pass.samples, name)
            if mean_s and base_s:
                by_measure.setdefault(name.removesuffix("_s"), []).append(base_s / mean_s)
    return {name: median(values) for name, values in by_measure.items()} or None


def _mean(samples: Sequence[Sample], name: str) -> float:
    values = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return fmean(values) if values else 0.0


def pairs(passes: Sequence[Pass], baseline: Sequence[Pass]) -> Iterator[tuple[Sample, Sample]]:
    """Completed requests, each with the same request of the baseline's pass of the same number."""
    base_samples = {
        (pass_.number, sample.number): sample for pass_ in baseline for sample in pass_.samples if sample.ok
    }
    for pass_ in passes:
        for sample in pass_.samples:
            if sample.ok and (pass_.number, sample.number) in base_samples:
                yield sample, base_samples[pass_.number, sample.number]


def equality(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, Any]:
    """Equality of texts of the same request in the same pass: number compared, number different (of those, numerical
    ties, and texts that were not examined for ties), and examples."""
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
        "ties_unknown": sum(not sample.examined for sample, _ in different),
        "examples": [_difference(sample, other) for sample, other in different[:5]],
    }


def _difference(sample: Sample, other: Sample) -> dict[str, Any]:
    pairs = zip(sample.text, other.text, strict=False)
    shorter = min(len(sample.text), len(other.text))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return {
        "request": sample.number,
        "character": index,
        "gap": sample.gap,
        "texts": [text[max(0, index - 20) : index + 20] for text in (other.text, sample.text)],
    }


def by_category(passes: Sequence[Pass]) -> dict[str, dict[str, Any]]:
    """Figures that differ by category: time per token and acceptance."""
    groups: dict[str, list[Sample]] = {}
    for pass_ in passes:
        for sample in pass_.samples:
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
    """Passes by level and arm, in the order of their start."""
    groups: dict[tuple[Level, str], list[Pass]] = {}
    for pass_ in passes:
        groups.setdefault((pass_.level, pass_.arm.name), []).append(pass_)
    return groups


def cells(arms: Sequence[ServerArm], passes: Sequence[Pass], settings: LoadSettings) -> list[dict[str, Any]]:
    """All result rows of a run."""
    groups = grouped(passes)
    lines = []
    for level in settings.levels:
        baseline = groups.get((level, arms[0].name), [])
        for arm in arms:
            arm_passes = groups.get((level, arm.name))
            if arm_passes and any(pass_.samples for pass_ in arm_passes):
                lines.append(cell(arm_passes, baseline, settings))
    return lines
