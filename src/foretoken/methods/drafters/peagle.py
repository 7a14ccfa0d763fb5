"""EAGLE-3 that guesses all places in one pass: places behind the text read a learned state instead of its own guess.

P-EAGLE 2026 (arXiv 2602.01469).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.methods.drafters.base import BuildContext, share_of_bytes
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.dynamic import MOST_NODES
from foretoken.methods.drafters.eagle3 import vocabulary_head
from foretoken.methods.drafters.features import load_net
from foretoken.methods.drafters.masked import MaskedReader
from foretoken.methods.drafters.nets.peagle import DEEPEST, PeagleConfig, PeagleModel, PeagleNet
from foretoken.methods.drafters.parallel import Guesses, ParallelDrafter
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts


class PeagleDrafter(MaskedReader, ParallelDrafter):
    """Trees of the likeliest prefixes, or drawn chains and trees, of guesses that do not see each other.

    Args:
        model: the network over the target's hidden states.
        k: most tokens of a path, the rows of a pass; 0: as many as it was trained for.
        nodes: most draft nodes.  A spec that leaves it out gets up to 60, as many as pay by what the target's calls
            cost on this machine.
        width: candidates of every place; 1: a chain.
        draw, tree: as for the drafter ``eagle``.
        window: places of the text that the network looks back; 0: all.
        sink: first places of the text that it looks at as well.

    Raises:
        ValueError: an option outside its range.
    """

    name = "peagle"
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
            raise ValueError(f"{self.name} needs k from 1 to {DEEPEST}, or 0 for what was trained, not {k}")
        self.net: PeagleNet = model.model
        self._shape(nodes, k or self.net.config.places, width, draw, tree)
        super().__init__(model)
        model.window = Window(window, sink)
        self.taps, self.mask = tuple(dict.fromkeys(self.net.config.taps)), self.net.config.mask_token

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> Self:
        """From a spec ``peagle[:FOLDER]``; ``vocab=N|FILE`` are the tokens that can be guessed, of those that it was
        trained for: all of these by default.

        Raises:
            ValueError: no folder, one trained for another target, damaged files, or no such draft vocabulary.
        """
        net, parts = load_net(context, cls.name, path, PeagleConfig, PeagleNet)
        ids = chosen_ids(vocab, context, parts.vocab_size, net.vocabulary.tolist()) if vocab else None
        built = cls(_model(net, parts, context.target, ids), **{"nodes": MOST_NODES, **options})
        if "nodes" not in options:
            built.fit(quick_costs(context.target))
        return built

    @classmethod
    def of(cls, net: PeagleNet, parts: TargetParts, target: LanguageModel, **options: Any) -> Self:
        """A drafter over a network as it is now: the projection is a copy."""
        return cls(_model(net, parts, target), **options)

    @property
    def head(self) -> DraftHead:
        """The vocabulary projection."""
        found: DraftHead = self.model.project
        return found

    def cost_beside(self, target_bytes: int) -> float:
        """The network and the vocabulary projection, which run once, as a share of every level."""
        return share_of_bytes((self.model.weight_bytes + self.head.weight_bytes) // self.max_depth, target_bytes)

    def describe(self) -> list[dict[str, Any]]:
        """How many tokens it can guess."""
        return [{**told, "vocabulary": self.head.size} for told in super().describe()]

    @torch.inference_mode()
    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        return self.net.fuse([hidden[tap].float() for tap in self.net.config.taps])

    # -- drafting ----------------------------------------------------------------------------------------------------

    def _all_guesses(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Guesses]:
        """What was committed since the last draft is read with the masks behind it."""
        level = self.read_up_to_end(contexts)
        ready = [i for i in range(len(contexts)) if level[i] and depths[i] > 0]
        logits = self.guesses([contexts[i] for i in ready], [depths[i] for i in ready])
        return {i: self._guess(contexts[i], logits[id(contexts[i])]) for i in ready if id(contexts[i]) in logits}

    def _guess(self, context: Context, rows: Tensor) -> Guesses:
        return Guesses(context, rows, self.head, self._races(context))

    def mask_states(self, count: int, last: Tensor | None) -> Tensor:
        """A learned state, the same for all."""
        return self.model.mask_states(count)


def _model(net: PeagleNet, parts: TargetParts, target: LanguageModel, ids: Tensor | None = None) -> PeagleModel:
    """The network with the projection to ``ids`` [V_d] of its tokens, all of them by default."""
    net = net.to(parts.device)
    return PeagleModel(net, parts, target, vocabulary_head(net, parts, ids))
