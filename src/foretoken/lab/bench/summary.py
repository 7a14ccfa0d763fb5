"""Cells and summary of a finished benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.costs import TargetCost
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.bench.results import (
    OVERALL,
    Condition,
    UnitResult,
    anchored,
    cell,
    comparable,
    drafted,
    dumps,
    positions_at,
    prediction,
    rest_s,
    round_costs,
    time_split,
)
from foretoken.lab.bench.specs import PLAIN
from foretoken.lab.parity.difference import first_difference
from foretoken.lab.prompts import BenchPrompt
from foretoken.lab.workload import inflation, target_name
from foretoken.loading.measured.machine import hardware, threads, versions

if TYPE_CHECKING:
    from foretoken.lab.bench.arms import ArmSetup
    from foretoken.lab.bench.run import Bench


@dataclass
class BenchResult:
    """A finished benchmark.

    Attributes:
        cells: one object per arm, category, temperature and batch size.
        failed: arms that were left out because their code from outside failed; ``summary["skipped"]`` says why.
    """

    cells: list[dict[str, Any]]
    summary: dict[str, Any]
    failed: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """The lines of ``run.jsonl``."""
        return [dumps(row) for row in (*self.cells, self.summary)]


def summarised(bench: Bench, where: dict[str, Any]) -> BenchResult:
    """Cells and summary of a completed benchmark; ``where`` describes the machine at the start of the run."""
    results = list(bench.results.values())
    cells, counted = tally(results, [arm.name for arm in bench.arms], bench.targets)
    summary = {
        "summary": True,
        "target": target_name(bench.shared.target, bench.shared.source),
        "machine": where,
        "runs_as": runs_as(bench.shared),
        "ran": {arm.name: arm.ran for arm in bench.arms if arm.ran is not None},
        "settings": {**bench.config, "cut_prompts": bench.num_cut},
        "inflation": inflation(bench.shared.target),
        **counted,
        "equality": [row for cell in cells if (row := _equality(bench, cell)) is not None],
        "skipped": [
            *(f"{name}: {error}" for name, error in bench.failed.items()),
            *(
                f"{arm.name} at batch {size}: it serves one request at a time"
                for size in dict.fromkeys(bench.settings.batches)
                for arm in bench.arms
                if not arm.can((0.0, size))
            ),
        ],
        "traces": traces(results, bench.prompts),
    }
    return BenchResult(cells, summary, list(bench.failed))


def tally(
    results: Sequence[UnitResult], arms: Sequence[str], targets: Mapping[int, TargetCost]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Cells, and the fields of the summary that follow from results alone.

    Args:
        results: in the order of the run, each with plain decoding's of the same unit.
        targets: costs of target calls by batch size.
    """
    plain = {r.key[1:]: r for r in results if r.arm == PLAIN}
    settings = list(dict.fromkeys(r.setting for r in results))
    pairs = [(arm, setting) for setting in settings for arm in arms if _of(results, arm, setting)]
    categories = dict.fromkeys(r.category for r in results)
    groups = [(*pair, category) for category in categories for pair in pairs if _of(results, *pair, category)]

    def compared(arm: str, setting: Condition, category: str | None = None) -> dict[str, Any]:
        drafting, base = _of(results, arm, setting, category), _of(results, PLAIN, setting)
        target = anchored(targets[setting[1]], base)
        predicted = prediction(drafting, _of(results, arm, setting), target, rest_s(base))
        return cell(drafting, [plain[r.key[1:]] for r in drafting], category or OVERALL, predicted)

    first = (settings[0][0], min(batch for _, batch in settings))
    measured = [r for r in results if r.setting == first]
    splits = {arm: time_split([r for r in results if r.arm == arm]) for arm in arms}
    return [compared(*group) for group in groups], {
        "arms": list(arms),
        "cells": len(groups),
        "costs": round_costs(measured, arms, targets[first[1]]).as_dict(),
        **positions_at(measured, arms, first),
        "rounds": {arm: split for arm, split in splits.items() if split is not None},
        "overall": [compared(*pair) for pair in pairs],
        "drafted": [drafted(_of(results, *group)) for group in groups],
        "prefill": [_prefill(_of(results, *pair)) for pair in pairs],
    }


def _of(results: Iterable[UnitResult], arm: str, setting: Condition, category: str | None = None) -> list[UnitResult]:
    return [r for r in results if r.arm == arm and r.setting == setting and category in (None, r.category)]


def _prefill(results: Sequence[UnitResult]) -> dict[str, Any]:
    """Mean prefill seconds per prompt; in other engines they include the first token."""
    arm, (temperature, batch) = results[0].arm, results[0].setting
    mean = sum(r.prefill_s for r in results) / sum(r.batch for r in results)
    return {"arm": arm, "temperature": temperature, "batch": batch, "prefill_s": mean}


def traces(
    results: Iterable[UnitResult], prompts: Mapping[str, Sequence[BenchPrompt | Sequence[int]]]
) -> list[dict[str, Any]]:
    """The recorded generations; without ``prompts`` their texts are empty."""
    recorded = []
    for result in results:
        if result.trace:
            prompt = prompts[result.category][result.prompts[0]] if prompts else ()
            recorded.append(
                {
                    "arm": result.arm,
                    "category": result.category,
                    "prompt": prompt.text if isinstance(prompt, BenchPrompt) else " ".join(map(str, prompt)),
                    "temperature": result.temperature,
                    "rounds": result.trace,
                }
            )
    return recorded


def _equality(bench: Bench, cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """Counts of a cell's outputs that equal plain decoding's, differ by a numerical tie, or really differ.

    ``None`` if they need not be equal: sampled and not coupled with plain decoding's.
    """
    arm, category, setting = cell["arm"], cell["category"], (cell["temperature"], cell["batch"])
    plain, drafting = (_of(bench.results.values(), name, setting, category) for name in (PLAIN, arm))
    if not comparable(drafting, plain):
        return None
    counts = {"identical": 0, "ties": 0, "differences": 0}
    for plain_unit, unit in zip(plain, drafting, strict=True):
        for i, (want, got) in enumerate(zip(plain_unit.outputs, unit.outputs, strict=True)):
            prompt = bench.ids[category][plain_unit.prompts[i]]
            noise = None if plain_unit.seeds is None else Noise(plain_unit.seeds[i])
            params = SamplingParams(setting[0], **bench.shared.filters)
            sampler = Sampler(params, len(prompt), noise)
            difference = first_difference(bench.shared.target, prompt, want, got, sampler)
            counts["identical" if difference is None else "ties" if difference.is_tie else "differences"] += 1
    return {"arm": arm, "category": category, "temperature": setting[0], "batch": setting[1], **counts}


def dtype_of(shared: ArmSetup) -> str:
    """The target's dtype, or the weight type of a GGUF file."""
    return str(shared.target.dtype or "float64").removeprefix("torch.")


def runs_as(shared: ArmSetup) -> dict[str, str]:
    """The target's ``forward``, ``weights`` and ``exactness``."""
    description = shared.target.describe()
    return {name: str(description[name]) for name in ("forward", "weights", "exactness")}


def machine(shared: ArmSetup) -> dict[str, Any]:
    """Versions, hardware, threads and dtype of the run."""
    return {"versions": versions(), "hardware": hardware(), "threads": threads(), "dtype": dtype_of(shared)}
