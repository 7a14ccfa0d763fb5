"""Cells and summary of a finished benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def tally(bench: Bench, where: dict[str, Any]) -> BenchResult:
    """Cells and summary of a completed benchmark; ``where`` describes the machine at the start of the run."""
    settings = bench.settings.settings
    pairs = [(arm.name, setting) for setting in settings for arm in bench.arms if arm.can(setting)]
    cells = [_cell(bench, arm, setting, category) for category in bench.ids for arm, setting in pairs]
    by_arm = {arm.name: [r for s in settings for r in _of(bench, arm.name, s)] for arm in bench.arms}
    batch = min(bench.settings.batches)
    measured = [r for s in settings if s[1] == batch for arm in bench.arms for r in _of(bench, arm.name, s)]
    first = [r for r in measured if r.temperature == bench.settings.temperatures[0]]
    splits = {name: time_split(results) for name, results in by_arm.items()}
    names = [arm.name for arm in bench.arms]
    summary = {
        "summary": True,
        "target": target_name(bench.shared.target, bench.shared.source),
        "machine": where,
        "runs_as": runs_as(bench.shared),
        "arms": names,
        "ran": {arm.name: arm.ran for arm in bench.arms if arm.ran is not None},
        "settings": {**bench.config, "cut_prompts": bench.num_cut},
        "inflation": inflation(bench.shared.target),
        "cells": len(cells),
        "costs": round_costs(first, names, bench.targets[batch]).as_dict(),
        **positions_at(first, names, (bench.settings.temperatures[0], batch)),
        "rounds": {name: split for name, split in splits.items() if split is not None},
        "overall": [_cell(bench, arm, setting, None) for arm, setting in pairs],
        "equality": list(filter(None, (equality(bench, arm, s, c) for c in bench.ids for arm, s in pairs))),
        "drafted": [drafted(_of(bench, arm, s, c)) for c in bench.ids for arm, s in pairs],
        "prefill": [_prefill(bench, arm, setting) for arm, setting in pairs],
        "skipped": [
            *(f"{name}: {error}" for name, error in bench.failed.items()),
            *(
                f"{arm.name} at batch {size}: it serves one request at a time"
                for size in dict.fromkeys(bench.settings.batches)
                for arm in bench.arms
                if not arm.can((0.0, size))
            ),
        ],
        "traces": list(_traces(bench)),
    }
    return BenchResult(cells, summary, list(bench.failed))


def _of(bench: Bench, arm: str, setting: Condition, category: str | None = None) -> list[UnitResult]:
    results = [
        r for r in bench.results.values() if r.arm == arm and r.setting == setting and category in (None, r.category)
    ]
    order = {name: i for i, name in enumerate(bench.ids)}
    return sorted(results, key=lambda r: (order[r.category], r.unit))


def _cell(bench: Bench, arm: str, setting: Condition, category: str | None) -> dict[str, Any]:
    drafting, plain = _of(bench, arm, setting, category), _of(bench, PLAIN, setting, category)
    everything = _of(bench, arm, setting)
    base = _of(bench, PLAIN, setting)
    predicted = prediction(drafting, everything, anchored(bench.targets[setting[1]], base), rest_s(base))
    count = sum(len(group) for name, group in bench.ids.items() if category in (None, name))
    return cell(drafting, plain, category or OVERALL, predicted, count)


def _prefill(bench: Bench, arm: str, setting: Condition) -> dict[str, Any]:
    """Mean prefill seconds per prompt; in other engines they include the first token."""
    results = _of(bench, arm, setting)
    mean = sum(r.prefill_s for r in results) / sum(r.batch for r in results)
    return {"arm": arm, "temperature": setting[0], "batch": setting[1], "prefill_s": mean}


def _traces(bench: Bench) -> Iterator[dict[str, Any]]:
    for result in bench.results.values():
        if result.trace:
            prompt = bench.prompts[result.category][result.prompts[0]]
            text = prompt.text if isinstance(prompt, BenchPrompt) else " ".join(map(str, prompt))
            yield {
                "arm": result.arm,
                "category": result.category,
                "prompt": text,
                "temperature": result.temperature,
                "rounds": result.trace,
            }


def equality(bench: Bench, arm: str, setting: Condition, category: str) -> dict[str, Any] | None:
    """Counts of outputs that equal plain decoding's, differ by a numerical tie, or really differ.

    ``None`` if they need not be equal: sampled and not coupled with plain decoding's.
    """
    plain, drafting = _of(bench, PLAIN, setting, category), _of(bench, arm, setting, category)
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
