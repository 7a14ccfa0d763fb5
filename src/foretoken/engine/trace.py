"""What happened in a round, for a reader: the tree, what was accepted, and how likely every guess was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypedDict

from torch import Tensor

from foretoken.types import Rng, Scores, TokenTree, Verdict
from foretoken.verifiers.base import Coins, Verifier, draw


class Toss(TypedDict):
    """One test of an acceptance rule: passed if ``u * den < num``, which has the probability min(1, num / den)."""

    u: float
    num: float
    den: float
    passed: bool


@dataclass(frozen=True)
class RoundTrace:
    """One round of one request.

    Attributes:
        index: which round of the request, from 0.
        tokens: of the nodes, the root first.
        parents: of the nodes, ``-1`` for the root.
        p: the target's probability of every node's token, given the nodes above it; ``None`` for the root, for probes,
            and below a node whose token the target refused.
        q: the draft's; ``None`` for tokens that were not drawn from a distribution.
        accepted: the nodes that were accepted, in order.
        next_token: the token after them.
        next_is_bonus: whether it is one on top of a whole accepted path; else it replaces a rejected draft.
        drafter: who drafted.
        verifier: the acceptance rule.
        tosses: its tests in order; empty for rules that test nothing at random.
        next_p: the target's probability of the next token, before anything was rejected.
        probes: nodes that were scored for the drafter alone.
        draft_s, target_s, verify_s, overhead_s: seconds of the round, those of the whole batch.
    """

    index: int
    tokens: list[int]
    parents: list[int]
    p: list[float | None]
    q: list[float | None]
    accepted: list[int]
    next_token: int
    next_is_bonus: bool
    drafter: str
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    verifier: str = ""
    tosses: list[Toss] = field(default_factory=list)
    next_p: float | None = None
    probes: list[int] = field(default_factory=list)

    def timed(self, draft_s: float, target_s: float, verify_s: float, total_s: float) -> RoundTrace:
        """The round with its times, of which what is left of the whole is overhead."""
        rest = total_s - draft_s - target_s - verify_s
        return replace(self, draft_s=draft_s, target_s=target_s, verify_s=verify_s, overhead_s=rest)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Witness(Rng):
    """A request's stream of uniforms that keeps a list of what was taken in a round."""

    def __init__(self, rng: Rng) -> None:
        self._rng, self.taken = rng, list[float]()

    def uniform(self) -> float:
        """A fresh uniform in [0, 1)."""
        self.taken.append(self._rng.uniform())
        return self.taken[-1]


class _Replay(Coins):
    """The coins of a round that is over, tossed again with a note of each test."""

    def __init__(self, taken: Sequence[float]) -> None:
        self._left, self.tosses = list(taken), list[Toss]()

    def accept(self, num: float, den: float = 1.0) -> bool:
        u = self._left.pop(0)
        passed = u * den < num
        self.tosses.append({"u": u, "num": num, "den": den, "passed": passed})
        return passed

    def accept_lazily(self, bound: float, chance: Any) -> bool:
        return self.accept(chance())

    def draw(self, law: Tensor) -> int:
        return draw(law, self._left.pop(0))


def tosses_of(tree: TokenTree, scores: Scores, verdict: Verdict, rule: Verifier, taken: Sequence[float]) -> list[Toss]:
    """The tests of a round, by running the rule's plain form again with the uniforms that it took."""
    if not taken:
        return []
    coins = _Replay(taken)
    try:
        again = rule.decide(tree, scores, coins)
    except IndexError:  # a rule that takes its uniforms in another order than its plain form
        return []
    return coins.tosses if list(again.path) == list(verdict.path) else []


def trace(
    index: int, tree: TokenTree, scores: Scores, verdict: Verdict, drafter: str, rule: Verifier, taken: Sequence[float]
) -> RoundTrace:
    """The round without its times; ``taken`` are the uniforms that the rule has used."""
    last = verdict.path[-1] if verdict.path else 0
    return RoundTrace(
        index,
        list(tree.tokens),
        list(tree.parents),
        [None, *(_target_probability(node, tree, scores) for node in range(1, len(tree)))],
        [None, *(_draft_probability(node, tree) for node in range(1, len(tree)))],
        list(verdict.path),
        verdict.next_token,
        verdict.next_is_bonus,
        drafter if tree.num_drafts else "none",
        verifier=rule.name,
        tosses=tosses_of(tree, scores, verdict, rule, taken),
        next_p=float(scores.p(last)[verdict.next_token]),
        probes=[node for node, is_probe in enumerate(tree.probes) if is_probe],
    )


def _target_probability(node: int, tree: TokenTree, scores: Scores) -> float | None:
    if tree.probes and tree.probes[node]:
        return None
    path: Sequence[int] = tree.path(node)
    probability: float | None = None
    for above, below in pairwise(path):
        if probability == 0.0:
            return None  # a prefix that cannot be has no distribution
        probability = float(scores.p(above)[tree.tokens[below]])
    return probability


def _draft_probability(node: int, tree: TokenTree) -> float | None:
    drawn_from = tree.law(node)
    return None if drawn_from is None else float(drawn_from[tree.tokens[node]])
