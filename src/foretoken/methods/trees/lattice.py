"""The likeliest prefixes of a lattice: every place of a block has its candidates, and paths go through them.

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
    """What may follow a path.

    Attributes:
        tokens: candidates, best first.
        log_probs: their log-probabilities behind the path.
        ends: per candidate, whether nothing is drafted behind it.
        state: what the next place along any of these tokens is asked with.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    ends: Sequence[bool]
    state: Any = None


def lattice(root: int, place: Callable[[Sequence[int], Any], Continuations], depth: int, nodes: int) -> Candidates:
    """The ``nodes`` likeliest prefixes of at most ``depth`` tokens, the likeliest first.

    No prefix is likelier than one that it goes on from, so that they form a tree.  Ties fall to the lower depth, then
    to the better candidate, the lower token and the earlier parent.

    Args:
        root: the last committed token.
        place: what may follow a path of drafted tokens, asked with the state of the place before (``None`` at first).
        depth: most tokens of a path.
        nodes: most nodes.
    """
    seen = Candidates([root])
    waiting: list[tuple[float, int, int, int, int]] = []  # -score, depth, rank, token, parent
    open_ends: list[tuple[Any, bool]] = [(None, depth < 1)]  # per node: state, whether it ends its path
    ranks_end: dict[tuple[int, int], bool] = {}

    def expand(node: int) -> None:
        state, ended = open_ends[node]
        if ended or seen.depths[node] >= depth:
            return
        following = place(seen.path_tokens(node), state)
        open_ends[node] = following.state, False
        for rank, (token, value) in enumerate(zip(following.tokens, following.log_probs, strict=True)):
            if value > -math.inf:
                heapq.heappush(waiting, (-(seen.scores[node] + value), seen.depths[node] + 1, rank, token, node))
                ranks_end[node, rank] = following.ends[rank]

    expand(0)
    while waiting and len(seen) <= nodes:
        score, _, rank, token, parent = heapq.heappop(waiting)
        seen.add(parent, [token], [-score])
        open_ends.append((open_ends[parent][0], ranks_end.pop((parent, rank))))
        if len(seen) <= nodes:
            expand(len(seen) - 1)
    return seen
