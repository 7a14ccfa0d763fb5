"""What drafters share that put several heads on one hidden state and fill a tree of fixed shape: Medusa and its kin."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree
from foretoken.drafters.base import BuildContext, Drafter, Traits
from foretoken.drafters.features import frequent_ids
from foretoken.drafters.nets.store import build_net, read_description
from foretoken.models.base import LanguageModel
from foretoken.models.draft_head import DraftHead
from foretoken.models.parts import TargetParts
from foretoken.trees.medusa_tree import TYPICAL
from foretoken.trees.shapes import Choice, choice_parents, fitting_nodes, medusa_choices, read_tree


class HeadsDrafter(Drafter):
    """Point proposals: the candidates of a tree of ranks.

    Args:
        heads: the trained heads, one entry of ``heads.blocks`` and of ``heads.projections`` (if any) for each; they
            move to the target's device.
        parts: what they borrow from the target.
        nodes: draft nodes of the tree.
        accuracies: [K][R] measured chance that the head's candidate of this rank is right.
        tree: a file of ``foretoken tune tree``, whose tree is taken instead of one of ``nodes`` nodes.
        frequent: the tokens that heads without projections of their own guess, the most frequent one first; all by
            default.
        vocab: how many of them; 0: all of them.

    Raises:
        ValueError: an option outside its range, or a file that holds no tree for these heads.
    """

    taps = ("last",)
    traits = Traits(prefers_noise=True)
    net_config: ClassVar[type[Any]]
    net_class: ClassVar[type[Any]]

    def __init__(
        self,
        heads: Any,
        parts: TargetParts,
        nodes: int = 16,
        accuracies: Sequence[Sequence[float]] | None = None,
        tree: str = "",
        frequent: Sequence[int] = (),
        vocab: int = 0,
    ) -> None:
        if nodes < 1:
            raise ValueError(f"{self.name} needs nodes >= 1, not {nodes}")
        self.heads, self.parts = heads.to(parts.device).eval(), parts
        own = len(heads.projections) > 0
        self.head = DraftHead(parts, None if own else frequent_ids(frequent, vocab, parts.vocab_size))
        count = len(heads.blocks)
        self._take(
            read_tree(tree, self.name, count) if tree else medusa_choices((accuracies or TYPICAL)[:count], nodes)
        )

    def _take(self, choices: Sequence[Choice]) -> None:
        self.choices = list(choices)
        self.parents = choice_parents(self.choices)
        self.max_depth = max(map(len, self.choices))
        self.max_nodes = len(self.choices)
        self.traits = replace(self.traits, draws_trees=len(set(self.parents)) < len(self.parents))

    def reshaped(self, choices: Sequence[Choice]) -> Self:
        """The same heads that fill another tree."""
        found = copy.copy(self)
        found._take(choices)
        return found

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> Self:
        """From a spec ``NAME[:FOLDER]``.

        Raises:
            ValueError: no folder, one trained for another target, or damaged files.
        """
        parts = TargetParts(context.target)
        folder = context.folder(cls.name, path)
        found = read_description(folder, cls.name, parts.fingerprint())
        heads = build_net(folder, cls.net_class, cls.net_config, found)
        options.setdefault("accuracies", found["measured"].get("accuracies"))
        options.setdefault("frequent", found["measured"].get("frequent", ()))
        return cls.over(heads.to(parts.device), parts, context.target, **options)

    @classmethod
    def over(cls, heads: Any, parts: TargetParts, target: LanguageModel, **options: Any) -> Self:
        """A drafter over heads for ``target``."""
        return cls(heads, parts, **options)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Draft for one request."""
        return self.propose_batch([context], [budget])[0]

    @torch.inference_mode()
    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Drafts for all requests; one without a state yet (a prompt of one token) waits."""
        trees = [TokenTree.root_only(c.root) for c in contexts]
        shapes = {i: self._nodes(c, b) for i, (c, b) in enumerate(zip(contexts, budgets, strict=True))}
        ready = [i for i, nodes in shapes.items() if nodes]
        if ready:
            chosen = [contexts[i] for i in ready]
            filled = self.fill(self.states(chosen), chosen, [shapes[i] for i in ready])
            for i, tokens in zip(ready, filled, strict=True):
                trees[i] = self._tree(contexts[i].root, shapes[i], tokens)
        return trees

    def states(self, contexts: Sequence[Context]) -> Tensor:
        """[n, D]: what the heads read of each request, the state of the token before its root."""
        return torch.stack([c.hidden["last"][-1] for c in contexts]).float()

    @abstractmethod
    def fill(self, states: Tensor, contexts: Sequence[Context], shapes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of the wanted nodes of every request.

        Args:
            states: [n, D] what the heads read.
            contexts: n requests.
            shapes: per request the nodes of the shape (choice i is node i + 1), parents first.
        """

    def project(self, head: int, hidden: Tensor) -> Tensor:
        """[n, V_d] logits of one head's output [n, D]."""
        if len(self.heads.projections):
            logits: Tensor = self.heads.projections[head](hidden)
            return logits
        return self.head(hidden)

    def _nodes(self, context: Context, budget: Budget) -> list[int]:
        if not len(context.hidden.get("last", ())):
            return []
        size = self.head.size
        return fitting_nodes(self.choices, self.parents, budget.max_depth, budget.max_nodes, size)

    def _tree(self, root: int, nodes: Sequence[int], tokens: Sequence[int]) -> TokenTree:
        place = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        parents = (place[self.parents[node - 1]] for node in nodes)
        return TokenTree((root, *tokens), (-1, *parents))
