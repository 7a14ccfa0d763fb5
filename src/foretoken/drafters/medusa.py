"""Extra heads on the target's last hidden state guess the next K tokens at once; their best products form a tree.

Medusa, Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foretoken.drafters.base import Drafter
from foretoken.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.drafters.nets.store import load_weights, read_description
from foretoken.models.base import LanguageModel
from foretoken.models.parts import TargetParts
from foretoken.trees.shapes import Choice, choice_parents, medusa_choices
from foretoken.types import Budget, Context, TokenTree

TYPICAL = tuple(tuple(0.5 * 0.75**head * 0.4**rank for rank in range(10)) for head in range(8))
"""Accuracies by head and rank that a tree is made from when none were measured."""


class MedusaDrafter(Drafter):
    """Point proposals: the tokens of a tree of ranks, whatever was drawn above them.

    Args:
        heads: the trained heads.
        parts: what they borrow from the target.
        nodes: draft nodes of the tree.
        accuracies: [K][R] measured chance that the head's candidate of this rank is right.

    Raises:
        ValueError: an option outside its range.
    """

    name = "medusa"
    taps = ("last",)

    def __init__(
        self,
        heads: MedusaHeads,
        parts: TargetParts,
        nodes: int = 16,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        if nodes < 1:
            raise ValueError(f"medusa needs nodes >= 1, not {nodes}")
        self.heads, self.parts = heads.eval(), parts
        count = len(heads.blocks)
        self.choices: list[Choice] = medusa_choices((accuracies or TYPICAL)[:count], nodes)
        self.parents = choice_parents(self.choices)
        self.max_depth = max(map(len, self.choices))
        self.max_nodes = len(self.choices)
        self.top = 1 + max(choice[-1] for choice in self.choices)

    @classmethod
    def build(
        cls, path: str | None, *, target: LanguageModel, target_source: Any, tokenizer: Any, device: Any, **options: Any
    ) -> MedusaDrafter:
        """From a spec ``medusa[:FOLDER]``.

        Raises:
            ValueError: no folder, one trained for another target, or damaged files.
        """
        from foretoken.loading import drafter_folder

        parts = TargetParts(target)
        folder = drafter_folder(cls.name, path, target_source)
        found = read_description(folder, cls.name, parts.fingerprint())
        heads = MedusaHeads(MedusaConfig(**found["config"]))
        load_weights(folder, heads)
        return cls(heads.to(parts.device), parts, accuracies=found["measured"].get("accuracies"), **options)

    @property
    def draws_trees(self) -> bool:
        """Whether any two nodes share a parent."""
        return len(set(self.parents)) < len(self.parents)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Draft for one request."""
        return self.propose_batch([context], [budget])[0]

    @torch.inference_mode()
    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call of all heads for all requests; a request without a state yet (a prompt of one token) waits."""
        ready = [c for c, b in zip(contexts, budgets, strict=True) if b.max_nodes > 0 and len(c.hidden.get("last", ()))]
        if not ready:
            return [TokenTree.root_only(c.root) for c in contexts]
        states = torch.stack([c.hidden["last"][-1] for c in ready]).float()  # [n, D]
        logits = self.logits(states)  # [K, n, V]
        ranked = iter(logits.topk(min(self.top, logits.shape[-1]), -1).indices.transpose(0, 1).tolist())  # n x [K][R]
        chosen = {id(c) for c in ready}
        return [
            self._tree(c, b, next(ranked)) if id(c) in chosen else TokenTree.root_only(c.root)
            for c, b in zip(contexts, budgets, strict=True)
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[K, n, V] of states [n, D]."""
        hidden = self.heads(states)
        if len(self.heads.projections):
            return torch.stack([p(h) for p, h in zip(self.heads.projections, hidden, strict=True)])
        count, rows, size = hidden.shape
        return self.parts.draft_logits(hidden.view(count * rows, size)).view(count, rows, -1)

    def _tree(self, context: Context, budget: Budget, ranked: Sequence[Sequence[int]]) -> TokenTree:
        tokens, parents = [context.root], [-1]
        place = {0: 0}
        for node, (choice, parent) in enumerate(zip(self.choices, self.parents, strict=True), 1):
            if len(tokens) > budget.max_nodes:
                break
            fits = parent in place and len(choice) <= budget.max_depth and choice[-1] < len(ranked[0])
            if fits:
                place[node] = len(tokens)
                tokens.append(ranked[len(choice) - 1][choice[-1]])
                parents.append(place[parent])
        return TokenTree(tuple(tokens), tuple(parents))
