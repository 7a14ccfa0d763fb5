"""Minimum block size (Stern et al. 2018, https://arxiv.org/abs/1811.03115).  Lossy."""

from __future__ import annotations

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.longest import close, graded_distribution, is_forbidden, log, longest_run


class MinBlockVerifier(Verifier):
    """Accept the run of argmax tokens, but never fewer than ``min_accepted`` draft tokens (if there are as many).

    On a chain it accepts max(n, min_accepted) tokens, n being the length of the argmax run. On a tree whose longest
    argmax run is too short it keeps the target's most likely path of length ``min_accepted`` (or of the longest length,
    if none is that long). Every round emits one token more than it accepts, so ``min_accepted`` is the paper's minimum
    block size less one; 0 at temperature 0 is exact greedy.

    Args:
        min_accepted: least number of draft tokens to accept; at least 0.
        sample_next: draw the token after the accepted run from p, instead of taking its argmax.
    """

    name = "min_block"
    decides_by = "paths"
    lossless = False

    def __init__(self, min_accepted: int = 1, sample_next: bool = False) -> None:
        if min_accepted < 0:
            raise ValueError(f"min_accepted must be at least 0, not {min_accepted}")
        self.min_accepted, self.sample_next = min_accepted, sample_next

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        path = longest_run(
            tree, lambda node: graded_distribution(scores, node), lambda node, p, token: token == scores.argmax(node)
        )
        if len(path) < self.min_accepted:
            path = _likeliest_path(tree, scores, self.min_accepted)
        return close(tree, scores, coins, path, self.sample_next)


def _likeliest_path(tree: TokenTree, scores: Scores, length: int) -> tuple[int, ...]:
    """The path of ``length`` tokens (or of the longest possible length) with the largest sum of log-probabilities."""
    level = [(0.0, 0)]  # log-probability, last node
    for _ in range(length):
        following = []
        for score, node in level:
            if tree.children[node]:
                p = graded_distribution(scores, node)
                allowed = (c for c in tree.children[node] if not is_forbidden(scores, p, tree.tokens[c]))
                following += [(score + log(float(p[tree.tokens[c]])), c) for c in allowed]
        if not following:
            break
        level = following
    return tuple(tree.path(max(level, key=lambda entry: entry[0])[1])[1:])
