"""Which drafter pays for a target on this machine and these prompts, found within a given time.

Every way of decoding runs in short blocks in turns with plain decoding.  Likely winners come first, each with a short
share of the time; the best ones then race each other, and half of them go on (successive halving, Jamieson and
Talwalkar 2016, https://arxiv.org/abs/1502.07943).  There is an answer at any moment.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.lab.tune.candidates import Candidate, Scouted, best_candidate, survival_of, why_not
from foretoken.lab.tune.choices import further, generous, likely, router_spec, sizes
from foretoken.lab.tune.positional import can_fill, measured_shape, sequoia_spec
from foretoken.lab.tune.race import FEWEST, EngineRacer, RaceRound, Standing, heat, steady_s, tokens_per_s
from foretoken.lab.tune.tuned import Outcome, TunedRow, TuneJob, Way
from foretoken.lab.workload import REFUSALS, reason_of
from foretoken.loading.measured.profile import measured_target
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.sources import SourceDrafter
from foretoken.registry import parse_spec

COUNTS = ((1, 2, 3, 4, 6, 8, 12, 16, 32, 64), (1, 4, 16))
"""Node counts at which v is measured, and those where a token takes long for the time there is."""
REPEATS = 3
"""Timed calls per count."""
CURVE = 0.05
"""Share of the time that measuring v may take, as far as can be told before."""
SCOUTING, LATEST, FURTHER = 0.35, 0.6, 0.45
"""Shares of the time: for the likely winners, after which none of them is begun, and none of the others."""
SCOUTED, SCOUTS = 32, 2
"""Tokens of an answer, and prompts, that a drafter is tried on."""
FINALISTS, RUNGS = 3, 2
"""Fixed ways that race each other, ``auto`` beside them; how often half of them go on."""
PAYS = 1.02
"""Speed-up below which plain decoding is chosen."""
GROUPS = ("router", "ensemble")
"""Drafters that are made of others."""
LATE = "out of time: give more --minutes"
SLOW = "too slow to be measured in its share of the time: give more --minutes"
SHORT = "the answers to all prompts together are too short: give more or others (--prompts)"

Tell = Callable[[str, float], None]
"""Told what comes next, and the share of the time that is over."""


def tune(
    job: TuneJob, tell: Tell = lambda text, share: None, on_row: Callable[[TunedRow], None] = lambda row: None
) -> Outcome:
    """Find what pays; an interrupt ends the search early, with the answer so far, if there is one.

    ``tell`` is told before every measurement, ``on_row`` of every drafter that was tried.  Raises ``ValueError`` for a
    drafter that was asked for and does not fit, and where there was no time to measure anything.
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
    """One search; :meth:`outcome` is the answer at any moment at which something was measured."""

    def __init__(self, job: TuneJob, tell: Tell, on_row: Callable[[TunedRow], None]) -> None:
        self.job, self._tell, self._on_row = job, tell, on_row
        self.scouted: dict[str, Scouted] = {}
        self.finals: dict[Way, Standing] = {}
        self.skipped: dict[str, str] = {}
        self.interrupted = False
        self._curve, self._rest_s, self._token_s = TargetCost({1: 1.0, 2: 1.0}), 0.0, 0.0
        self._plain_rounds: list[RaceRound] = []
        self._decoded: set[int] = set()
        self._built: dict[str, Drafter] = {}
        self._started_s = job.clock()
        self._began_s = self._started_s if job.began_s is None else job.began_s
        self._end_s = self._began_s + 60 * job.minutes

    def run(self) -> None:
        """All of it, as far as the time goes."""
        self._baseline()
        searched_s = self.job.clock()
        left_s = self._end_s - searched_s
        first = list(self.job.drafters) or likely(self.job.work.subject, self.job.offers)
        share_s = SCOUTING * left_s / len(first)
        for spec in first:
            self._scout(spec, share_s, searched_s + LATEST * left_s)
        if self.scouted:
            latest_s = searched_s + FURTHER * left_s
            for spec in self._shapes(share_s, latest_s):
                self._scout(spec, share_s, latest_s)
            for spec in [] if self.job.drafters else further(self.job.work.subject.source, first):
                self._scout(spec, share_s, latest_s)
            self._final()

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _baseline(self) -> None:
        """Plain decoding, and v(n), as far as there is time for them."""
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
        """Some rounds of plain decoding behind each answer's first two; several answers where they are short."""
        rounds: list[RaceRound] = []
        for prompt in self.job.work.prompts:
            rounds += _warmed(self._plain, prompt, 2 * FEWEST)[2:]
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
            return
        self._say(name)
        until = min(self.job.clock() + share_s, self._end_s)
        try:
            tried = self._tried(generous(name, is_required or name in self.job.offers), share_s)
        except REFUSALS as error:
            if is_required:
                raise
            self.skipped[name] = reason_of(error)
            return
        if not tried.standing.is_known:
            self.skipped[name] = SLOW if self.job.clock() >= until else SHORT
        elif not tried.standing.is_possible:
            self.skipped[name] = _contradiction(tried.standing)
        else:
            self.scouted[tried.spec] = tried
            self._on_row(self._scouted_row(tried))
        self._forget()

    def _tried(self, spec: str, share_s: float) -> Scouted:
        drafter = self._drafter(spec)
        depth = drafter.max_depth
        arm = self.job.racer(drafter, f"constant,k={depth}")
        until = min(self.job.clock() + share_s, self._end_s)
        _warmed(arm, self.job.work.prompts[0])
        standing = self._brief(arm, until)
        if not standing.is_known and not self.scouted:  # there is no answer yet: a few tokens in up to half of the rest
            until = self.job.clock() + max(self._end_s - self.job.clock(), 0.0) / 2
            standing.add(*self._heat([arm], 0, self.job.work.prompts[0], until, FEWEST))
        if standing.is_known and not standing.is_possible:  # a pause at a bad moment: once more
            standing = self._brief(arm, min(self.job.clock() + share_s, self._end_s))
        return Scouted(spec, depth, drafter.traits.draws_trees, isinstance(drafter, SourceDrafter), standing)

    def _brief(self, arm: EngineRacer, until: float) -> Standing:
        """Some prompts, and more of them while the answers are too short to say anything."""
        standing = Standing()
        for place, prompt in enumerate(self.job.work.prompts):
            if self.job.clock() >= until or (place >= SCOUTS and standing.is_known):
                break
            standing.add(*self._heat([arm], place, prompt, until, SCOUTED))
        return standing

    def _heat(
        self, arms: Sequence[EngineRacer], place: int, prompt: Sequence[int], until: float, most: int = 1 << 20
    ) -> list[list[RaceRound]]:
        """The rounds of some arms on a prompt, and last those of plain decoding beside them."""
        *laps, plain = heat([*arms, self._plain], prompt, self.job.clock, until, most)
        self._plain_rounds += plain
        self._decoded.add(place)
        return [*laps, plain]

    def _shapes(self, share_s: float, latest_s: float) -> Iterator[str]:
        """The trees of other sizes, or of the best shape, of drafters that are nearly the best."""
        best = max(tried.standing.speedup for tried in self.scouted.values())
        is_chosen = bool(self.job.drafters)
        # Share of the best speed-up from which on a drafter's other trees are tried
        for tried in [tried for tried in self.scouted.values() if tried.standing.speedup >= 0.7 * best]:
            if tried.trees:
                yield from sizes(tried.spec, is_chosen)
                continue
            # What it takes, at most, to see which of a draft model's choices are accepted, by its own rounds
            shape_s = SCOUTED * sum(steady_s(tried.standing.rounds)) / len(tried.standing.rounds)
            if can_fill(tried.spec) and self.job.clock() + shape_s + share_s < latest_s:
                self._say(f"{tried.spec}: which choice is accepted")
                try:
                    brief = replace(self.job.work, prompts=self.job.work.prompts[:1], new_tokens=SCOUTED)
                    shape = measured_shape(brief, self._drafter(tried.spec))
                except REFUSALS:  # it cannot grow trees, or not for this target
                    continue
                spec = sequoia_spec(tried.spec, shape, self._curve)
                yield from [] if spec is None else [spec]

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _final(self) -> None:
        """The best ways against each other: after every rung half of them go on."""
        prompts = list(enumerate(self.job.work.prompts))
        prompts = prompts[SCOUTS:] + prompts[:SCOUTS]  # first those that nothing was tried on
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
            for place, prompt in turn:
                if self.job.clock() >= until or not racing:
                    break
                *laps, plain = self._heat([arms[way] for way in racing], place, prompt, until)
                for way, rounds in zip(racing, laps, strict=True):
                    self.finals.setdefault(way, Standing()).add(rounds, plain)
            measured = [way for way in racing if way in self.finals and self.finals[way].is_known]
            racing = sorted(measured, key=lambda way: -self.finals[way].speedup)[: (len(measured) + 1) // 2]

    def _enter(self, way: Way, arms: dict[Way, EngineRacer]) -> None:
        """Build an arm and warm it up; what cannot be built takes no part."""
        try:
            arms[way] = self.job.racer(self._drafter(way.drafter), way.controller, self.costs)
        except REFUSALS as error:
            self.skipped[way.drafter] = reason_of(error)
            return
        if way.controller != "auto":  # which would learn from it
            _warmed(arms[way], self.job.work.prompts[0])

    def _candidates(self) -> list[Candidate]:
        """Every drafter in its best shape, the most promising first."""
        best: dict[tuple[str, str | None], Candidate] = {}
        for tried in self.scouted.values():
            candidate, parsed = best_candidate(tried, self._curve, self._rest_s), parse_spec(tried.spec)
            key = parsed.name, parsed.path
            if key not in best or candidate.predicted > best[key].predicted:
                best[key] = candidate
        return sorted(best.values(), key=lambda tried: -tried.predicted)

    def _group(self) -> str:
        """The best drafter with a network and the best one that copies text, of which each round takes the better."""
        ranked = self._candidates()
        pair = []
        for copies in (False, True):
            same = [candidate for candidate in ranked if self.scouted[candidate.drafter].copies is copies]
            pair += [candidate for candidate in same if parse_spec(candidate.drafter).name not in GROUPS][:1]
        if len(pair) < 2:
            return ranked[0].drafter
        per_token = [candidate.cost.seconds(candidate.depth) / candidate.depth / self._token_s for candidate in pair]
        return router_spec(pair[0].drafter, pair[1].drafter, per_token)

    @property
    def costs(self) -> RoundCosts:
        """What was measured, for a controller to start from."""
        drafters = {spec: self._cost(tried) for spec, tried in self.scouted.items()}
        return RoundCosts(self._curve, drafters, self._rest_s)

    def _cost(self, tried: Scouted) -> DrafterCost:
        """What a drafter costs by its try; what is accepted of its drafts by the race, too, which is longer."""
        raced = [
            (standing.rounds, way.depth)
            for way, standing in self.finals.items()
            if way.drafter == tried.spec and way.depth is not None
        ]
        return replace(tried.cost, survival=survival_of([(tried.standing.rounds, tried.depth), *raced]))

    # -- telling -----------------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """The answer so far."""
        rows = [self._row(way, standing, True) for way, standing in self.finals.items() if standing.is_known]
        rows = [row for row in rows if self.finals[row.way].is_possible]
        compared = {row.way.drafter for row in rows}
        brief = [self._scouted_row(tried) for tried in self.scouted.values() if tried.spec not in compared]
        rows.sort(key=lambda row: -row.speedup)
        brief.sort(key=lambda row: -row.speedup)
        now_s = self.job.clock()
        return Outcome(
            self.job,
            self.costs,
            [*rows, *brief],
            _chosen(rows or brief),
            self.skipped,
            tokens_per_s(self._plain_rounds),
            len(self._decoded),
            now_s - self._began_s,
            self._started_s - self._began_s,
            self.interrupted,
        )

    def why_nothing(self) -> str:
        """Why nothing was measured, and what to do."""
        reasons = {name: reason for name, reason in self.skipped.items() if "--minutes" not in reason}
        if reasons and len(reasons) == len(self.skipped):
            return "no drafter could be measured: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if not self._token_s and self.job.clock() < self._end_s:
            return (
                "nothing can be measured: the answers to all prompts end after a token or two; give "
                'others (--prompts), to a chat model JSON lines with "messages": lines of text get no chat template'
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
        """A drafter; one that learns across requests is built anew: it would know a prompt's answer by heart."""
        drafter = self._built.get(spec) or self.job.build(spec)
        if not drafter.traits.shares_state:
            self._built[spec] = drafter
        return drafter

    def _forget(self) -> None:
        """Keep the weights of the best drafters only."""
        best = {candidate.drafter for candidate in self._candidates()[:FINALISTS]} if self.scouted else set()
        for spec in [spec for spec in self._built if spec not in best]:
            del self._built[spec]
        gc.collect()  # a model and its lean forward hold each other


def _warmed(arm: EngineRacer, prompt: Sequence[int], count: int = 2) -> list[RaceRound]:
    """A few rounds, which are not counted: what is done once is no cost."""
    arm.begin(prompt)
    try:
        return [round_ for round_ in (arm.advance() for _ in range(count)) if round_ is not None]
    finally:
        arm.cancel()


def _contradiction(standing: Standing) -> str:
    return (
        f"its figures contradict each other ({standing.measured:.2f} of plain decoding's speed with "
        f"{standing.tokens_per_round:.2f} tokens a round): the machine is too busy, measure again when it is quiet"
    )


def _chosen(rows: Sequence[TunedRow]) -> Way | None:
    """The fastest way, or ``auto`` where it is about as fast; ``None`` where plain decoding is faster."""
    best = max(rows, key=lambda row: row.speedup)
    if best.speedup < PAYS:
        return None
    # Share of the fastest way's speed at which ``auto`` is chosen instead: it adapts to other text
    adaptive = [row.way for row in rows if row.way.controller == "auto" and row.speedup >= 0.97 * best.speedup]
    return adaptive[0] if adaptive else best.way
