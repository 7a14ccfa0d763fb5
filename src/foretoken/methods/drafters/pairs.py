"""Block drafters whose candidates are scored behind the token before them: trees and chains over those scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.methods.drafters.blocks import BlockDrafter
from foretoken.methods.drafters.nets.pairs import PairConfig, PairNet
from foretoken.methods.drafters.parallel import Guesses, PlaceScores
from foretoken.models.forward.heads.draft_head import DraftHead


class PairGuesses(Guesses):
    """The candidates of a place are its tokens of largest logits; the token before decides among them.

    What is drawn is drawn among the candidates, from the distribution that is recorded: any restriction is exact.
    """

    def __init__(
        self, context: Context, states: Tensor, logits: Tensor, head: DraftHead, races: bool, net: PairNet
    ) -> None:
        super().__init__(context, states, logits, head, races)
        self.net = net
        self.values, self.ids = logits.topk(min(net.config.top, logits.shape[-1]), -1)  # [k, K]
        self.targets = head.mapped(self.ids)

    @torch.no_grad()
    def row(self, path: Sequence[int], state: Any) -> tuple[PlaceScores, Any]:
        """The place's candidates, scored behind the last token of the path."""
        place, before = len(path), self.before(path)
        query, state = self.net.query(before, self.states[place], state)
        scores = self.net.corrected(self.values[place], self.ids[place], self.targets[place], query)
        return PlaceScores(scores, self.ids[place]), state

    def before(self, path: Sequence[int]) -> Tensor:
        """The token that the place behind a path follows, a scalar."""
        return torch.tensor(path[-1] if path else self.context.root, device=self.states.device)


class PairDrafter(BlockDrafter):
    """The same trees and chains."""

    net_config: ClassVar[type[PairConfig]]
    net_class: ClassVar[type[PairNet]]
    net: PairNet

    def guesses(self, context: Context, states: Tensor, logits: Tensor) -> Guesses:
        """What is said of a request's block; states [k, D], logits [k, V_d]."""
        return PairGuesses(context, states, logits, self.head, self._races(context), self.net)
