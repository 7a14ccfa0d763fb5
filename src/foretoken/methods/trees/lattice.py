"""The likeliest prefixes of a lattice, in which every position of a block has candidates that paths connect.

Best first, as in DFlash2's candidate lattice and JetSpec's trees (arXiv 2606.18394): the tree of the N likeliest nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.methods.trees.base import Candidates


@dataclass(frozen=True)
class Continuations:
    """Possible continuations of a path.

    Attributes:
        tokens: candidates, best first.
        ends: per candidate, whether drafting ends after it.
        state: argument for the next position along any of these tokens.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    ends: Sequence[bool]
    state: Any = None


def lattice(
    root: int,
    extend: Callable[[Sequence[int], Any], Continuations],
    depth: int,
    nodes: int,
    goes_on: Callable[[float], bool] | None = None,
) -> Candidates:
    """The ``nodes`` likeliest prefixes of at most ``depth`` tokens, the likeliest first.

    No prefix is likelier than its own prefixes, so they form a tree. Ties go to the lower depth, then to the better
    candidate, the lower token and the earlier parent.

    Args:
        root: the last committed token.
        extend: continuations of a path of draft tokens, called with the previous position's state (``None`` at first).
        goes_on: called with the next node's probability; false ends the search.
    """
    candidates = Candidates([root])
    waiting: list[tuple[float, int, int, int, int]] = []  # -score, depth, rank, token, parent
    following: list[Continuations | None] = []  # per node

    def wait(node: int, rank: int) -> None:
        """Queue the candidate of this rank after a node; later ranks are queued when it is taken."""
        continuations = following[node]
        if continuations is not None and rank < len(continuations.tokens) and continuations.log_probs[rank] > -math.inf:
            score = candidates.scores[node] + continuations.log_probs[rank]
            heapq.heappush(waiting, (-score, candidates.depths[node] + 1, rank, continuations.tokens[rank], node))

    def expand(node: int, state: Any) -> None:
        following.append(None if candidates.depths[node] >= depth else extend(candidates.path_tokens(node), state))
        wait(node, 0)

    expand(0, None)
    while waiting and len(candidates) <= nodes and (goes_on is None or goes_on(math.exp(-waiting[0][0]))):
        score, _, rank, token, parent = heapq.heappop(waiting)
        continuations: Any = following[parent]
        candidates.add(parent, [token], [-score])
        if continuations.ends[rank]:
            following.append(None)
        else:
            expand(len(candidates) - 1, continuations.state)
        wait(parent, rank + 1)
    return candidates
