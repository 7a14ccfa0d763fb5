"""What a picture shows: a generation with its rounds, and which round wrote which part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.lab.report.show.texts import printable, quoted, token_text, token_texts
from foretoken.lab.report.show.why import Node, nodes_of, origin_of

if TYPE_CHECKING:
    from foretoken.engine.trace import RoundTrace
    from foretoken.llm import Output


@dataclass(frozen=True)
class Word:
    """A token that a round wrote: its text and where it came from."""

    text: str
    origin: str


@dataclass(frozen=True)
class Round:
    """One round, ready to be drawn.

    Attributes:
        trace: what the engine wrote down.
        nodes: the tree, the root first.
        next_token: the target's own token; ``why`` begins with its origin and a colon.
        words: what it wrote, cut where the text ends.
    """

    trace: RoundTrace
    nodes: Sequence[Node]
    next_token: Node
    words: Sequence[Word]

    @property
    def drafted(self) -> int:
        """Draft tokens, probes left out."""
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
    def reasons(self) -> list[Node]:
        """Nodes whose fate needs a reason: those that were accepted or rejected."""
        return [node for node in self.nodes if node.status in ("accepted", "rejected")]


@dataclass(frozen=True)
class Shown:
    """A generation.

    Attributes:
        prompt: its text.
        facts: what made it, name by name.
        rounds: in order.
    """

    prompt: str
    facts: Sequence[tuple[str, str]]
    rounds: Sequence[Round]

    def best(self) -> int:
        """The round that shows most: many accepted, and something rejected."""
        return max(range(len(self.rounds)), key=lambda i: _interest(self.rounds[i]))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"


def _interest(one: Round) -> tuple[bool, int, int]:
    rejected = sum(node.status == "rejected" for node in one.nodes)
    return (rejected > 0, len(one.trace.accepted), -len(one.nodes))


def shown(output: Output, tokenizer: Any, prompt: str, facts: Sequence[tuple[str, str]]) -> Shown:
    """A generation that was made with ``explain=True``.

    Raises:
        ValueError: it was not.
    """
    if not output.rounds:
        raise ValueError("nothing to show: generate with explain=True")
    texts = token_texts(tokenizer, output.token_ids, output.text)
    words = [Word(printable(text), origin) for text, origin in zip(texts, output.origins, strict=True)]
    rounds, at = [], 0
    for trace in output.rounds:
        count = len(trace.accepted) + 1
        rounds.append(_round(trace, tokenizer, words[at : at + count]))
        at += count
    return Shown(printable(prompt), facts, rounds)


def own_meaning(origin: str, text: str, p: float | None) -> str:
    """Where the target's own token came from, in words that begin with ``origin`` and a colon."""
    meaning = {
        "recovered": "recovered: {} in place of what was rejected",
        "bonus": "bonus: {} on top, every draft of the path was accepted",
        "plain": "plain: {}",
    }[origin].format(quoted(text))
    return meaning if p is None else f"{meaning} (p = {p:.2g})"


def _round(trace: RoundTrace, tokenizer: Any, words: Sequence[Word]) -> Round:
    def text(token: int) -> str:
        return token_text(tokenizer, token)

    next_p = None if trace.verifier == "greedy" else trace.next_p
    meaning = own_meaning(origin_of(trace), text(trace.next_token), next_p)
    own = Node(-1, -1, trace.next_token, text(trace.next_token), "accepted", meaning, next_p, None)
    nodes = nodes_of(trace, text)
    if trace.verifier == "greedy":  # one-hot distributions: 0 or 1 says no more than the colour
        nodes = [Node(n.index, n.parent, n.token, n.text, n.status, n.why, None, n.q) for n in nodes]
    return Round(trace, nodes, own, words)
