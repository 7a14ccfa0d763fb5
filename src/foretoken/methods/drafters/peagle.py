"""EAGLE-3 that predicts all positions in one pass: those after the sequence read a learned state instead of a
prediction.

P-EAGLE 2026 (arXiv 2602.01469).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.blocks import OnePassDrafter
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.eagle3 import vocabulary_head
from foretoken.methods.drafters.masked import MaskedReader
from foretoken.methods.drafters.nets.peagle import DEEPEST, PeagleConfig, PeagleModel, PeagleNet
from foretoken.methods.drafters.nets.store import load_net
from foretoken.methods.drafters.parallel import Predictions
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.forward.parts import TargetParts


class PeagleDrafter(MaskedReader, OnePassDrafter):
    """Trees of the likeliest prefixes, or drawn chains and trees, over independently predicted positions.

    Args:
        model: the network over the target's hidden states.
        k: maximum tokens of a path, the rows of a pass; 0: as many as it was trained for.
        window, sink: as for :class:`~foretoken.methods.drafters.features.FeatureDrafter`.
    """

    name = "peagle"
    net_config = PeagleConfig
    net_class = PeagleNet
    model: PeagleModel

    def __init__(
        self,
        model: PeagleModel,
        k: int = 0,
        nodes: int = 16,
        width: int = 8,
        draw: str = "iid",
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        if not 0 <= k <= DEEPEST:
            raise ValueError(f"{self.name} needs k from 1 to {DEEPEST}, or 0 for the trained depth, not {k}")
        self.net: PeagleNet = model.model
        self._shape(nodes, k or self.net.config.places, width, draw, tree)
        super().__init__(model)
        model.window = Window(window, sink)
        self.taps, self.mask = tuple(dict.fromkeys(self.net.config.taps)), self.net.config.mask_token

    @classmethod
    def build(
        cls, path: str | None, context: BuildContext, *, nodes: int | None = None, vocab: str = "", **options: Any
    ) -> Self:
        """Build from a spec ``peagle[:FOLDER]``.

        Args:
            vocab: as for :class:`~foretoken.methods.drafters.eagle3.Eagle3Drafter`.
        """
        net, parts, _ = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        ids = chosen_ids(vocab, context, parts.vocab_size, net.vocabulary.tolist()) if vocab else None
        head = vocabulary_head(net, parts, ids)
        return cls.sized(context.target, nodes, PeagleModel(net, parts, context.target, head), **options)

    @classmethod
    def of(cls, net: PeagleNet, parts: TargetParts, target: LanguageModel, **options: Any) -> Self:
        """Construct the drafter over a network in its current state; the projection is a copy."""
        return cls(PeagleModel(net, parts, target, vocabulary_head(net, parts)), **options)

    @torch.inference_mode()
    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        return self.net.fuse([hidden[tap].float() for tap in self.net.config.taps])

    def _all_predictions(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Predictions]:
        """Read the newly committed tokens together with the masks after them."""
        level = self.read_up_to_end(contexts)
        ready = [i for i in range(len(contexts)) if level[i] and depths[i] > 0]
        logits = self.logits_of([contexts[i] for i in ready], [depths[i] for i in ready])
        guessed = ((i, contexts[i], logits.get(id(contexts[i]))) for i in ready)
        return {i: Predictions(c, rows, self.head, self._ranker(c)) for i, c, rows in guessed if rows is not None}

    def mask_states(self, count: int, last: Tensor | None) -> Tensor:
        return self.model.mask_states(count)
