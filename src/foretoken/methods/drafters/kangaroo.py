"""The target's first layers and a small trained adapter draft; verification continues from those layers' states.

Kangaroo, Liu et al. 2024 (arXiv 2404.18911).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.nets.kangaroo import KangarooConfig, KangarooNet
from foretoken.methods.drafters.nets.store import load_net
from foretoken.methods.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.methods.drafters.reading import FeatureReader, ReadingDrafter
from foretoken.models.base import Feed, LanguageModel, Rows, SequenceState
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.network.layers import LayerPlan


class KangarooDrafter(ReadingDrafter, OwnLayersDrafter):
    """Drafts with the first E layers of the target and an adapter with a cache of its own.

    While drafting, the adapter reads the target's own states, so its cache of accepted tokens stays valid.  States of
    unread tokens (the last of a fully accepted draft, rounds of other drafters) come from the target's hidden states of
    the round and are read before the next draft.

    Args:
        adapter: the trained adapter over the states of layer E, which is in its configuration.
        k: length of the longest chain.
        eta: the draft ends after a token of lower draft probability; 0.4 by default, and 0 for trees, where siblings
            are unlikely by design.  A controller's threshold applies if it is higher.
        window: positions that the adapter attends to; 0: all.
        sink: first positions that it attends to as well.
    """

    name = "kangaroo"
    net_config = KangarooConfig
    net_class = KangarooNet
    traits = replace(OwnLayersDrafter.traits, learns=True)
    reader: ExitReader

    def __init__(
        self,
        target: LanguageModel,
        adapter: FeatureModel,
        k: int = 6,
        tree: str = "",
        draw: str = "",
        eta: float | None = None,
        window: int = USUAL,
        sink: int = 0,
    ) -> None:
        layers, layer = num_layers_of(target), adapter.model.config.layer
        if not 1 <= layer < layers:
            raise ValueError(f"kangaroo needs an exit layer from 1 to {layers - 1}, not {layer}")
        if eta is not None and not 0 <= eta <= 1:
            raise ValueError(f"kangaroo needs eta in [0, 1], not {eta}")
        super().__init__(target, LayerPlan(stop=layer), k, tree, draw)
        adapter.window = Window(window, sink)
        self.adapter, self.layer = adapter, layer
        self.eta = (0.0 if self.traits.draws_trees else 0.4) if eta is None else eta
        self.reader = ExitReader(adapter, layer)
        self.taps = self.reader.taps

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> KangarooDrafter:
        """Build from a spec ``kangaroo[:FOLDER]``."""
        net, parts, _ = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        head = DraftHead(parts, chosen_ids(vocab, context, parts.vocab_size))
        built = cls(context.target, FeatureModel(net, parts, context.target, head), **options)
        built.head = head  # the head of the adapter's logits
        return built

    def describe(self) -> list[dict[str, Any]]:
        runs = {"forward": self.adapter.forward_name, "native_off": self.adapter.native_off}
        return [{**entry, **runs} for entry in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of the share of layers that runs, with the adapter as one more sublayer."""
        return super().cost_beside(target_bytes) + 0.5 / num_layers_of(self.model)

    def _level(self, contexts: Sequence[Context], sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Let the adapter read the stored states, which are those of all tokens but the root."""
        for context in contexts:
            if context.sequence.scratch_tokens:  # scratch of a draft that was never verified
                self.model.commit(context.sequence, ())
        return self.reader.follow(contexts)[0]

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call of the first layers and one of the adapter per level, for the whole batch."""
        stricter = [replace(budget, min_confidence=max(budget.min_confidence, self.eta)) for budget in budgets]
        return super().propose_batch(contexts, stricter)

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        """Run the first layers (without logits) and the adapter on their states."""
        exits = self.model.forward_part([replace(feed, wanted=0) for feed in feeds], self.plan, self.taps)
        return self.adapter.forward(
            [
                replace(feed, sequence=tree.context.state[self.reader], states=rows.taps[self.taps[0]])
                for feed, tree, rows in zip(feeds, trees, exits, strict=True)
            ]
        )


class ExitReader(FeatureReader):
    """Reads every token with its exit state."""

    skipped = 0

    def __init__(self, adapter: FeatureModel, layer: int) -> None:
        super().__init__(adapter, wanted=0)
        self.taps = (f"layer:{layer}",)

    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        return hidden[self.taps[0]]

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """After this, the adapter's tokens and the unread states are all committed tokens but the last."""
        super().observe(context, tree, scores, verdict)
        if self in context.state:
            self.settle(context.state[self], context.tokens)
            self.skip_read(context)

    def settle(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Keep the cache of accepted draft tokens, whose states are the target's own."""
        self.model.catch_up(sequence, tokens)

    def skip_read(self, context: Context) -> None:
        sequence: SequenceState = context.state[self]
        context.state[self, "pending"].skip_to(len(sequence.tokens))
