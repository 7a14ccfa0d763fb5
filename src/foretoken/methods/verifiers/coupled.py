"""Coupled sampling: target and draft race on the same noise (Daliri, Musco, Suresh 2024, arXiv 2408.07978)."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, walk_down


class CoupledVerifier(Verifier):
    """After a node, the token is the winner of the race ``argmin E_t(v) / p(v)`` on the noise of its position.

    The walk continues where a child holds it. The noise depends only on the request's seed and the position, so the
    token is independent of the candidates: any proposals are valid, grown, pruned, merged or reused in any way, and the
    output is the same with every drafter, and without one. The acceptance rate depends on the drafter, which draws its
    candidates on the same noise (:mod:`foretoken.methods.drafters.drawing`).

    At temperature 0 this is the greedy walk.
    """

    name = "coupled"
    decides_by = "choices"
    races = True
    asks_choices = True

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The race itself, on the distribution of every visited node; no random number is drawn.

        Raises:
            ValueError: the request samples without noise.
        """
        sampler = scores.sampler
        if not sampler.fixed:
            raise ValueError("the verifier 'coupled' needs the noise of a request: its sampler has none")

        def choose(node: int, children: Sequence[int]) -> int:
            p = scores.p(node).double()  # [V]
            if sampler.noise is None:
                return int(p.argmax())
            times = sampler.noise.exponentials(scores.lengths[node] - sampler.prompt_length, len(p)).to(p.device)
            return int((times / p).argmin())  # impossible tokens arrive at infinity

        return walk_down(tree, choose)

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The same by unnormalised logarithms, for all nodes at once (:meth:`foretoken.core.Scores.choice`)."""
        if not scores.sampler.fixed:
            return self.decide(tree, scores, coins)
        return walk_down(tree, lambda node, children: scores.choice(node))
