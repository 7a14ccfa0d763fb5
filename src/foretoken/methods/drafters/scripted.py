"""Proposes given tokens: for tests, demonstrations and measuring a perfect or a useless drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foretoken.core import Budget, Context, TokenTree
from foretoken.methods.drafters.base import Drafter, Traits


class ScriptedDrafter(Drafter):
    """Drafts tokens from a script.

    Args:
        tokens: space-separated token ids (or a sequence of ids) that are proposed as a chain every round.
        as_output: read ``tokens`` as the whole expected output, so that the proposal continues at the current position.
        propose: a function ``(context, budget) -> tree`` instead of tokens.
    """

    name = "scripted"
    traits = Traits(rewinds=True, learns=False, only_for="tests and demonstrations")

    def __init__(
        self,
        tokens: str = "",
        as_output: bool = False,
        propose: Callable[[Context, Budget], TokenTree] | None = None,
        script: Sequence[int] | None = None,
    ) -> None:
        try:
            self.tokens = list(script) if script is not None else [int(t) for t in tokens.split()]
        except ValueError:
            raise ValueError(f"scripted tokens must be ids separated by spaces, not {tokens!r}") from None
        self.as_output = as_output
        self._propose = propose
        self.traits = replace(self.traits, draws_trees=propose is not None)  # a function may propose anything

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        if self._propose is not None:
            return self._propose(context, budget)
        start = len(context.tokens) - context.prompt_length if self.as_output else 0
        return TokenTree.chain(context.root, self.tokens[start : start + min(budget.max_depth, budget.max_nodes)])
