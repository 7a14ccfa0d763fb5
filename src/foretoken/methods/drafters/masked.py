"""Masks after a sequence that is read with features: one pass reads new tokens and predicts all positions of a
draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.methods.drafters.reading import FeatureReader
from foretoken.models.base import Feed, Rows


class MaskedReader(FeatureReader):
    """Keeps the positions of the sequence, and drops those of the masks.

    Attributes:
        mask: id of the mask token.
    """

    mask: int

    @abstractmethod
    def mask_states(self, count: int, last: Tensor | None) -> Tensor:
        """Features [count, D] of masks after a sequence whose last position has the feature ``last`` [1, D]."""

    def scored(self, feeds: Sequence[Feed]) -> list[Rows]:
        return self.model.forward(feeds)

    def logits_of(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Tensor]:
        """Logits [depth, V_d] of the positions after every sequence, by ``id`` of its request; requests without any are
        left out."""
        feeds, fed = [], []
        for context, depth in zip(contexts, depths, strict=True):
            count = len(context.state[self, "pending"])
            if count or ((self, "first") in context.state and depth > 1):
                feeds.append(self._with_masks(context, count, depth - 1))
                fed.append((context, count))
        rows = self.scored(feeds) if feeds else []
        logits = {id(c): c.state[self, "first"][0] for c in contexts if (self, "first") in c.state}
        for (context, count), feed, row in zip(fed, feeds, rows, strict=True):
            self.model.commit(context.state[self], range(count))
            if count:
                self.skip_read(context)
                last = None if feed.states is None else feed.states[count - 1 : count]
                context.state[self, "first"] = row.logits[:1], last
                logits[id(context)] = row.logits
            else:
                logits[id(context)] = torch.cat([logits[id(context)], row.logits])
        return logits

    def _with_masks(self, context: Context, count: int, masks: int) -> Feed:
        if not count:
            states = self.mask_states(masks, context.state[self, "first"][1])
            return Feed(context.state[self], [self.mask] * masks, wanted=masks, states=states)
        feed = self.feed(context, count, 1)
        last = None if feed.states is None else feed.states[-1:]
        states = self.mask_states(masks, last)
        read = feed.states if feed.states is not None else states[:0]
        tokens = [*feed.tokens, *[self.mask] * masks]
        return Feed(feed.sequence, tokens, wanted=1 + masks, states=torch.cat([read, states.to(read)]))
