"""The target's first layers and a small trained adapter draft; verification goes on from what those layers made.

Kangaroo, Liu et al. 2024 (arXiv 2404.18911).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict
from foretoken.drafters.base import BuildContext
from foretoken.drafters.features import load_net
from foretoken.drafters.growing import Growing
from foretoken.drafters.nets.kangaroo import KangarooConfig, KangarooNet
from foretoken.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.models.base import Feed, LanguageModel, Rows, SequenceState
from foretoken.models.features import FeatureModel
from foretoken.models.huggingface import PREFILL_CHUNK
from foretoken.models.layers import LayerPlan

ETA = 0.4
"""A chain ends after a token that the draft gives less than this."""


class KangarooDrafter(OwnLayersDrafter):
    """Drafts with the first E layers of the target and an adapter with a cache of its own.

    The states that the adapter reads while it drafts are the target's own, so that what it has cached of accepted
    drafts stays.  States of tokens that it has not read (the last of a fully accepted draft, rounds of other drafters)
    come from the target's hidden states of the round and are read before the next draft.

    Args:
        target: the model that drafts for itself.
        adapter: the trained adapter over the states of layer E, which its configuration names.
        k: longest chain, when no tree is asked for.
        tree: children per level, as for the drafter ``model``.
        draw: how siblings are drawn, as for the drafter ``model``.
        eta: nothing is drafted below a token whose draft probability is under this (the token itself stays in the
            draft); 0.4 by default, and 0 for trees, where siblings are unlikely by design.  A controller's threshold
            counts when it is higher.

    Raises:
        ValueError: an option outside its range, or an adapter for a layer that the target does not have.
        CapabilityError: the target's layers cannot be run one by one.
    """

    name = "kangaroo"

    def __init__(
        self,
        target: LanguageModel,
        adapter: FeatureModel,
        k: int = 6,
        tree: str = "",
        draw: str = "",
        eta: float | None = None,
    ) -> None:
        layers, layer = num_layers_of(target), adapter.model.config.layer
        if not 1 <= layer < layers:
            raise ValueError(f"kangaroo needs an exit layer from 1 to {layers - 1}, not {layer}")
        if eta is not None and not 0 <= eta <= 1:
            raise ValueError(f"kangaroo needs eta in [0, 1], not {eta}")
        super().__init__(target, LayerPlan(stop=layer), k, tree, draw)
        self.adapter, self.layer = adapter, layer
        self.eta = (0.0 if self.traits.draws_trees else ETA) if eta is None else eta
        self.taps = (f"layer:{layer}",)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> KangarooDrafter:
        """From a spec ``kangaroo[:FOLDER]``.

        Raises:
            ValueError: no folder, one trained for another target, or damaged files.
        """
        net, parts = load_net(context, cls.name, path, KangarooConfig, KangarooNet)
        return cls(context.target, FeatureModel(net, parts, context.target), **options)

    def cost_beside(self, target_bytes: int) -> float:
        """The share of the layers that runs, with the adapter as one more sublayer."""
        return super().cost_beside(target_bytes) + 0.5 / num_layers_of(self.model)

    # -- a request's life --------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        """Read the exit states of the prompt."""
        super().start(context)
        context.state[self, "adapter"] = self.adapter.open()
        context.state[self, "unread"] = torch.empty(0, 0)
        self._collect(context)
        self._read([context])

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Keep what the adapter has read of the accepted path, and put the other states of the round aside."""
        self._collect(context)

    def finish(self, context: Context) -> None:
        """Free the adapter's row; the target's sequence belongs to the engine."""
        super().finish(context)
        context.state.pop((self, "unread"), None)
        sequence = context.state.pop((self, "adapter"), None)
        if sequence is not None:
            self.adapter.release(sequence)

    def _collect(self, context: Context) -> None:
        """After this the adapter's text and the unread states are all committed tokens but the last.

        A round may be shown more than once.
        """
        sequence: SequenceState = context.state[self, "adapter"]
        self.adapter.catch_up(sequence, context.tokens)
        if self.taps[0] not in context.hidden:  # a prompt of one token
            return
        ahead = context.hidden_start - len(sequence.tokens)  # places between the adapter's text and the round
        before, fresh = context.state[self, "unread"][: max(ahead, 0)], context.hidden[self.taps[0]][max(-ahead, 0) :]
        context.state[self, "unread"] = torch.cat([before, fresh]) if len(before) else fresh

    def _read(self, contexts: Sequence[Context]) -> None:
        """Let the adapter read the states that were put aside, at most a chunk of every text per call."""
        for context in contexts:  # a draft that was never verified may still be there
            for model, grown in ((self.model, context.sequence), (self.adapter, context.state[self, "adapter"])):
                if grown.scratch_tokens:
                    model.commit(grown, ())
        while reading := [context for context in contexts if len(context.state[self, "unread"])]:
            self.adapter.forward([self._next_piece(context) for context in reading])
            for context in reading:
                sequence: SequenceState = context.state[self, "adapter"]
                count = len(sequence.scratch_tokens)
                context.state[self, "unread"] = context.state[self, "unread"][count:]
                self.adapter.commit(sequence, range(count))

    def _next_piece(self, context: Context) -> Feed:
        sequence: SequenceState = context.state[self, "adapter"]
        states: Tensor = context.state[self, "unread"][:PREFILL_CHUNK]
        first = len(sequence.tokens)
        return Feed(sequence, context.tokens[first : first + len(states)], wanted=0, states=states)

    # -- drafting ----------------------------------------------------------------------------------------------------

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call of the first layers and one of the adapter per level, for the whole batch."""
        self._read(contexts)
        own = [replace(budget, min_confidence=max(budget.min_confidence, self.eta)) for budget in budgets]
        return super().propose_batch(contexts, own)

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        """The first layers make the states (their own logits are not asked for), the adapter reads them."""
        exits = self.model.forward_part([replace(feed, wanted=0) for feed in feeds], self.plan, self.taps)
        return self.adapter.forward(
            [
                replace(feed, sequence=tree.context.state[self, "adapter"], states=rows.taps[self.taps[0]])
                for feed, tree, rows in zip(feeds, trees, exits, strict=True)
            ]
        )
