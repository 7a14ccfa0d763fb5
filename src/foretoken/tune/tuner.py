"""Which drafter pays for a target on this machine and these prompts, how far it should draft, and why others do not.

Measure v(n) and every drafter, solve the cost model for the best configuration of each, run the best ones against
plain decoding.  Section 8 of the specification; goodput as in SmartSpec, arXiv 2406.14066.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from foretoken.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.drafters.base import Drafter
from foretoken.io.files import write_json
from foretoken.measure.profile import measured_target
from foretoken.registry import find, parse_spec, rows
from foretoken.tune.choices import (
    copies_text,
    default_specs,
    generous,
    length_key,
    router_spec,
    sizes,
    with_option,
)
from foretoken.tune.probe import Candidate, Measured, Run, best_candidate, measure_drafter
from foretoken.tune.progress import State
from foretoken.tune.tuned import Job, Outcome
from foretoken.tune.tuned_trees import can_fill, measured_shape, sequoia_spec

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Node counts at which v is measured."""
REPEATS = 7
"""Timed calls per count, interleaved."""
PROMISING = 0.7
"""Trees of other sizes are tried for drafters that reach this share of the best one."""
FINALISTS = 3
"""Configurations that are run against plain decoding."""
TURNS = 3
"""Interleaved runs of each of them."""
PAYS = 1.02
"""Measured speed-up below which plain decoding is chosen."""
ADAPTS = 0.97
"""Share of the fastest configuration's speed at which ``auto`` is chosen instead: it adapts to other text."""
SHORTEST = 48
"""Fewest new tokens per prompt to cut down to: acceptance from fewer is chance, and drafts of 16 need room."""
MEASURING = 0.6
"""Share of the time for drafters; the rest is for comparing the best ones and for loading."""
LATEST = 0.75
"""Share of the time after which no drafter is begun any more."""
FURTHER = 16
"""Measurements expected beyond one per drafter: trees of other sizes, a router."""
EFFORT = 1.3
"""A drafter's two passes in plain passes over the same prompts."""

OnProgress = Callable[[str, int, int], None]


def tune(
    job: Job, out: Path, resume: bool = False, on_progress: OnProgress = lambda text, done, total: None
) -> Outcome:
    """Measure, solve, compare, and write the profile.

    Args:
        job: what is tuned.
        out: for the profile; ``OUT.partial`` beside it keeps what is measured until the profile is written.
        resume: go on with what ``OUT.partial`` holds.
        on_progress: told what is being done, how many measurements are done, and of how many.

    Raises:
        ValueError: a drafter that was asked for does not fit, nothing could be measured, or there is a state of an
            interrupted run that is not to be resumed or of another run.
        OSError: the files cannot be written.
    """
    if not job.minutes > 0:
        raise ValueError(f"tuning needs more than {job.minutes} minutes")
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name a file for the profile")
    for spec in job.drafters:
        job.build(spec)
    out.parent.mkdir(parents=True, exist_ok=True)
    state = State.open(partial_file(out), job.settings(), resume)
    outcome = _Tuning(job, state, on_progress).run()
    write_json(out, outcome.profile())
    state.close()
    return outcome


def partial_file(out: Path) -> Path:
    """Where an unfinished run keeps what it measured."""
    return out.with_name(out.name + ".partial")


@dataclass
class _Tuning:
    """One run."""

    job: Job
    state: State
    on_progress: OnProgress
    done: int = 0
    total: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    pair: dict[str, DrafterCost] = field(default_factory=dict)  # a router's members
    built: dict[str, Drafter] = field(default_factory=dict)

    def run(self) -> Outcome:
        """All of it."""
        self.began = self.job.clock()
        specs = list(self.job.drafters) or default_specs(self.job.source)
        self.total = len(specs) + TURNS + 2
        self._baseline(len(specs))
        families = {spec: found for spec in specs if (found := self._measured(spec, generous(spec, self.given)))}
        if not families:
            raise ValueError("no drafter could be measured: " + "; ".join(f"{k}: {v}" for k, v in self.skipped.items()))
        members = {spec: self._best([one, *self._shapes(one, families)]) for spec, one in families.items()}
        candidates = [*members.values(), *self._router(families, members)]
        candidates.sort(key=lambda one: one.predicted, reverse=True)
        costs = RoundCosts(self.target, self._costs(candidates), self.rest_s)
        speedups, plain = self._compared(candidates[:FINALISTS], costs)
        return Outcome(self.job, self.work, costs, candidates, speedups, _chosen(speedups), self.skipped, plain)

    @property
    def given(self) -> bool:
        """Whether the user named the drafters."""
        return bool(self.job.drafters)

    def _step(self, text: str) -> None:
        self.on_progress(text, self.done, max(self.total, self.done + 1))
        self.done += 1

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _baseline(self, drafters: int) -> None:
        """v(n), plain decoding, and what fits into the time."""
        self._step("target calls")
        found = self.state.once("target_s", lambda: _seconds(measured_target(self.job.work.target, COUNTS, REPEATS)))
        self.target = TargetCost({int(n): s for n, s in found.items()})
        self._step("plain decoding")
        plain = Run(**self.state.once("plain", lambda: vars(self._plain())))
        self.rest_s = max(0.0, plain.round_s - self.target.of(1))
        plan = self.state.once("plan", lambda: self._plan(drafters, plain.round_s))
        self.work = self.job.work.cut(plan["prompts"], plan["new_tokens"])

    def _plain(self) -> Run:
        few = self.job.work.cut(2, self.job.work.new_tokens)
        few.cut(1, 8).rounds(None, 0, 0)
        return Run.of(few.rounds(None, 0, 0), 0)

    def _plan(self, drafters: int, token_s: float) -> dict[str, int]:
        """Prompts and new tokens that fit into the time for drafters."""
        tokens = 60 * self.job.minutes * MEASURING / ((drafters + FURTHER) * EFFORT * token_s)
        work = self.job.work
        prompts = min(max(int(tokens / work.new_tokens), 1), len(work.prompts))
        return {"prompts": prompts, "new_tokens": min(max(int(tokens / prompts), SHORTEST), work.new_tokens)}

    def _measured(self, name: str, *specs: str) -> Measured | None:
        """A drafter's runs, by the first of the specs (or its own name) that the target takes."""
        self._step(name)
        key = f"drafter {name}"
        if key not in self.state.found:
            if self._late(key):
                self.skipped[name] = "out of time: give more --minutes"
                return None
            self.state.put(key, self._attempts(list(dict.fromkeys([*specs, name]))))
        found = self.state.found[key]
        if "error" in found:
            self.skipped[name] = found["error"]
            return None
        return Measured.from_dict(found)

    def _attempts(self, specs: Sequence[str]) -> dict[str, Any]:
        reason: ValueError | None = None
        for spec in specs:
            try:
                return measure_drafter(self.work, spec, lambda: self.job.build(spec), copies_text).as_dict()  # noqa: B023
            except ValueError as error:
                reason = error
        if reason is not None and self.given and specs[-1] in self.job.drafters:
            raise reason
        return {"error": str(reason)}

    def _shapes(self, base: Measured, families: dict[str, Measured]) -> list[Measured]:
        """A promising drafter with trees of other sizes, or with the best tree for its acceptance."""
        best = max(self._best([one]).predicted for one in families.values())
        if self._best([base]).predicted < PROMISING * best:
            return []
        others = sizes(base.spec, self.given) if base.trees else self._sequoia(base)
        self.total += len(others)
        return [found for spec in others if (found := self._measured(spec))]

    def _sequoia(self, base: Measured) -> list[str]:
        """The best tree for how often a draft model's k-th choice is accepted."""
        key = f"shape {base.spec}"
        if not can_fill(base.spec) or self._late(key):
            return []
        self.total += 1
        self._step(f"{base.spec}: which choice is accepted")
        shape = self.state.once(key, lambda: self._shape(base.spec))
        spec = None if "error" in shape else sequoia_spec(base.spec, shape, self.target)
        return [] if spec is None else [spec]

    def _shape(self, spec: str) -> dict[str, Any]:
        try:
            return measured_shape(self.work, self.job.build(spec))
        except ValueError as error:  # it cannot grow trees, or not for this target
            return {"error": str(error)}

    def _late(self, key: str) -> bool:
        """Whether there is no time left for a measurement that was not made before."""
        spent = self.job.clock() - self.began
        return key not in self.state.found and spent > 60 * self.job.minutes * LATEST

    def _best(self, shapes: Sequence[Measured]) -> Candidate:
        """The best configuration of one drafter."""
        found = [best_candidate(one, self.target, self.rest_s) for one in shapes]
        return max(found, key=lambda candidate: candidate.predicted)

    def _router(self, families: dict[str, Measured], members: dict[str, Candidate]) -> list[Candidate]:
        """The best drafter with a network and the best one that copies, of which each round takes the better."""
        copying = [best for spec, best in members.items() if families[spec].copies]
        drawing = [best for spec, best in members.items() if not families[spec].copies]
        if not copying or not drawing:
            return []
        pair = [max(group, key=lambda one: one.predicted) for group in (drawing, copying)]
        names = [_shortened(one) for one in pair]
        per_token = [one.cost.seconds(one.depth) / one.depth / self.target.of(1) for one in pair]
        self.total += 1
        found = self._measured(router_spec(names[0], names[1], per_token))
        self.pair = dict(zip(names, (one.cost for one in pair), strict=True))
        return [] if found is None else [self._best([found])]

    def _costs(self, candidates: Sequence[Candidate]) -> dict[str, DrafterCost]:
        """Of every drafter, and of a router's members under the names that they have there."""
        return {**self.pair, **{one.drafter: one.cost for one in candidates}}

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compared(
        self, finalists: Sequence[Candidate], costs: RoundCosts
    ) -> tuple[dict[tuple[str, str], float], float]:
        """Medians over turns: every way's speed over plain decoding's in the same turn; and plain decoding's own."""
        ways = [(one.drafter, one.controller) for one in finalists]
        if any(row.name == "auto" for row in rows("controller")):
            ways.append((finalists[0].drafter, "auto"))
        turns = []
        for turn in range(TURNS):
            self._step(f"comparing the best {len(finalists)}, turn {turn + 1}")
            key = f"turn {turn}: " + " ".join(f"{drafter};{controller}" for drafter, controller in ways)
            turns.append(self.state.once(key, lambda: self._turn(turn, ways, costs)))  # noqa: B023
        self.on_progress("done", self.done, self.done)
        plain = [turn[0] for turn in turns]
        speedups = {way: median(turn[i] / turn[0] for turn in turns) for i, way in enumerate(ways, 1)}
        return speedups, median(plain)

    def _turn(self, turn: int, ways: Sequence[tuple[str, str]], costs: RoundCosts) -> list[float]:
        """Tokens per second of plain decoding and of every way, another one first each turn."""
        arms: list[tuple[str, str] | None] = [None, *ways]
        speeds = [0.0] * len(arms)
        for i in range(len(arms)):
            place = (turn + i) % len(arms)
            arm = arms[place]
            if arm is None:
                speeds[place] = self.work.speed(None, "constant")
            else:
                speeds[place] = self.work.speed(self._drafter(arm[0]), arm[1], costs)
        return speeds

    def _drafter(self, spec: str) -> Drafter:
        """A drafter for one pass; only one that learns across requests is built anew."""
        drafter = self.built.get(spec) or self.job.build(spec)
        if not drafter.traits.shares_state:
            self.built[spec] = drafter
        return drafter


def _seconds(cost: TargetCost) -> dict[str, float]:
    return {str(n): s for n, s in cost.seconds.items()}


def _shortened(one: Candidate) -> str:
    """The spec with the draft length that was found best, where it has such an option."""
    parsed = parse_spec(one.drafter)
    key = length_key(find("drafter", parsed.name).load())
    return one.drafter if key is None or "tree" in parsed.options else with_option(one.drafter, key, one.depth)


def _chosen(speedups: dict[tuple[str, str], float]) -> tuple[str, str] | None:
    """The fastest way, or ``auto`` where it is about as fast; ``None`` where plain decoding is faster."""
    best = max(speedups, key=lambda way: speedups[way])
    if speedups[best] < PAYS:
        return None
    adaptive = [way for way in speedups if way[1] == "auto" and speedups[way] >= ADAPTS * speedups[best]]
    return adaptive[0] if adaptive else best
