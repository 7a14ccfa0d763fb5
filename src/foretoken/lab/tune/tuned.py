"""Input and result of ``foretoken tune``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from foretoken.core.costs import RoundCosts
from foretoken.lab.tune.race import EngineRacer
from foretoken.lab.workload import Workload
from foretoken.loading.measured.profile import FORMAT, fingerprint_of, machine_of
from foretoken.methods.drafters.base import Drafter
from foretoken.registry import parse_spec


@dataclass(frozen=True)
class TuneJob:
    """Input of a search.

    Attributes:
        work: the target and its prompts; answers end at the model's end-of-text token.
        drafters: specs that must fit; if empty, all that the target has are tried.
        offers: further first candidates, from folders and a profile; those that do not fit are left out.
        minutes: time limit, from ``began_s`` on.
        clock: returns seconds.
        began_s: start on that clock; ``None``: the start of the search.
    """

    work: Workload
    drafters: Sequence[str] = ()
    offers: Sequence[str] = ()
    minutes: float = 4.0
    clock: Callable[[], float] = perf_counter
    began_s: float | None = None

    def build(self, spec: str) -> Drafter:
        """The drafter of a spec.  Raises ``ValueError`` if it does not fit the target."""
        built = self.work.subject.drafter(spec)
        if built is None:
            raise ValueError(f"{spec!r} is not a drafter")
        return built

    def racer(self, drafter: Drafter | None, controller: str, costs: RoundCosts | None = None) -> EngineRacer:
        """An arm that decodes these prompts."""
        return EngineRacer(self.work, drafter, controller, costs)


class Way(NamedTuple):
    """A drafter and a controller, as specs."""

    drafter: str
    controller: str

    @property
    def depth(self) -> int | None:
        """The length of every draft; ``None`` if the controller decides."""
        parsed = parse_spec(self.controller)
        return int(parsed.options["k"]) if parsed.name == "constant" else None


@dataclass(frozen=True)
class TunedRow:
    """Result of one arm.

    Attributes:
        speedup: tokens per second over plain decoding's in the same turns.
        tokens: number of new tokens behind the figures.
        compared: whether it raced in the final; otherwise it was tried briefly.
        why: reason why it loses; empty if it does not.
        differing: number of its ``texts`` that differ from plain decoding's; sampled ones may.
    """

    way: Way
    speedup: float
    tokens_per_round: float
    tokens: int
    compared: bool
    why: str = ""
    texts: int = 0
    differing: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Fields in a profile and ``--json``."""
        return {**self.way._asdict(), **{key: value for key, value in vars(self).items() if key != "way"}}


@dataclass
class Outcome:
    """Result of a search.

    Attributes:
        costs: of the target and the measured drafters.
        rows: measured arms: those of the last rung by speed, those that left the race, then those tried briefly.
        chosen: the fastest arm of the last rung, ``None`` for plain decoding.
        skipped: drafters that were not measured, with reasons.
        prompts: number of decoded prompts.
        failed: those of them whose code raised an error or broke a rule, if drafters were asked for.
        spent_s: total seconds, of which ``before_s`` passed before the search.
    """

    job: TuneJob
    costs: RoundCosts
    rows: Sequence[TunedRow]
    chosen: Way | None
    skipped: dict[str, str] = field(default_factory=dict)
    plain_tokens_per_s: float = 0.0
    prompts: int = 0
    spent_s: float = 0.0
    before_s: float = 0.0
    interrupted: bool = False
    failed: Sequence[str] = ()

    @property
    def speedup(self) -> float:
        """Measured speed-up of the chosen arm."""
        return next((row.speedup for row in self.rows if row.way == self.chosen), 1.0)

    def profile(self) -> dict[str, Any]:
        """Profile for ``load(profile=...)``."""
        drafter, controller = self.chosen or (None, "auto")
        work, source = self.job.work, self.job.work.subject.source
        name = str(source) if isinstance(source, str | Path) else type(source).__name__
        return {
            "format": FORMAT,
            "target": {"source": name, "fingerprint": fingerprint_of(work.target)},
            "machine": machine_of(work.target),
            "drafter": drafter,
            "verifier": "auto",
            "controller": controller,
            "temperature": work.temperature,
            "prompts": self.prompts,
            "new_tokens": work.new_tokens,
            "speedup": self.speedup,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "complete": not self.interrupted,
            "costs": self.costs.as_dict(),
            "table": [row.as_dict() for row in self.rows],
        }
