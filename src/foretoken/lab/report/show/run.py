"""Contents of a picture: a generation, its rounds, and the part of the text that each round wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretoken.lab.report.show.texts import printable, quoted, token_namer, token_texts
from foretoken.lab.report.show.why import TraceNode, nodes_of

if TYPE_CHECKING:
    from foretoken.engine.trace import RoundTrace
    from foretoken.llm import Output

HEADS = ("", "rounds", "drafted", "accepted", "rate", "tokens a round", "tokens/s", "accepted by position")


@dataclass(frozen=True)
class Word:
    """An output token: its text and origin."""

    text: str
    origin: str


@dataclass(frozen=True)
class Round:
    """One round, ready to be drawn.

    Attributes:
        trace: the engine's record of the round.
        next_token: the target's own token.
        origin: its origin: ``recovered``, ``bonus`` or ``plain``.
        words: its output tokens, truncated at the end of the text.
        total_s: seconds of the whole round; ``None`` if a trace does not say.
    """

    trace: RoundTrace
    nodes: Sequence[TraceNode]
    next_token: TraceNode
    origin: str
    words: Sequence[Word]
    total_s: float | None = None

    @property
    def drafted(self) -> int:
        """Number of draft tokens, without probes."""
        return len(self.nodes) - 1 - len(self.trace.probes)

    @property
    def caption(self) -> str:
        """The round in one line."""
        words = [f"{self.trace.drafter}: {self.drafted} drafted, {len(self.trace.accepted)} accepted"]
        if not self.drafted:
            words = ["nothing was drafted"]
        if self.trace.probes:
            words.append(f"{len(self.trace.probes)} probes")
        words.append(self.next_token.why)
        times = (("draft", self.trace.draft_s), ("target", self.trace.target_s))
        spent = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in times if seconds)
        return "; ".join([*words, spent] if spent else words)

    @property
    def reasons(self) -> list[TraceNode]:
        """Nodes with a reason: accepted and rejected ones."""
        return [node for node in self.nodes if node.status in ("accepted", "rejected")]


@dataclass(frozen=True)
class Shown:
    """A generation; ``facts`` are the names and values of its settings."""

    prompt: str
    facts: Sequence[tuple[str, str]]
    rounds: Sequence[Round]

    def best(self) -> int:
        """Index of the most informative round: with a rejection and many accepted tokens."""

        def interest(i: int) -> tuple[bool, int, int]:
            round_ = self.rounds[i]
            return any(n.status == "rejected" for n in round_.nodes), len(round_.trace.accepted), -len(round_.nodes)

        return max(range(len(self.rounds)), key=interest)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"


def shown_run(output: Output, tokenizer: Any, prompt: str, facts: Sequence[tuple[str, str]]) -> Shown:
    """A generation that was made with ``explain=True``.  Raises ``ValueError`` if it was not."""
    if not output.rounds:
        raise ValueError("nothing to show: generate with explain=True")
    texts = token_texts(tokenizer, output.token_ids, output.text)
    words = [Word(printable(text), origin) for text, origin in zip(texts, output.origins, strict=True)]
    text, rounds, at = token_namer(tokenizer), [], 0
    for trace in output.rounds:
        count = len(trace.accepted) + 1
        rounds.append(_round(trace, text, words[at : at + count]))
        at += count
    return Shown(printable(prompt), facts, rounds)


def own_meaning(origin: str, text: str, p: float | None) -> str:
    """A description of the target's own token."""
    meaning = {
        "recovered": "recovered: {} in place of what was rejected",
        "bonus": "bonus: {} on top, every draft of the path was accepted",
        "plain": "plain: {}",
    }[origin].format(quoted(text))
    return meaning if p is None else f"{meaning} (p = {p:.2g})"


def _round(trace: RoundTrace, text: Callable[[int], str], words: Sequence[Word]) -> Round:
    next_p = None if trace.verifier == "greedy" else trace.next_p
    origin = "plain" if trace.drafter == "none" else "bonus" if trace.next_is_bonus else "recovered"
    meaning = own_meaning(origin, text(trace.next_token), next_p)
    next_node = TraceNode(-1, -1, trace.next_token, text(trace.next_token), "accepted", meaning, next_p, None)
    nodes = nodes_of(trace, text)
    if trace.verifier == "greedy":  # one-hot distributions: p of 0 or 1 adds nothing to the colour
        nodes = [replace(node, p=None) for node in nodes]
    total_s = trace.draft_s + trace.target_s + trace.verify_s + trace.overhead_s
    return Round(trace, nodes, next_node, origin, words, total_s)


@dataclass(frozen=True)
class Total:
    """Totals over rounds; ``None`` if not reported.

    Attributes:
        name: of the request, or of the interval.
        drafted, accepted: draft tokens.
        tokens_per_round: accepted draft tokens and the target's own token.
        acceptance_rate: accepted over drafted.
        per_position: share of the rounds in which at least the first, second, ... draft token was accepted.
    """

    name: str
    rounds: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    tokens_per_round: float | None = None
    acceptance_rate: float | None = None
    tokens_per_s: float | None = None
    per_position: Sequence[float] = ()

    def whole(self) -> Total:
        """A copy in which missing figures are derived from others."""
        rate, length = self.acceptance_rate, self.tokens_per_round
        if rate is None and self.drafted and self.accepted is not None:
            rate = self.accepted / self.drafted
        if length is None and self.rounds and self.accepted is not None:
            length = 1.0 + self.accepted / self.rounds
        return replace(self, acceptance_rate=rate, tokens_per_round=length)

    @property
    def cells(self) -> list[str]:
        """Table cells under :data:`HEADS`, from the :meth:`whole` total."""
        whole = self.whole()
        rate, length = whole.acceptance_rate, whole.tokens_per_round
        counts = [_as(value, ".0f") for value in (self.rounds, self.drafted, self.accepted)]
        positions = " ".join(f"{share:.2f}" for share in self.per_position)
        return [self.name, *counts, _as(rate, ".0%"), _as(length, ".2f"), _as(self.tokens_per_s, ".1f"), positions]


def _as(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def total_of(name: str, run: Shown) -> Total:
    """The total of a request with known rounds."""
    accepted = [len(round_.trace.accepted) for round_ in run.rounds]
    count, deepest = len(accepted), max(accepted, default=0)
    shares = [sum(length > depth for length in accepted) / count for depth in range(deepest)]
    times = [round_.total_s for round_ in run.rounds if round_.total_s is not None]
    tokens, seconds = sum(len(round_.words) for round_ in run.rounds), sum(times)
    speed = tokens / seconds if len(times) == count and seconds > 0 else None
    drafted = sum(round_.drafted for round_ in run.rounds)
    return Total(name, count, drafted, sum(accepted), tokens_per_s=speed, per_position=tuple(shares))
