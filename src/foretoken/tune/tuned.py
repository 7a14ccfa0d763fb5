"""What ``foretoken tune`` is given and what it finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from foretoken.costs import RoundCosts
from foretoken.drafters.base import Drafter
from foretoken.io.files import checksum
from foretoken.loading import build_drafter
from foretoken.measure.profile import COMPARED, FORMAT, fingerprint_of, machine_of
from foretoken.tune.probe import Candidate, Workload
from foretoken.tune.reasons import why_not


@dataclass(frozen=True)
class Job:
    """What is tuned.

    Attributes:
        work: target, prompts and sampling.
        source: what the target was loaded from (decides which drafters it has).
        tokenizer, device: for drafters with models of their own.
        drafters: specs; all that the target has if none.
        minutes: time to spend; fewer prompts and shorter outputs fit into less.
        clock: tells seconds.
    """

    work: Workload
    source: Any = "builtin"
    tokenizer: Any | None = None
    device: Any = None
    drafters: Sequence[str] = ()
    minutes: float = 4.0
    clock: Callable[[], float] = perf_counter

    def settings(self) -> dict[str, Any]:
        """What must not change between the parts of one run."""
        machine = machine_of(self.work.target)
        return {
            "target": fingerprint_of(self.work.target),
            "machine": {key: machine[key] for key in COMPARED},
            "prompts": checksum(json.dumps([list(p) for p in self.work.prompts])),
            "new_tokens": self.work.new_tokens,
            "temperature": self.work.temperature,
            "drafters": list(self.drafters),
        }

    @property
    def source_name(self) -> str:
        """The source in words."""
        return str(self.source) if isinstance(self.source, str | Path) else type(self.source).__name__

    def build(self, spec: str) -> Drafter:
        """The drafter of a spec.

        Raises:
            ValueError: it does not fit the target.
        """
        built = build_drafter(
            spec, self.work.target, target_source=self.source, tokenizer=self.tokenizer, device=self.device
        )
        if built is None:
            raise ValueError(f"{spec!r} is no drafter")
        return built


@dataclass
class Outcome:
    """What was found.

    Attributes:
        job: what was tuned.
        work: what of it was decoded in the given time.
        costs: of the target and of every drafter in its best shape.
        candidates: the best configuration of each drafter, the most promising first.
        speedups: measured, by (drafter, controller).
        chosen: the fastest of those, ``None`` for plain decoding.
        skipped: drafters that were not measured, and why.
        plain_tokens_per_s: of plain decoding.
    """

    job: Job
    work: Workload
    costs: RoundCosts
    candidates: list[Candidate]
    speedups: dict[tuple[str, str], float]
    chosen: tuple[str, str] | None
    skipped: dict[str, str] = field(default_factory=dict)
    plain_tokens_per_s: float = 0.0

    @property
    def speedup(self) -> float:
        """Measured speed-up of what was chosen."""
        return self.speedups[self.chosen] if self.chosen else 1.0

    def why(self, candidate: Candidate) -> str:
        """Why a drafter loses; empty for one that pays."""
        measured = self.speedups.get((candidate.drafter, candidate.controller), candidate.predicted)
        return "" if measured > 1 else why_not(candidate, self.costs.target, self.costs.rest_s)

    def table(self) -> list[dict[str, Any]]:
        """A row per configuration, as a profile stores it."""
        found = []
        for one in self.candidates:
            ways = [c for d, c in self.speedups if d == one.drafter and c != one.controller]
            for controller in (one.controller, *ways):
                found.append(
                    {
                        "drafter": one.drafter,
                        "controller": controller,
                        "depth": one.depth,
                        "nodes": one.nodes,
                        "predicted_speedup": one.predicted,
                        "measured_speedup": self.speedups.get((one.drafter, controller)),
                        "why": self.why(one),
                    }
                )
        return found

    def profile(self) -> dict[str, Any]:
        """What ``load(profile=...)`` reads."""
        drafter, controller = self.chosen or (None, "auto")
        target = self.job.work.target
        return {
            "format": FORMAT,
            "target": {"source": self.job.source_name, "fingerprint": fingerprint_of(target)},
            "machine": machine_of(target),
            "drafter": drafter,
            "verifier": "auto",
            "controller": controller,
            "temperature": self.work.temperature,
            "prompts": len(self.work.prompts),
            "new_tokens": self.work.new_tokens,
            "speedup": self.speedup,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "costs": self.costs.as_dict(),
            "table": self.table(),
        }
