"""The fastest limits of a tree that a drafter grows or selects by its own probabilities: depth, width and nodes.

Such a tree has another shape every round, so no list of positions describes it.  Its limits are raced instead, one
after the other, on the same text in interleaved blocks; that measures acceptance and the costs of both models together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from foretoken.core.io.files import write_json
from foretoken.lab.tune.choices import with_option
from foretoken.lab.tune.race import BLOCK, EngineRacer, RaceRound, heat, tokens_per_s
from foretoken.lab.tune.tree import compared, target_of
from foretoken.lab.workload import REFUSALS, Speed, Workload
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.dynamic import MOST_NODES
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.registry import find, options_of, parse_spec

DEPTHS, WIDTHS, NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16), (1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16, 32, 64)
"""Candidates for the levels of a tree, the children of a node, and the nodes."""
LEVELS = ("depth", "k")
"""Names of the option for the levels."""
TOGETHER = 3
"""Values that race against the present one at a time: each is a drafter with weights of its own."""
BETTER = 1.03
"""Speed-up over the present value from which another one replaces it: less is noise."""
CLOSE = 0.9
"""Share of the fastest speed below which a value leaves the race."""


class Raced(NamedTuple):
    """Measured figures of one setting.

    Attributes:
        drafter: its spec.
        limit: the limit that was being varied.
        prompts: number of prompts that it raced on; figures of fewer than all do not compare with the others'.
    """

    drafter: str
    limit: str
    prompts: int
    tokens_per_s: float
    mean_acceptance_length: float
    nodes: float


@dataclass(frozen=True)
class TunedLimits:
    """Result of a race of limits.

    Attributes:
        limits: options of the drafter; empty if its defaults are the fastest.
        raced: every setting, in the order of the race; the present one again beside every few others.
        speeds: measured, by arm: ``"plain"``, ``"default"`` and ``"tuned"``.
        temperature: of the measured text.
        target: ``source`` and ``fingerprint`` of the measured target.
    """

    method: str
    limits: dict[str, int]
    raced: list[Raced]
    speeds: dict[str, Speed]
    temperature: float
    target: Mapping[str, str]

    def public(self) -> dict[str, Any]:
        """Fields of the stored file and of ``--json``."""
        return {
            "format": 1,
            "method": self.method,
            "limits": self.limits,
            "temperature": self.temperature,
            "raced": [row._asdict() for row in self.raced],
            "speeds": {name: asdict(speed) for name, speed in self.speeds.items()},
            "target": dict(self.target),
        }

    def save(self, file: Path) -> None:
        """Write the file for ``tree=FILE``, atomically."""
        write_json(file, self.public())


def limits_of(cls: type[Drafter]) -> tuple[str, ...]:
    """The options that limit a class's trees: for their levels, the children of a node and the nodes; empty for a
    drafter without such trees."""
    options = options_of(cls)
    levels = next((name for name in LEVELS if name in options), "")
    grows = levels and {"width", "nodes"} <= set(options) and not issubclass(cls, HeadsDrafter)
    return (levels, "width", "nodes") if grows else ()


@dataclass
class LimitRace:
    """The race of one drafter; ``most`` are the largest values to try, by limit.

    Attributes:
        limits: the fastest ones so far, as far as they differ from those of ``spec``.
        raced: every measured setting.
        prompts: number of prompts of every drafter in the last race.
    """

    work: Workload
    spec: str
    most: Mapping[str, int]
    tell: Callable[[str], None] = lambda _: None
    limits: dict[str, int] = field(default_factory=dict)
    raced: list[Raced] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Race every limit that the spec leaves open with the others fixed, and again if these have changed since."""
        if not self._is_within(self.limits):  # the default is a larger tree
            self.limits = {**self.limits, "nodes": self.most["nodes"]}
        before: dict[str, dict[str, int]] = {}
        for limit in 2 * [limit for limit in self.most if limit not in parse_spec(self.spec).options]:
            others = {name: value for name, value in self.limits.items() if name != limit}
            if before.get(limit) != others:
                self._vary(limit)
                before[limit] = {name: value for name, value in self.limits.items() if name != limit}

    def with_limits(self, limits: Mapping[str, int]) -> str:
        """The spec with these limits."""
        spec = self.spec
        for name, value in limits.items():
            spec = with_option(spec, name, value)
        return spec

    def _vary(self, limit: str) -> None:
        """Race the values of a limit, a few at a time."""
        values: Sequence[int] = {"width": WIDTHS, "nodes": NODES}.get(limit, DEPTHS)
        others = {name: value for name, value in self.limits.items() if name != limit}
        settings = [self.limits, others, *({**others, limit: value} for value in values if value <= self.most[limit])]
        fitting = filter(self._is_within, map(self._with_room, settings))
        by_spec = {self.with_limits(limits): limits for limits in fitting}
        self.tell(f"racing {limit} of {self.spec}")
        candidates = [spec for spec in by_spec if spec != self.with_limits(self.limits)]
        for first in range(0, len(candidates), TOGETHER):
            self._race(limit, candidates[first : first + TOGETHER], by_spec)

    def _race(self, limit: str, specs: Sequence[str], by_spec: Mapping[str, dict[str, int]]) -> None:
        """Race a few values against the present one; the fastest takes its place if it is clearly faster."""
        present = self.with_limits(self.limits)
        rounds, last = self._rounds([present, *specs])
        if not rounds:
            return
        rates = {spec: tokens_per_s(laps) for spec, laps in rounds.items()}
        self.raced += [_row(spec, limit, self.prompts[spec], laps) for spec, laps in rounds.items()]
        # Numbers of nodes that no draft has reached differ by noise alone.  Equal trees of other limits may differ in
        # the time of drafting them.
        different = [spec for spec in last if limit != "nodes" or _drafts(rounds[spec]) != _drafts(rounds[present])]
        best = max(different, key=lambda spec: rates[spec], default=present)
        if rates[best] >= BETTER * rates[present]:
            self.limits = by_spec[best]

    def _with_room(self, limits: dict[str, int]) -> dict[str, int]:
        """The limits, with nodes for at least one whole path if their number is fixed: others would be no deeper."""
        nodes = self._nodes(limits)
        levels = max((value for name, value in limits.items() if name in LEVELS), default=0)
        if nodes is None or "nodes" in parse_spec(self.spec).options or nodes >= levels:
            return limits
        return {**limits, "nodes": levels}

    def _is_within(self, limits: Mapping[str, int]) -> bool:
        """Whether no tree with these limits has more nodes than the largest to try."""
        nodes = self._nodes(limits)
        return (MOST_NODES if nodes is None else nodes) <= self.most["nodes"]

    def _nodes(self, limits: Mapping[str, int]) -> int | None:
        """Maximum nodes of a tree with these limits; ``None``: as many as pay off."""
        parsed = parse_spec(self.spec)
        default: int | None = options_of(find("drafter", parsed.name).load())["nodes"].default
        return limits.get("nodes", int(parsed.options["nodes"]) if "nodes" in parsed.options else default)

    def _rounds(self, specs: Sequence[str]) -> tuple[dict[str, list[RaceRound]], list[str]]:
        """The rounds of every drafter that can be built, in interleaved blocks after an unmeasured one each, and the
        drafters that raced on all prompts: far slower ones than the present and the best leave after a prompt.  Nothing
        if only one can be built."""
        present, arms = self.with_limits(self.limits), dict[str, EngineRacer]()
        for spec in specs:
            try:
                arms[spec] = EngineRacer(self.work, self.work.subject.drafter(spec))
            except REFUSALS:  # a block is not as long, or the target cannot score trees
                if spec == present:
                    raise
        if len(arms) < 2:
            return {}, []
        rounds: dict[str, list[RaceRound]] = {spec: [] for spec in arms}
        self.prompts = dict.fromkeys(arms, 0)
        heat(list(arms.values()), self.work.prompts[0], perf_counter, math.inf, BLOCK)
        for prompt in self.work.prompts:
            laps = heat(list(arms.values()), prompt, perf_counter, math.inf)
            for spec, lap in zip(arms, laps, strict=True):
                rounds[spec] += lap
                self.prompts[spec] += 1
            rates = {spec: tokens_per_s(rounds[spec]) for spec in arms}
            enough = CLOSE * max(rates.values())
            arms = {spec: arm for spec, arm in arms.items() if rates[spec] >= enough or spec == present}
        return rounds, list(arms)


def _drafts(rounds: Sequence[RaceRound]) -> list[tuple[int, int]]:
    return [(round_.nodes, round_.new_tokens) for round_ in rounds]


def _row(spec: str, limit: str, prompts: int, rounds: Sequence[RaceRound]) -> Raced:
    count = max(len(rounds), 1)
    tokens, nodes = sum(round_.new_tokens for round_ in rounds), sum(round_.nodes - 1 for round_ in rounds)
    return Raced(spec, limit, prompts, tokens_per_s(rounds), tokens / count, nodes / count)


def tune(
    work: Workload, spec: str, nodes: int, levels: int, tell: Callable[[str], None] = lambda _: None
) -> TunedLimits:
    """Race the limits of a drafter that its spec leaves open, up to ``nodes`` and ``levels``, and compare the fastest
    with the default.  Raises ``ValueError`` for a spec that leaves none open, has more nodes, or has a tree."""
    name = parse_spec(spec).name
    if "tree" in parse_spec(spec).options:
        raise ValueError(f"{spec!r} has a tree already: leave tree out to tune its limits")
    names = limits_of(find("drafter", name).load())
    if not set(names) - set(parse_spec(spec).options):
        raise ValueError(f"{spec!r} sets {', '.join(names)}: leave out those to tune")
    given = int(parse_spec(spec).options.get("nodes", 0))
    if given > nodes:
        raise ValueError(f"{spec!r} has more nodes than --max-nodes {nodes}: leave nodes={given} out, or allow as many")
    race = LimitRace(work, spec, dict(zip(names, (levels, nodes, nodes), strict=True)), tell)
    race.run()
    tell("comparing")
    default, tuned = (work.subject.drafter(arm) for arm in (spec, race.with_limits(race.limits)))
    speeds = compared(work, default, tuned if race.limits else default)
    return TunedLimits(name, race.limits, race.raced, speeds, work.temperature, target_of(work))
