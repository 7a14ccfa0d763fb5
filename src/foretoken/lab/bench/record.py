"""What a benchmark keeps of a run: every round's counts and times, and the trees of a traced one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.core import RoundTimes, TokenTree, Verdict
from foretoken.engine.request import Running
from foretoken.lab.bench.costs import DraftRound
from foretoken.lab.report.show.texts import token_text

TRACED_ROUNDS = 48
"""Rounds of a trace; a long run's later rounds are left out."""

Bare = tuple[Sequence[int], Sequence[int], Sequence[bool]]
"""Tokens, parents and probes of a tree, without its distributions."""


@dataclass
class RoundRecorder:
    """An engine's ``on_round``: notes as little as possible while the clock runs, the rest is worked out later.

    Attributes:
        tracing: keep the trees of the first request too.
    """

    tracing: bool = False
    _rounds: list[tuple[list[Sequence[int]], float, float, float]] = field(default_factory=list)
    _trees: list[tuple[Bare, Verdict, float, float]] = field(default_factory=list)
    _first: int = -1

    def start(self, tracing: bool) -> None:
        """Forget the last run."""
        self.tracing, self._first = tracing, -1
        self._rounds, self._trees = [], []

    def __call__(
        self,
        runs: Sequence[Running],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        times: RoundTimes,
    ) -> None:
        """One round."""
        # Parents only: a tree holds its draft distributions, which are big.
        self._rounds.append(([tree.parents for tree in trees], times.draft_s, times.target_s, times.verify_s))
        if self.tracing:
            self._trace(runs, trees, verdicts, times)

    def _trace(
        self,
        runs: Sequence[Running],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        times: RoundTimes,
    ) -> None:
        if self._first < 0:
            self._first = runs[0].id
        if runs[0].id == self._first and len(self._trees) < TRACED_ROUNDS:
            tree = trees[0]
            self._trees.append(((tree.tokens, tree.parents, tree.probes), verdicts[0], times.draft_s, times.target_s))

    @property
    def draft_s(self) -> float:
        """Seconds in the drafter, each round of the batch counted once."""
        return sum(draft_s for _, draft_s, _, _ in self._rounds)

    @property
    def target_s(self) -> float:
        """Seconds in the target network."""
        return sum(target_s for _, _, target_s, _ in self._rounds)

    @property
    def verify_s(self) -> float:
        """Seconds in the acceptance rule."""
        return sum(verify_s for _, _, _, verify_s in self._rounds)

    @property
    def rounds(self) -> list[DraftRound]:
        """What every round drafted."""
        return [
            DraftRound(sum(map(len, parents)), max(map(_depth, parents)), draft_s)
            for parents, draft_s, _, _ in self._rounds
        ]

    def trace(self, tokenizer: Any | None) -> list[dict[str, Any]]:
        """The traced rounds, as the summary's ``traces`` hold them."""
        return [_traced(*found, tokenizer) for found in self._trees]


def _depth(parents: Sequence[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def _traced(bare: Bare, verdict: Verdict, draft_s: float, target_s: float, tokenizer: Any | None) -> dict[str, Any]:
    tree = TokenTree(bare[0], bare[1], probes=bare[2])
    status = ["root", *(["rejected"] * (len(tree) - 1))]
    for node, probe in enumerate(tree.probes):
        if probe:
            status[node] = "probe"
    for node in verdict.path:
        status[node] = "accepted"
    origin = "plain" if tree.num_drafts == 0 else "bonus" if verdict.next_is_bonus else "recovered"
    return {
        "tokens": list(tree.tokens),
        "texts": [token_text(tokenizer, token) for token in tree.tokens],
        "parents": list(tree.parents),
        "status": status,
        "next": {"token": verdict.next_token, "text": token_text(tokenizer, verdict.next_token), "origin": origin},
        "draft_ms": 1000 * draft_s,
        "target_ms": 1000 * target_s,
    }
