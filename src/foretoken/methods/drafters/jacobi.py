"""Jacobi decoding: score a window of guesses at once; the target's predictions are the next guesses.

Santilli et al. 2023, https://arxiv.org/abs/2305.10427.  The greedy output is the fixed point of that iteration, and
every round fixes at least one more token.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict, argmaxes, check_least
from foretoken.methods.drafters.base import Drafter, Traits


@dataclass
class _Window:
    """Guesses for the tokens after the root, and the proposal made from them."""

    tokens: list[int]
    proposed: TokenTree | None = None
    copied: int = 0  # prompt tokens used as fresh guesses so far


class JacobiDrafter(Drafter):
    """A chain of ``m`` draft tokens that is refined in every round.

    The draft depends on earlier rounds alone, so they are point masses for sampled requests, too.  With noise the
    iteration has a fixed point as in greedy decoding: the output of the seed.

    Args:
        m: guesses per round.
        init: the guess for a position that was never predicted: ``"repeat"`` (the token before it) or ``"prompt"`` (the
            prompt's tokens one after another, cyclically).
    """

    name = "jacobi"
    traits = Traits(prefers_noise=True)

    def __init__(self, m: int = 8, init: str = "repeat") -> None:
        check_least(self.name, 1, m=m)
        if init not in ("repeat", "prompt"):
            raise ValueError(f"init must be 'repeat' or 'prompt', not {init!r}")
        self.max_depth = self.max_nodes = m
        self.init = init

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """The window as a chain, within the budget."""
        window = self._window(context)
        self._refill(window, context)
        length = min(self.max_depth, budget.max_depth, budget.max_nodes)
        window.proposed = TokenTree.chain(context.root, window.tokens[:length])
        return window.proposed

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Replace every scored guess by the target's prediction, and drop those that are now committed."""
        window = self._window(context)
        count = len(verdict.path) + 1
        later = window.tokens[count:]
        is_own = window.proposed is not None and tree.nodes_in(window.proposed) is not None
        if is_own and count < len(tree):
            # Row i predicts the token i + 1 after the old root; guesses beyond the scored ones stay as they are. A
            # chain that was cut is a shorter chain with the same rows.
            fixed = scores.sampler.noise is not None and scores.sampler.context_free
            choices = [scores.choice(node) for node in range(count, len(tree))] if fixed else None
            later[: len(tree) - count] = choices or predictions(scores, count, len(tree))
        window.tokens = later
        window.proposed = None

    def _window(self, context: Context) -> _Window:
        return context.state.setdefault(self, _Window([]))

    def _refill(self, window: _Window, context: Context) -> None:
        tokens = window.tokens
        while len(tokens) < self.max_depth:
            if self.init == "repeat":
                tokens.append(tokens[-1] if tokens else context.root)
            else:
                tokens.append(context.tokens[window.copied % context.prompt_length])
                window.copied += 1


def predictions(scores: Scores, first: int, end: int) -> list[int]:
    """The target's most likely token after each of the nodes ``first`` to ``end - 1``, from the raw logits."""
    if scores.sampler.greedy and scores.sampler.context_free:  # the greedy walk has computed all of them already
        return [scores.choice(node) for node in range(first, end)]
    return argmaxes(scores.logits[first:end])[0]
