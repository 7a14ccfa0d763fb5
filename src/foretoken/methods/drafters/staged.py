"""Staged speculative decoding (Spector, Ré 2023, https://arxiv.org/abs/2308.04623): the draft is a tree, and the draft
model that writes it is itself sped up by a cheaper drafter.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from foretoken.core import Kind, TokenTree
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter, Chain, Rule
from foretoken.methods.drafters.drawing import best, draw_without_replacement
from foretoken.models.base import LanguageModel


class StagedDrafter(CascadeDrafter):
    """A chain written as in ``cascade``, the spine, with siblings of every token from the distribution that it was
    drawn from.

    The siblings cost no forward: the model has scored every place of the spine already.

    Args:
        model: the draft model.
        inner: guesses what the model will write.
        rule: verifies these guesses, for example :func:`foretoken.methods.verifiers.compatibility.inner_rule`.
        k: length of the spine.
        width: tokens per place, that of the spine included; the others are leaves.
        target: the model that is drafted for, as in :class:`~foretoken.methods.drafters.model.ModelDrafter`.

    Raises:
        ValueError: an option outside its range, or a drafter that cannot work inside another one.
        CapabilityError: the model cannot score and keep trees.
    """

    name = "staged"

    def __init__(
        self,
        model: LanguageModel,
        inner: Drafter,
        rule: Rule,
        k: int = 8,
        width: int = 3,
        target: LanguageModel | None = None,
    ) -> None:
        if width < 1:
            raise ValueError(f"staged needs width >= 1, not {width}")
        super().__init__(model, inner, rule, k, target=target)
        self.width = width
        self.max_nodes = k * width
        if width > 1:  # the token of the spine is drawn first, its siblings after it with earlier ones removed
            self.traits = replace(self.traits, kind=Kind.WITHOUT_REPLACEMENT, draws_trees=True)

    def _finished(self, chain: Chain) -> TokenTree:
        spine = super()._finished(chain)
        tokens, parents, q_rows = list(spine.tokens), list(spine.parents), list(spine.q_rows)
        # The budget is shared out by the length that was planned, not by the one that a stop left, so that how many
        # siblings a place gets depends on nothing that was drawn.  Early places come first: they are reached oftener.
        spare = chain.budget.max_nodes - chain.length
        for place in range(len(spine) - 1):
            count = max(min(self.width - 1, spare), 0)
            spare -= count
            siblings = self._siblings(chain, place, count)
            tokens += siblings
            parents += [place] * len(siblings)
            if q_rows:
                q_rows += [q_rows[place + 1]] * len(siblings)
        kind = spine.kind if spine.q is None else self.traits.kind
        return TokenTree(tuple(tokens), tuple(parents), kind, spine.q, tuple(q_rows))

    def _siblings(self, chain: Chain, place: int, count: int) -> list[int]:
        """``count`` more tokens for a place of the spine, none twice."""
        token, distribution = chain.tokens[place], chain.distributions[place]
        if count == 0:
            return []
        if distribution is not None:
            rest = distribution.clone()  # [V]
            rest[token] = 0.0
            return draw_without_replacement(rest, count, chain.context)
        scores, node = chain.places[place]
        ranking = scores.ranking(node).clone()  # [V]
        ranking[token] = -torch.inf
        return best(ranking, count)
