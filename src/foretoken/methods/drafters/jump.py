"""A small predictor jumps from an upper layer's state into the middle of the target; a few layers there draft.

"Jump", the drafter of the package economize 0.3.2.  The first layers are skipped, too: the predictor replaces their
output for the next token.  The layers that run are the target's, on the target's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.methods.drafters.base import BuildContext, share_of_bytes
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.nets.jump import JumpConfig, JumpNet
from foretoken.methods.drafters.nets.store import load_net
from foretoken.methods.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.models.network.layers import LayerPlan


class JumpDrafter(OwnLayersDrafter):
    """Drafts with the layers from ``start`` to ``stop`` of the target, whose input is predicted.

    The first draft token of a round starts from the target's state of the token before the root, later ones from the
    draft's.  Layers outside the window have no keys and values of draft tokens; verification writes all of them.

    Args:
        net: the trained predictor, whose configuration lists the layers.
        head: the vocabulary projection; ``None``: the target's.
    """

    name = "jump"
    net_config = JumpConfig
    net_class = JumpNet
    head: DraftHead

    def __init__(
        self,
        target: LanguageModel,
        net: JumpNet,
        k: int = 4,
        tree: str = "",
        draw: str = "",
        head: DraftHead | None = None,
    ) -> None:
        layers, config = num_layers_of(target), net.config
        self.parts = TargetParts(target)
        config.check(layers, int(self.parts.embed.weight.shape[1]))
        super().__init__(target, LayerPlan(start=config.start, stop=config.stop), k, tree, draw)
        self.net = net.to(self.parts.device)
        self.taps = (f"layer:{config.state}",)
        self.ends = f"layer:{config.stop}"
        # A target without a final norm is refused here, and not in the first round.
        self.norm = self.parts.final_norm
        self.norm_dtype = next((weight.dtype for weight in self.norm.parameters()), torch.float32)
        self.head = DraftHead(self.parts) if head is None else head

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> JumpDrafter:
        """Build from a spec ``jump:FOLDER``.

        Args:
            vocab: as for :class:`~foretoken.methods.drafters.features.FeatureDrafter`.
        """
        net, parts, measured = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        ids = chosen_ids(vocab, context, parts.vocab_size, measured.get("frequent", ()), others=True)
        return cls(context.target, net, head=DraftHead(parts, ids), **options)

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of the share of layers that runs, with the predictor's weights."""
        size = sum(weight.numel() * weight.element_size() for weight in self.net.parameters())
        return super().cost_beside(target_bytes) + (share_of_bytes(size, target_bytes) if target_bytes else 0.0)

    def _level(self, contexts: Sequence[Context], sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the state of the token before the root is available, as it is except for a prompt of one token: a
        prompt whose keys and values are copied from another request comes with its states."""
        for context in contexts:
            if context.sequence.scratch_tokens:  # scratch of a draft that was never verified
                self.model.commit(context.sequence, ())
        return [self._state_before(context) is not None for context in contexts]

    def _state_before(self, context: Context) -> Tensor | None:
        """[1, D] of the token before the root."""
        rows = context.hidden.get(self.taps[0])
        row = len(context.tokens) - 2 - context.hidden_start
        return None if rows is None or not 0 <= row < len(rows) else rows[row : row + 1]

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        """Predict the states of all new nodes, run the window, and compute the logits."""
        above = torch.cat([self._states_above(feed, tree.context) for feed, tree in zip(feeds, trees, strict=True)])
        counts = [len(feed.tokens) for feed in feeds]
        tokens = [token for feed in feeds for token in feed.tokens]
        with torch.inference_mode():
            predicted = self.net(self.parts.embedding(tokens), above)
            parts = predicted.split(counts)
            inputs = [replace(feed, states=part, wanted=0) for feed, part in zip(feeds, parts, strict=True)]
            rows = self.model.forward_part(inputs, self.plan, tuple({*self.taps, self.ends}))
            for tree, row, part in zip(trees, rows, parts, strict=True):
                # The state at ``start`` is the predicted one; no layer returns it.
                states = part if self.net.config.state == self.net.config.start else row.taps[self.taps[0]]
                self._remember(tree.context, states)
            logits = self.logits(torch.cat([row.taps[self.ends] for row in rows])).split(counts)
        each = zip(rows, logits, feeds, strict=True)
        return [replace(row, logits=part[len(part) - feed.num_wanted :]) for row, part, feed in each]

    def logits(self, states: Tensor) -> Tensor:
        """Logits [n, V_d] of states [n, D] after the last layer of the window."""
        wide = self.net.read_out(states)
        return self.head(self.norm(wide.to(self.norm_dtype)))

    def _states_above(self, feed: Feed, context: Context) -> Tensor:
        """[n, D] states after layer ``state`` of the parents of a feed's nodes."""
        if feed.parents is None:  # the root
            context.state.pop((self, "states"), None)
            state = self._state_before(context)
            if state is None:
                raise RuntimeError("the hidden state of the token before the root is missing")
            return state.float()
        drafted: Tensor = context.state[self, "states"]
        return drafted[list(feed.parents)]

    def _remember(self, context: Context, states: Tensor) -> None:
        """Append the states [n, D] of new nodes, in the order of the scratch tree."""
        earlier = context.state.get((self, "states"))
        context.state[self, "states"] = states.float() if earlier is None else torch.cat([earlier, states.float()])
