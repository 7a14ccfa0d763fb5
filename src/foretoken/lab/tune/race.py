"""Ways of decoding race on the same prompts, block by block in turns: a change of the machine's speed meets all.

Arms that take turns prompt by prompt differ by 8 % (standard deviation) from noise alone, those that alternate in
short blocks by less than one.
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
from foretoken.engine.request import Running
from foretoken.lab.timing import interleave
from foretoken.lab.workload import Workload
from foretoken.llm import assemble
from foretoken.methods.drafters.base import Drafter

BLOCK = 8
"""Tokens that an arm writes before the next one's turn."""
PAUSE = 4.0
"""A round counts at most as this many median rounds with as many nodes: pauses of the machine are no costs."""
TOLERANCE = 1.05
"""A round with drafts costs at least a plain one, so no speed-up is above the tokens of a round; up to noise."""
FEWEST = 8
"""Tokens that an arm must have written before its speed says anything."""


class RaceRound(NamedTuple):
    """One round of one arm.

    Attributes:
        new_tokens: how many it gave.
        nodes: rows that the target scored, the root included.
        depth: levels of the draft; 0 where nothing was guessed.
        draft_s, total_s: seconds in the drafter, and of the whole round.
        room: tokens that the answer could still take before it, one of which is the target's own.
        tokens: the new tokens, where they are known.
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
    """A target with a drafter and a controller, run round by round; without a drafter it decodes plainly.

    An answer ends at the model's end of text.  ``costs`` are what the controller starts from.
    """

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
        """Take the next prompt."""
        with unseeded_from(self._seed):  # a seed of its own would couple the drafts, and other ones be the best
            self._engine.add(self._llm.request(list(prompt), **self._options))
        self._seed, self._room = self._seed + 1, self._new_tokens

    def advance(self) -> RaceRound | None:
        """Run one round; ``None`` when the answer has ended.  Raises ``ValueError`` where the round failed."""
        if not self._engine.busy:
            return None
        ((_, emission),) = self._engine.step()
        if emission.error is not None:
            raise emission.error
        new_tokens, room = len(emission.token_ids), self._room
        self._room -= new_tokens
        return self._last_round._replace(new_tokens=new_tokens, room=room, tokens=tuple(emission.token_ids))

    def cancel(self) -> None:
        """Drop what is left of the answer."""
        self._engine.close()

    def _note(
        self, runs: Sequence[Running], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        for tree, verdict in zip(trees, verdicts, strict=True):
            self._last_round = RaceRound(
                0, len(tree), max(tree.depths), len(verdict.path), times.draft_s, times.total_s
            )


def heat(
    racers: Sequence[EngineRacer], prompt: Sequence[int], clock: Callable[[], float], until: float, most: int = 1 << 20
) -> list[list[RaceRound]]:
    """Let all arms decode a prompt in turns; the rounds of each.

    They write to the end of their answers, ``most`` tokens, or until the clock says ``until``, and have then come about
    as far in the text as each other.
    """
    laps: list[list[RaceRound]] = [[] for _ in racers]
    new_tokens = [0] * len(racers)
    try:
        for racer in racers:
            racer.begin(prompt)
        live = list(range(len(racers)))
        for turn, place in interleave(live, -(-most // BLOCK), 1):
            if clock() >= until:
                break
            while new_tokens[place] < (turn + 1) * BLOCK and clock() < until:
                round_ = racers[place].advance()
                if round_ is None:
                    live.remove(place)
                    break
                laps[place].append(round_)
                new_tokens[place] += round_.new_tokens
    finally:
        for racer in racers:
            racer.cancel()
    return laps


@dataclass
class Standing:
    """What an arm did, and what plain decoding did on the same prompts beside it.

    Attributes:
        rounds, plain: those of both.
        texts: how many there were, ``differing`` those that were not the same as far as both went.
    """

    rounds: list[RaceRound] = field(default_factory=list)
    plain: list[RaceRound] = field(default_factory=list)
    texts: int = 0
    differing: int = 0

    def add(self, rounds: Sequence[RaceRound], plain: Sequence[RaceRound]) -> None:
        """One prompt more."""
        self.rounds += rounds
        self.plain += plain
        pairs = zip(*([token for round_ in arm for token in round_.tokens] for arm in (rounds, plain)), strict=False)
        self.texts += 1
        self.differing += any(token != plain_token for token, plain_token in pairs)

    @property
    def is_known(self) -> bool:
        """Whether both have written enough to say anything."""
        return all(sum(round_.new_tokens for round_ in rounds) >= FEWEST for rounds in (self.rounds, self.plain))

    @property
    def tokens_per_round(self) -> float:
        """New tokens of a round, the target's own included."""
        return sum(round_.new_tokens for round_ in self.rounds) / max(len(self.rounds), 1)

    @property
    def measured(self) -> float:
        """Tokens per second over plain decoding's, as the clock has it."""
        return tokens_per_s(self.rounds) / tokens_per_s(self.plain)

    @property
    def speedup(self) -> float:
        """The same, and not more than can be: no arm gains more than the tokens of its rounds."""
        return min(self.measured, self.tokens_per_round)

    @property
    def is_possible(self) -> bool:
        """Whether the figures agree with each other, up to noise."""
        return self.measured <= TOLERANCE * self.tokens_per_round


def tokens_per_s(rounds: Sequence[RaceRound]) -> float:
    """New tokens per second, without the pauses of the machine; 0 where there was no round."""
    seconds = sum(steady_s(rounds))
    return sum(round_.new_tokens for round_ in rounds) / seconds if seconds > 0 else 0.0


def steady_s(rounds: Sequence[RaceRound]) -> list[float]:
    """Seconds of rounds, none of which counts more than :data:`PAUSE` medians of those with as many nodes."""
    alike: dict[int, list[float]] = defaultdict(list)
    for round_ in rounds:
        alike[round_.nodes].append(round_.total_s)
    most = {nodes: PAUSE * median(seconds) for nodes, seconds in alike.items()}
    return [min(round_.total_s, most[round_.nodes]) for round_ in rounds]
