"""Time-limited search for the drafter that pays for a target on this machine and these prompts.

Every arm runs in short blocks in turns with plain decoding.  Likely winners come first, each with a short share of the
time.  The best then race each other and are halved (successive halving, Jamieson and Talwalkar 2016,
https://arxiv.org/abs/1502.07943).  A result is available at any time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.core.outside import OutsideError
from foretoken.core.values import one_line
from foretoken.lab.tune.candidates import Candidate, Scouted, best_candidate, survival_of, why_not
from foretoken.lab.tune.choices import further, generous, likely, router_spec, sizes
from foretoken.lab.tune.positional import can_fill, measured_shape, sequoia_spec
from foretoken.lab.tune.race import FEWEST, EngineRacer, RaceRound, Standing, heat, steady_s, tokens_per_s, warmed
from foretoken.lab.tune.tuned import Outcome, TunedRow, TuneJob, Way
from foretoken.lab.workload import REFUSALS
from foretoken.loading.measured.profile import measured_target
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.sources import SourceDrafter
from foretoken.registry import parse_spec

COUNTS = ((1, 2, 3, 4, 6, 8, 12, 16, 32, 64), (1, 4, 16))
"""Node counts for measuring v, and fewer of them for slow targets."""
REPEATS = 3
"""Timed calls per count."""
CURVE = 0.05
"""Share of the time for measuring v, as estimated beforehand."""
SCOUTING, LATEST, FURTHER = 0.35, 0.6, 0.45
"""Shares of the time: for the likely winners, and the latest starts of these and of others."""
SCOUTED, SCOUTS = 32, 2
"""Tokens per answer, and prompts, for trying a drafter."""
FINALISTS, RUNGS = 3, 2
"""Number of fixed configurations that race each other, beside ``auto``; number of rounds of halving."""
PAYS = 1.02
"""Speed-up below which plain decoding is chosen."""
LATE = "out of time: give more --minutes"

Tell = Callable[[str, float], None]
"""Called with the next step and the elapsed share of the time."""


def tune(
    job: TuneJob, tell: Tell = lambda text, share: None, on_row: Callable[[TunedRow], None] = lambda row: None
) -> Outcome:
    """Find the fastest drafter; an interrupt ends the search early, with the result so far, if any.

    ``tell`` is called before every measurement, ``on_row`` for every tried drafter.  Raises ``ValueError`` for a
    requested drafter that does not fit, and if there was no time to measure anything.
    """
    if not (job.minutes > 0 and math.isfinite(job.minutes)):
        raise ValueError(f"--minutes must be above 0, not {job.minutes:g}")
    search = Search(job, tell, on_row)
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.scouted:
            raise
        search.interrupted = True
    if not search.scouted:
        raise ValueError(search.why_nothing())
    return search.outcome()


class Search:
    """One search; :meth:`outcome` is available once something was measured."""

    def __init__(self, job: TuneJob, tell: Tell, on_row: Callable[[TunedRow], None]) -> None:
        self.job, self._tell, self._on_row = job, tell, on_row
        self.scouted: dict[str, Scouted] = {}
        self.finals: dict[Way, Standing] = {}
        self._last: list[Way] = []  # the arms of the last rung
        self.skipped: dict[str, str] = {}
        self._failed: list[str] = []
        self._out_of_time: set[str] = set()
        self.interrupted = False
        self._curve, self._rest_s, self._token_s = TargetCost({1: 1.0, 2: 1.0}), 0.0, 0.0
        self._plain_rounds: list[RaceRound] = []
        self._decoded: set[int] = set()
        self._built: dict[str, Drafter] = {}
        self._started_s = job.clock()
        self._began_s = self._started_s if job.began_s is None else job.began_s
        self._end_s = self._began_s + 60 * job.minutes

    def run(self) -> None:
        """Run all stages, as far as time allows."""
        self._baseline()
        searched_s = self.job.clock()
        left_s = self._end_s - searched_s
        drafters, offers = self.job.drafters, self.job.offers
        first = list(dict.fromkeys([*drafters, *offers])) if drafters else likely(self.job.work.subject, offers)
        share_s = SCOUTING * left_s / len(first)
        for spec in first:
            self._scout(spec, share_s, searched_s + LATEST * left_s)
        if self.scouted:
            latest_s = searched_s + FURTHER * left_s
            for spec in self._shapes(share_s, latest_s):
                self._scout(spec, share_s, latest_s)
            for spec in [] if drafters else further(self.job.work.subject.source, first):
                self._scout(spec, share_s, latest_s)
            self._final()

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _baseline(self) -> None:
        """Measure plain decoding and v(n), as far as time allows."""
        self._say("plain decoding")
        self._plain = self.job.racer(None, "constant")
        if self.job.clock() >= self._end_s:
            return
        self._token_s = median([round_.total_s for round_ in self._first_rounds()] or [0.0])
        left_s = self._end_s - self.job.clock()
        for counts in COUNTS:
            if sum(1 + n / 16 for n in counts) * (REPEATS + 1) * self._token_s < CURVE * left_s:
                self._say("target calls")
                self._curve = measured_target(self.job.work.target, counts, REPEATS)
                break
        else:
            self._curve = TargetCost({1: self._token_s, 2: self._token_s})
        self._rest_s = max(0.0, self._token_s - self._curve.of(1))

    def _first_rounds(self) -> list[RaceRound]:
        """Some rounds of plain decoding after each answer's first two; from several answers if they are short."""
        rounds: list[RaceRound] = []
        for prompt in self.job.work.prompts:
            rounds += warmed(self._plain, prompt, 2 * FEWEST)[2:]
            if len(rounds) >= FEWEST or self.job.clock() >= self._end_s:
                break
        return rounds

    def _scout(self, name: str, share_s: float, latest_s: float) -> None:
        """Try a drafter for its share of the time."""
        is_required = name in self.job.drafters
        if name in self.scouted or name in self.skipped:
            return
        if self.job.clock() >= latest_s or not self._token_s:
            self.skipped[name] = LATE
            self._out_of_time.add(name)
            return
        self._say(name)
        until = min(self.job.clock() + share_s, self._end_s)
        try:
            tried = self._tried(generous(name, is_required or name in self.job.offers), share_s)
        except REFUSALS as error:
            if is_required and not isinstance(error, OutsideError):
                raise
            self._drop(name, error)
            return
        if not tried.standing.is_known:
            if self.job.clock() >= until:
                self.skipped[name] = "too slow to be measured in its share of the time: give more --minutes"
                self._out_of_time.add(name)
            else:
                self.skipped[name] = (
                    "the outputs for all prompts together are too short: give more or other prompts (--prompts)"
                )
        elif not tried.standing.is_possible:
            self.skipped[name] = tried.standing.contradiction
        else:
            self.scouted[tried.spec] = tried
            self._on_row(self._scouted_row(tried))
        self._forget()

    def _tried(self, spec: str, share_s: float) -> Scouted:
        drafter = self._drafter(spec)
        depth = drafter.max_depth
        arm = self.job.racer(drafter, f"constant,k={depth}")
        until = min(self.job.clock() + share_s, self._end_s)
        warmed(arm, self.job.work.prompts[0])
        standing = self._brief(arm, until)
        if not standing.is_known and not self.scouted:  # no result yet: a few tokens, in up to half of the rest
            until = self.job.clock() + max(self._end_s - self.job.clock(), 0.0) / 2
            standing.add(*self._heat([arm], 0, self.job.work.prompts[0], until, FEWEST))
        if standing.is_known and not standing.is_possible:  # a pause at a bad moment: try again
            standing = self._brief(arm, min(self.job.clock() + share_s, self._end_s))
        if arm.fault is not None:
            raise arm.fault
        return Scouted(spec, depth, drafter.traits.draws_trees, isinstance(drafter, SourceDrafter), standing)

    def _brief(self, arm: EngineRacer, until: float) -> Standing:
        """Race on some prompts, and on more while the answers are too short for an estimate."""
        standing = Standing()
        for index, prompt in enumerate(self.job.work.prompts):
            if self.job.clock() >= until or (index >= SCOUTS and standing.is_known):
                break
            standing.add(*self._heat([arm], index, prompt, until, SCOUTED))
        return standing

    def _heat(
        self, arms: Sequence[EngineRacer], index: int, prompt: Sequence[int], until: float, most: int = 1 << 20
    ) -> list[list[RaceRound]]:
        """The rounds of some arms on a prompt, and last those of plain decoding in the same turns."""
        *laps, plain = heat([*arms, self._plain], prompt, self.job.clock, until, most)
        self._plain_rounds += plain
        self._decoded.add(index)
        return [*laps, plain]

    def _shapes(self, share_s: float, latest_s: float) -> Iterator[str]:
        """Trees of other sizes, or of the best shape, for nearly-best drafters."""
        best = max(tried.standing.speedup for tried in self.scouted.values())
        is_chosen = bool(self.job.drafters)
        # Share of the best speed-up at which a drafter's other trees are tried
        for tried in [tried for tried in self.scouted.values() if tried.standing.speedup >= 0.7 * best]:
            if tried.trees:
                yield from sizes(tried.spec, is_chosen)
                continue
            # Upper estimate of the time for measuring a draft model's acceptance by rank, from its own rounds
            shape_s = SCOUTED * sum(steady_s(tried.standing.rounds)) / len(tried.standing.rounds)
            if can_fill(tried.spec) and self.job.clock() + shape_s + share_s < latest_s:
                self._say(f"{tried.spec}: which choice is accepted")
                try:
                    brief = replace(self.job.work, prompts=self.job.work.prompts[:1], new_tokens=SCOUTED)
                    shape = measured_shape(brief, self._drafter(tried.spec))
                except REFUSALS:  # it cannot draft trees, or not for this target
                    continue
                spec = sequoia_spec(tried.spec, shape, self._curve)
                yield from [] if spec is None else [spec]

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _final(self) -> None:
        """Race the best configurations against each other; half of them continue after every rung."""
        prompts = list(enumerate(self.job.work.prompts))
        prompts = prompts[SCOUTS:] + prompts[:SCOUTS]  # untried prompts first
        racing = [Way(candidate.drafter, candidate.controller) for candidate in self._candidates()[:FINALISTS]]
        racing.append(Way(self._group(), "auto"))
        arms: dict[Way, EngineRacer] = {}
        for rung in range(RUNGS):
            until = self.job.clock() + (self._end_s - self.job.clock()) / (RUNGS - rung)
            last = len(prompts) if rung == RUNGS - 1 else (len(prompts) + 1) // 2
            turn, prompts = prompts[:last], prompts[last:]
            self._say(f"comparing {', '.join(way.drafter for way in racing)}")
            for way in racing:
                if way not in arms and self.job.clock() < until:
                    self._enter(way, arms)
            racing = [way for way in racing if way in arms]
            for index, prompt in turn:
                if self.job.clock() >= until or not racing:
                    break
                *laps, plain = self._heat([arms[way] for way in racing], index, prompt, until)
                self._last = racing
                for way, rounds in zip(racing, laps, strict=True):
                    self.finals.setdefault(way, Standing()).add(rounds, plain)
                racing = [way for way in racing if not self._has_failed(way, arms[way])]
            measured = [way for way in racing if way in self.finals and self.finals[way].is_known]
            racing = sorted(measured, key=lambda way: -self.finals[way].speedup)[: (len(measured) + 1) // 2]

    def _enter(self, way: Way, arms: dict[Way, EngineRacer]) -> None:
        """Build an arm and warm it up; one that cannot be built is skipped."""
        try:
            arm = self.job.racer(self._drafter(way.drafter), way.controller, self.costs)
            if way.controller != "auto":  # an auto controller would learn from it
                warmed(arm, self.job.work.prompts[0])
            arms[way] = arm
        except REFUSALS as error:
            self._drop(way.drafter, error)

    def _has_failed(self, way: Way, arm: EngineRacer) -> bool:
        if arm.fault is not None:
            self._drop(way.drafter, arm.fault)
        return arm.fault is not None

    def _drop(self, spec: str, error: Exception) -> None:
        """Leave a drafter out, with what was measured of it."""
        self.skipped[spec] = one_line(error)
        self.scouted.pop(spec, None)
        self.finals = {way: standing for way, standing in self.finals.items() if way.drafter != spec}
        if isinstance(error, OutsideError) and self.job.drafters:
            self._failed.append(spec)

    def _candidates(self) -> list[Candidate]:
        """Every drafter in its best shape, in descending order of predicted speed-up."""
        best: dict[tuple[str, str | None], Candidate] = {}
        for tried in self.scouted.values():
            candidate, parsed = best_candidate(tried, self._curve, self._rest_s), parse_spec(tried.spec)
            key = parsed.name, parsed.path
            if key not in best or candidate.predicted > best[key].predicted:
                best[key] = candidate
        return sorted(best.values(), key=lambda tried: -tried.predicted)

    def _group(self) -> str:
        """A router over the best drafter with a network and the best one that copies text."""
        ranked, composed = self._candidates(), ("router", "ensemble")
        pair = []
        for copies in (False, True):
            same = [candidate for candidate in ranked if self.scouted[candidate.drafter].copies is copies]
            pair += [candidate for candidate in same if parse_spec(candidate.drafter).name not in composed][:1]
        if len(pair) < 2:
            return ranked[0].drafter
        per_token = [candidate.cost.seconds(candidate.depth) / candidate.depth / self._token_s for candidate in pair]
        return router_spec(pair[0].drafter, pair[1].drafter, per_token)

    @property
    def costs(self) -> RoundCosts:
        """Measured costs, as a controller's initial costs."""
        drafters = {spec: self._cost(tried) for spec, tried in self.scouted.items()}
        return RoundCosts(self._curve, drafters, self._rest_s)

    def _cost(self, tried: Scouted) -> DrafterCost:
        """Cost of a drafter from its trial; its acceptance also from the race, which is longer."""
        raced = [
            (standing.rounds, way.depth)
            for way, standing in self.finals.items()
            if way.drafter == tried.spec and way.depth is not None
        ]
        return replace(tried.cost, survival=survival_of([(tried.standing.rounds, tried.depth), *raced]))

    # -- reporting ---------------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """The result so far."""
        rows = [self._row(way, standing, True) for way, standing in self.finals.items() if standing.is_known]
        rows = [row for row in rows if self.finals[row.way].is_possible]
        compared = {row.way.drafter for row in rows}
        brief = [self._scouted_row(tried) for tried in self.scouted.values() if tried.spec not in compared]
        # Figures of arms that left rest on fewer prompts, perhaps on easier ones
        last = [row for row in rows if row.way in self._last]
        rows.sort(key=lambda row: (row not in last, -row.speedup))
        brief.sort(key=lambda row: -row.speedup)
        now_s = self.job.clock()
        return Outcome(
            self.job,
            self.costs,
            [*rows, *brief],
            _chosen(last or rows or brief),
            self.skipped,
            tokens_per_s(self._plain_rounds),
            len(self._decoded),
            now_s - self._began_s,
            self._started_s - self._began_s,
            self.interrupted,
            self._failed,
        )

    def why_nothing(self) -> str:
        """Reason why nothing was measured, with advice."""
        reasons = {name: reason for name, reason in self.skipped.items() if name not in self._out_of_time}
        if reasons and len(reasons) == len(self.skipped):
            return "no drafter could be measured: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if not self._token_s and self.job.clock() < self._end_s:
            return (
                "nothing can be measured: the outputs for all prompts end after a token or two; give other "
                'prompts (--prompts), for a chat model JSON lines with "messages": lines of text get no chat template'
            )
        before_s = self._started_s - self._began_s
        spent = f"loading took {before_s:.1f} s" + (f", a token {1e3 * self._token_s:.0f} ms" * (self._token_s > 0))
        enough = (before_s + 16 * SCOUTS * SCOUTED * self._token_s + 2.0) / 60
        minutes = max(math.ceil(10 * enough) / 10, math.ceil(20 * self.job.minutes) / 10)
        return (
            f"--minutes {self.job.minutes:g} is too little to measure anything ({spent}): give --minutes {minutes:g} "
            "or more"
        )

    def _scouted_row(self, tried: Scouted) -> TunedRow:
        return self._row(Way(tried.spec, f"constant,k={tried.depth}"), tried.standing, False)

    def _row(self, way: Way, standing: Standing, compared: bool) -> TunedRow:
        tokens = sum(round_.new_tokens for round_ in standing.rounds)
        texts = (standing.texts, standing.differing)
        row = TunedRow(way, standing.speedup, standing.tokens_per_round, tokens, compared, "", *texts)
        if row.speedup > 1 or way.drafter not in self.scouted:
            return row
        candidate = best_candidate(self.scouted[way.drafter], self._curve, self._rest_s)
        return replace(row, why=why_not(candidate, self._curve, self._rest_s))

    def _say(self, text: str) -> None:
        self._tell(text, (self.job.clock() - self._began_s) / (self._end_s - self._began_s))

    # -- drafters ----------------------------------------------------------------------------------------------------

    def _drafter(self, spec: str) -> Drafter:
        """A drafter, rebuilt each time if it learns across requests: it would otherwise know a prompt's answer."""
        drafter = self._built.get(spec) or self.job.build(spec)
        if not drafter.traits.shares_state:
            self._built[spec] = drafter
        return drafter

    def _forget(self) -> None:
        """Free all drafters except the best."""
        best = {candidate.drafter for candidate in self._candidates()[:FINALISTS]} if self.scouted else set()
        for spec in [spec for spec in self._built if spec not in best]:
            del self._built[spec]
        gc.collect()  # a model and its lean forward form a reference cycle


def _chosen(rows: Sequence[TunedRow]) -> Way | None:
    """The fastest configuration, or ``auto`` if it is about as fast; ``None`` if plain decoding is faster."""
    best = max(rows, key=lambda row: row.speedup)
    if best.speedup < PAYS:
        return None
    # Share of the fastest speed at which ``auto`` is preferred, as it adapts to other texts
    adaptive = [row.way for row in rows if row.way.controller == "auto" and row.speedup >= 0.97 * best.speedup]
    return adaptive[0] if adaptive else best.way
