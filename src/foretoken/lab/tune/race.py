"""Races of arms on the same prompts, in interleaved blocks, so that speed changes of the machine affect all.

Arms that alternate by prompt differ by 8 % (standard deviation) from noise alone, those that alternate in short blocks
by less than one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from foretoken.core import RoundTimes, TokenTree, Verdict
from foretoken.core.costs import RoundCosts
from foretoken.core.noise import unseeded_from
from foretoken.core.outside import OutsideError
from foretoken.engine.request import Running
from foretoken.lab.timing import interleave
from foretoken.lab.workload import Workload
from foretoken.llm import assemble
from foretoken.methods.drafters.base import Drafter

BLOCK = 8
"""Tokens per turn of an arm."""
TOLERANCE = 1.05
"""Noise allowance on the bound that no speed-up exceeds the tokens per round, as a drafting round costs at least a
plain one."""
FEWEST = 8
"""Minimum tokens of an arm for a speed estimate."""


class RaceRound(NamedTuple):
    """One round of one arm.

    Attributes:
        new_tokens: number of tokens it gave.
        nodes: rows that the target scored, including the root.
        depth: levels of the draft; 0 without one.
        draft_s, total_s: seconds in the drafter, and of the whole round.
        room: tokens left for the answer before the round, one of which is the target's own.
        tokens: the new tokens, if known.
    """

    new_tokens: int
    nodes: int
    depth: int
    accepted: int
    draft_s: float
    total_s: float
    room: int = 1 << 20
    tokens: tuple[int, ...] = ()


class EngineRacer:
    """A target with a controller and an optional drafter, run round by round.

    An answer ends at the model's end-of-text token.  ``costs`` are the controller's initial costs.

    Attributes:
        fault: error of a drafter from outside that ended a heat for this arm.
    """

    fault: OutsideError | None = None

    def __init__(
        self, work: Workload, drafter: Drafter | None, controller: str = "constant", costs: RoundCosts | None = None
    ) -> None:
        self.drafter = drafter
        self._llm = assemble(work.target, drafter, "auto", controller, None)
        self._engine = self._llm.engine
        self._engine.on_round = self._note
        if costs is not None and self._engine.controller is not None:
            self._engine.controller.start_from(costs)
        self._options: dict[str, Any] = {"max_new_tokens": work.new_tokens, "temperature": work.temperature}
        self._new_tokens, self._room = work.new_tokens, work.new_tokens
        self._seed, self._last_round = work.seed, RaceRound(0, 1, 0, 0, 0.0, 0.0)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start the next prompt."""
        with unseeded_from(self._seed):  # a seeded request would couple the drafts and change their ranking
            self._engine.add(self._llm.request(list(prompt), **self._options))
        self._seed, self._room = self._seed + 1, self._new_tokens

    def advance(self) -> RaceRound | None:
        """Run one round; ``None`` after the answer's end.  Raises the error of a failed round."""
        if not self._engine.busy:
            return None
        ((_, emission),) = self._engine.step()
        if emission.error is not None:
            raise emission.error
        new_tokens, room = len(emission.token_ids), self._room
        self._room -= new_tokens
        return self._last_round._replace(new_tokens=new_tokens, room=room, tokens=tuple(emission.token_ids))

    def cancel(self) -> None:
        """Cancel the rest of the answer."""
        self._engine.close()

    def _note(
        self, runs: Sequence[Running], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        for tree, verdict in zip(trees, verdicts, strict=True):
            self._last_round = RaceRound(
                0, len(tree), max(tree.depths), len(verdict.path), times.draft_s, times.total_s
            )


def warmed(arm: EngineRacer, prompt: Sequence[int], count: int = 2) -> list[RaceRound]:
    """A few uncounted rounds, so that one-time work is not measured."""
    arm.begin(prompt)
    try:
        return [round_ for round_ in (arm.advance() for _ in range(count)) if round_ is not None]
    finally:
        arm.cancel()


def heat(
    racers: Sequence[EngineRacer], prompt: Sequence[int], clock: Callable[[], float], until: float, most: int = 1 << 20
) -> list[list[RaceRound]]:
    """Decode a prompt with all arms in turns; returns the rounds of each.

    Arms stop at the end of their answers, after ``most`` tokens, or at the time ``until``, at about the same position
    in the text.  One whose drafter from outside fails stops there, and has a ``fault``.
    """
    laps: list[list[RaceRound]] = [[] for _ in racers]
    new_tokens = [0] * len(racers)
    try:
        for racer in racers:
            racer.begin(prompt)
        live = list(range(len(racers)))
        for turn, index in interleave(live, -(-most // BLOCK), 1):
            if clock() >= until:
                break
            while new_tokens[index] < (turn + 1) * BLOCK and clock() < until:
                try:
                    round_ = racers[index].advance()
                except OutsideError as error:
                    racers[index].fault, round_ = error, None
                if round_ is None:
                    live.remove(index)
                    break
                laps[index].append(round_)
                new_tokens[index] += round_.new_tokens
    finally:
        for racer in racers:
            racer.cancel()
    return laps


@dataclass
class Standing:
    """Results of an arm, and of plain decoding on the same prompts in the same turns.

    Attributes:
        rounds, plain: rounds of both.
        texts: number of answers; ``differing`` of them differ from plain decoding's in their common length.
    """

    rounds: list[RaceRound] = field(default_factory=list)
    plain: list[RaceRound] = field(default_factory=list)
    texts: int = 0
    differing: int = 0

    def add(self, rounds: Sequence[RaceRound], plain: Sequence[RaceRound]) -> None:
        """Add the rounds of one prompt."""
        self.rounds += rounds
        self.plain += plain
        pairs = zip(*([token for round_ in arm for token in round_.tokens] for arm in (rounds, plain)), strict=False)
        self.texts += 1
        self.differing += any(token != plain_token for token, plain_token in pairs)

    @property
    def is_known(self) -> bool:
        """Whether both have written enough tokens for a speed estimate."""
        return all(sum(round_.new_tokens for round_ in rounds) >= FEWEST for rounds in (self.rounds, self.plain))

    @property
    def tokens_per_round(self) -> float:
        """New tokens per round, including the target's own."""
        return sum(round_.new_tokens for round_ in self.rounds) / max(len(self.rounds), 1)

    @property
    def measured(self) -> float:
        """Measured tokens per second over plain decoding's."""
        return tokens_per_s(self.rounds) / tokens_per_s(self.plain)

    @property
    def speedup(self) -> float:
        """The measured speed-up, limited to the tokens per round, which no arm can exceed."""
        return min(self.measured, self.tokens_per_round)

    @property
    def is_possible(self) -> bool:
        """Whether the measured speed-up respects that limit, up to noise."""
        return self.measured <= TOLERANCE * self.tokens_per_round

    @property
    def contradiction(self) -> str:
        """Why the figures are not possible, with advice."""
        return (
            f"its figures contradict each other ({self.measured:.2f} of plain decoding's speed with "
            f"{self.tokens_per_round:.2f} tokens a round): the machine is too busy, measure again when it is quiet"
        )


def tokens_per_s(rounds: Sequence[RaceRound]) -> float:
    """New tokens per second, excluding pauses of the machine; 0 without rounds."""
    seconds = sum(steady_s(rounds))
    return sum(round_.new_tokens for round_ in rounds) / seconds if seconds > 0 else 0.0


def steady_s(rounds: Sequence[RaceRound], limit: float = 4.0) -> list[float]:
    """Seconds of rounds, at most ``limit`` medians of those with as many nodes: pauses of the machine are not costs."""
    alike: dict[int, list[float]] = defaultdict(list)
    for round_ in rounds:
        alike[round_.nodes].append(round_.total_s)
    most = {nodes: limit * median(seconds) for nodes, seconds in alike.items()}
    return [min(round_.total_s, most[round_.nodes]) for round_ in rounds]
