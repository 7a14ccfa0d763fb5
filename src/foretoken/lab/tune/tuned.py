"""What ``foretoken tune`` is given and what it finds."""

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
    """What is tuned.

    Attributes:
        work: the target and what it decodes; answers end at the model's end of text.
        drafters: specs; all that the target has if none.
        offers: further specs that are tried among the first: what folders hold, what a profile names.
        minutes: time to spend, from ``began_s`` on.
        clock: tells seconds.
        began_s: when the time began, by that clock; ``None``: when the search does.
    """

    work: Workload
    drafters: Sequence[str] = ()
    offers: Sequence[str] = ()
    minutes: float = 4.0
    clock: Callable[[], float] = perf_counter
    began_s: float | None = None

    def build(self, spec: str) -> Drafter:
        """The drafter of a spec, which must fit the target."""
        built = self.work.subject.drafter(spec)
        if built is None:
            raise ValueError(f"{spec!r} is no drafter")
        return built

    def racer(self, drafter: Drafter | None, controller: str, costs: RoundCosts | None = None) -> EngineRacer:
        """A way of decoding these prompts."""
        return EngineRacer(self.work, drafter, controller, costs)


class Way(NamedTuple):
    """A drafter and a controller, as specs."""

    drafter: str
    controller: str

    @property
    def depth(self) -> int | None:
        """The length of every draft; ``None`` where the controller decides."""
        parsed = parse_spec(self.controller)
        return int(parsed.options["k"]) if parsed.name == "constant" else None


@dataclass(frozen=True)
class TunedRow:
    """What one way did.

    Attributes:
        speedup: tokens per second over plain decoding's beside it.
        tokens: new tokens that the figures rest on.
        compared: whether it was one of the best, which ran against each other; else it was tried briefly.
        why: why it loses; empty where it does not.
        differing: of the ``texts`` that it wrote, how many are not plain decoding's; sampled ones need not be.
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
        """As a profile and ``--json`` have it."""
        return {**self.way._asdict(), **{key: value for key, value in vars(self).items() if key != "way"}}


@dataclass
class Outcome:
    """What was found.

    Attributes:
        costs: of the target and of the drafters that were measured.
        rows: the ways that were measured, the fastest first; those that were compared before those tried briefly.
        chosen: the one that pays most, ``None`` for plain decoding.
        skipped: drafters that were not measured, and why.
        prompts: how many were decoded.
        spent_s: seconds from the beginning to the end, of which ``before_s`` were over when the search began.
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

    @property
    def speedup(self) -> float:
        """Measured speed-up of what was chosen."""
        return next((row.speedup for row in self.rows if row.way == self.chosen), 1.0)

    def profile(self) -> dict[str, Any]:
        """What ``load(profile=...)`` reads."""
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
