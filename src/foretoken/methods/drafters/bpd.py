"""Heads on the target's last hidden state draft the rest of a block at once; the target checks it and starts the next.

Blockwise parallel decoding, Stern, Shazeer, Uszkoreit 2018 (arXiv 1811.03115).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree
from foretoken.methods.drafters.base import BatchDrafter, BuildContext, Traits, share_of_bytes
from foretoken.methods.drafters.drawing import best_ahead, ends_draft
from foretoken.methods.drafters.nets.bpd import BpdConfig, BpdHeads
from foretoken.methods.drafters.nets.store import load_net
from foretoken.models.forward.parts import TargetParts
from foretoken.models.linear.packing import weight_bytes


class BpdDrafter(BatchDrafter):
    """Point proposals: the best tokens of heads 2 to k below the root, which head 1 predicted.

    The state that the heads read is a result of the call that verified the previous block, so prediction and
    verification are one call, and the heads are the only other work of a round.

    Args:
        heads: the trained heads; they move to the target's device.
        parts: the modules that they borrow from the target.
        k: block size, including head 1 (the target); all trained heads by default.
    """

    name = "bpd"
    net_config = BpdConfig
    net_class = BpdHeads
    taps = ("last",)
    traits = Traits(prefers_noise=True, learns=False)

    def __init__(self, heads: BpdHeads, parts: TargetParts, k: int | None = None) -> None:
        trained = heads.config.k
        k = trained if k is None else k
        if not 2 <= k <= trained:
            raise ValueError(f"bpd needs k from 2 to {trained} (the number of trained heads), not {k}")
        self.heads, self.parts, self.k = heads.to(parts.device).eval(), parts, k
        self.max_depth = self.max_nodes = k - 1

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> BpdDrafter:
        """Build from a spec ``bpd[:FOLDER]``."""
        heads, parts, _ = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        return cls(heads, parts, **options)

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of one head, with the target's vocabulary projection."""
        size = weight_bytes(self.heads) // max(1, self.k - 1)
        return share_of_bytes(size + weight_bytes(self.parts.head), target_bytes)

    @torch.inference_mode()
    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call of the heads for all requests; one without hidden states (a prompt of one token) gets no draft
        tokens."""
        trees = [TokenTree.root_only(context.root) for context in contexts]
        lengths = [min(self.max_depth, budget.max_depth, budget.max_nodes) for budget in budgets]
        ready = [i for i, c in enumerate(contexts) if lengths[i] > 0 and len(c.hidden.get("last", ()))]
        if not ready:
            return trees
        states = torch.stack([contexts[i].hidden["last"][-1] for i in ready]).float()  # [n, D]
        logits = self.logits(states, max(lengths[i] for i in ready))
        depth = len(logits)
        rows = [contexts[i] for _ in range(depth) for i in ready]
        best = best_ahead(logits.flatten(0, 1), rows, [k for k in range(depth) for _ in ready], 1)
        for row, i in enumerate(ready):
            chain = [token for (token,) in best[row :: len(ready)]][: lengths[i]]
            stop = next((k for k, token in enumerate(chain) if ends_draft(budgets[i], logits[k, row], token)), depth)
            trees[i] = TokenTree.chain(contexts[i].root, chain[: stop + 1])
        return trees

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """[depth, n, V]: logits of the heads from the second on for states [n, D]."""
        hidden = self.heads(states, range(2, 2 + depth))
        return self.parts.draft_logits(hidden.flatten(0, 1)).view(depth, len(states), -1)
