"""Cells and summary of a finished benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.bench.results import (
    OVERALL,
    Setting,
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
    """

    cells: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        """The lines of ``run.jsonl``."""
        return [dumps(found) for found in (*self.cells, self.summary)]


@dataclass(frozen=True)
class Tally:
    """Makes cells and summary of a benchmark's results.

    Attributes:
        where: the machine, as it was when the run began.
    """

    bench: Bench
    where: dict[str, Any]

    def _of(self, arm: str, setting: Setting, category: str | None = None) -> list[UnitResult]:
        found = [
            r
            for r in self.bench.results.values()
            if r.arm == arm and r.setting == setting and category in (None, r.category)
        ]
        places = {name: i for i, name in enumerate(self.bench.ids)}
        return sorted(found, key=lambda r: (places[r.category], r.unit))

    def _cell(self, arm: str, setting: Setting, category: str | None) -> dict[str, Any]:
        own, plain = self._of(arm, setting, category), self._of(PLAIN, setting, category)
        everything = self._of(arm, setting)
        base = self._of(PLAIN, setting)
        predicted = prediction(own, everything, anchored(self.bench.targets[setting[1]], base), rest_s(base))
        count = sum(len(group) for name, group in self.bench.ids.items() if category in (None, name))
        return cell(own, plain, category or OVERALL, predicted, count)

    def result(self) -> BenchResult:
        """Cells and summary."""
        settings = self.bench.settings.settings
        pairs = [(arm.name, setting) for setting in settings for arm in self.bench.arms if arm.can(setting)]
        cells = [self._cell(arm, setting, category) for category in self.bench.ids for arm, setting in pairs]
        by_arm = {arm.name: [r for s in settings for r in self._of(arm.name, s)] for arm in self.bench.arms}
        batch = min(self.bench.settings.batches)
        measured = [r for s in settings if s[1] == batch for arm in self.bench.arms for r in self._of(arm.name, s)]
        first = [r for r in measured if r.temperature == self.bench.settings.temperatures[0]]
        splits = {name: time_split(found) for name, found in by_arm.items()}
        summary = {
            "summary": True,
            "target": target_name(self.bench.shared.target, self.bench.shared.source),
            "machine": self.where,
            "runs_as": runs_as(self.bench.shared),
            "arms": self.bench.settings.names,
            "settings": {**self.bench.config, "cut_prompts": self.bench.num_cut},
            "inflation": inflation(self.bench.shared.target),
            "cells": len(cells),
            "costs": round_costs(first, self.bench.settings.names, self.bench.targets[batch]).as_dict(),
            **positions_at(first, self.bench.settings.names, (self.bench.settings.temperatures[0], batch)),
            "rounds": {name: split for name, split in splits.items() if split is not None},
            "overall": [self._cell(arm, setting, None) for arm, setting in pairs],
            "equality": list(filter(None, (self.equality(arm, s, c) for c in self.bench.ids for arm, s in pairs))),
            "drafted": [drafted(self._of(arm, s, c)) for c in self.bench.ids for arm, s in pairs],
            "prefill": [self._prefill(arm, setting) for arm, setting in pairs],
            "skipped": [
                f"{arm.name} at batch {size}: it serves one request at a time"
                for size in dict.fromkeys(self.bench.settings.batches)
                for arm in self.bench.arms
                if not arm.can((0.0, size))
            ],
            "traces": list(self._traces()),
        }
        return BenchResult(cells, summary)

    def _prefill(self, arm: str, setting: Setting) -> dict[str, Any]:
        """Mean seconds of a prompt's prefill; another engine's holds its first token."""
        found = self._of(arm, setting)
        mean = sum(r.prefill_s for r in found) / sum(len(r.prompts) for r in found)
        return {"arm": arm, "temperature": setting[0], "batch": setting[1], "prefill_s": mean}

    def _traces(self) -> Iterator[dict[str, Any]]:
        for found in self.bench.results.values():
            if found.trace:
                prompt = self.bench.prompts[found.category][found.prompts[0]]
                text = prompt.text if isinstance(prompt, BenchPrompt) else " ".join(map(str, prompt))
                yield {
                    "arm": found.arm,
                    "category": found.category,
                    "prompt": text,
                    "temperature": found.temperature,
                    "rounds": found.trace,
                }

    def equality(self, arm: str, setting: Setting, category: str) -> dict[str, Any] | None:
        """How many outputs equal plain decoding's, and which of the others rounding explains.

        ``None`` where they need not be equal: sampled, and not coupled with plain decoding's.
        """
        plain, own = self._of(PLAIN, setting, category), self._of(arm, setting, category)
        if not comparable(own, plain):
            return None
        counts = {"identical": 0, "ties": 0, "differences": 0}
        for one, other in zip(plain, own, strict=True):
            for i, (want, got) in enumerate(zip(one.outputs, other.outputs, strict=True)):
                prompt = self.bench.ids[category][one.prompts[i]]
                noise = None if one.seeds is None else Noise(one.seeds[i])
                params = SamplingParams(setting[0], **self.bench.shared.filters)
                sampler = Sampler(params, len(prompt), noise)
                found = first_difference(self.bench.shared.target, prompt, want, got, sampler)
                counts["identical" if found is None else "ties" if found.is_tie else "differences"] += 1
        return {"arm": arm, "category": category, "temperature": setting[0], "batch": setting[1], **counts}


def dtype_of(shared: ArmSetup) -> str:
    """The target's dtype, of a GGUF file what it calls its weights."""
    return str(getattr(shared.target, "dtype", "float64")).removeprefix("torch.")


def runs_as(shared: ArmSetup) -> dict[str, str]:
    """How the target is run: ``forward``, ``weights`` and ``exactness``."""
    told = shared.target.describe()
    return {name: str(told[name]) for name in ("forward", "weights", "exactness")}


def machine(shared: ArmSetup) -> dict[str, Any]:
    """Where the numbers come from."""
    return {"versions": versions(), "hardware": hardware(), "threads": threads(), "dtype": dtype_of(shared)}
