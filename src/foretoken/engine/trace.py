"""Traces of rounds for readers: the tree, the accepted path, and the probability of every draft token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from foretoken.core import RoundTimes, Scores, TokenTree, Verdict
    from foretoken.methods.verifiers.base import Verifier


class AcceptanceTest(TypedDict):
    """An acceptance test: a uniform that must be below the probability, and the tested node if the rule named it."""

    u: float
    chance: float
    node: int | None


@dataclass(frozen=True)
class RoundTrace:
    """One round of one request.

    Attributes:
        index: number of the request's round, from 0.
        tokens: of the nodes, the root first.
        parents: of the nodes, ``-1`` for the root.
        p: the target's probability of every node's token, given the nodes above it; ``None`` for the root, for probes,
            and below a node of probability 0.
        q: the draft's probability; ``None`` for tokens that were not drawn from a distribution.
        accepted: the accepted nodes, in order.
        rejected: nodes for positions where another token was taken: other children of the root and of the accepted
            nodes. Nodes below them were never examined.
        next_token: the token after the accepted path.
        next_is_bonus: whether it is a bonus token after a whole accepted path; else it replaces a rejected draft token.
        drafter: name of the drafter, or of the group member that drafted.
        verifier: the acceptance rule.
        decides_by: what the rule decides by, as in :class:`foretoken.methods.verifiers.base.Verifier`.
        tests: the rule's acceptance tests in order, as ``{"u": uniform, "chance": probability, "node": tested node}``:
            passed if u is below the probability, which is p / q in a token-by-token rule. A rule over whole paths tests
            their last nodes; a rule from outside may leave ``node`` out (``None``). Empty for greedy requests, and for
            seeded ones, whose noise is fixed.
        next_p: the target's probability of the next token, before any rejection.
        probes: nodes that were scored only for the drafter.
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
    rejected: list[int] = field(default_factory=list)
    verifier: str = ""
    decides_by: str = "tests"
    tests: list[AcceptanceTest] = field(default_factory=list)
    next_p: float | None = None
    probes: list[int] = field(default_factory=list)

    def timed(self, times: RoundTimes) -> RoundTrace:
        draft_s, target_s, verify_s, _ = times
        return replace(self, draft_s=draft_s, target_s=target_s, verify_s=verify_s, overhead_s=times.overhead_s)

    def as_dict(self) -> dict[str, Any]:
        """The trace as a dictionary for JSON."""
        return asdict(self)


def trace(
    index: int,
    tree: TokenTree,
    scores: Scores,
    verdict: Verdict,
    drafter: str,
    rule: Verifier,
    tests: Sequence[tuple[float, float, int | None]] = (),
) -> RoundTrace:
    """Trace of a round, without its times."""
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
        rejected=_rejected(tree, verdict),
        verifier=rule.name,
        decides_by=rule.decides_by,
        tests=[{"u": u, "chance": probability, "node": node} for u, probability, node in tests],
        next_p=float(scores.p(last)[verdict.next_token]),
        probes=[node for node, is_probe in enumerate(tree.probes) if is_probe],
    )


def _rejected(tree: TokenTree, verdict: Verdict) -> list[int]:
    path = (0, *verdict.path)
    drafts = [child for node in path for child in tree.children[node] if not (tree.probes and tree.probes[child])]
    return [node for node in drafts if node not in path]


def _target_probability(node: int, tree: TokenTree, scores: Scores) -> float | None:
    if tree.probes and tree.probes[node]:
        return None
    path: Sequence[int] = tree.path(node)
    probability: float | None = None
    for above, below in pairwise(path):
        if probability == 0.0:
            return None  # an impossible prefix has no distribution
        probability = float(scores.p(above)[tree.tokens[below]])
    return probability


def _draft_probability(node: int, tree: TokenTree) -> float | None:
    drawn_from = tree.distribution(node)
    return None if drawn_from is None else float(drawn_from[tree.tokens[node]])
