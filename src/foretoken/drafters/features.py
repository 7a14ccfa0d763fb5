"""What all drafters share that predict the target's next hidden state: EAGLE's kin, grown as dynamic trees.

A node's score is the sum of its path's draft log-probabilities, which is close to the chance that it is accepted.  How
the tree grows by it is a method of its own in :mod:`foretoken.trees` (``eagle2`` unless another is asked for).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter
from foretoken.drafters.reading import FeatureReader
from foretoken.models.base import Feed, LanguageModel, SequenceState
from foretoken.models.features import FeatureModel
from foretoken.trees.base import Candidates, Growth
from foretoken.trees.eagle2 import Eagle2
from foretoken.types import Budget, Context, TokenTree


@dataclass
class Growing:
    """A tree under construction.

    ``frontier`` are nodes that the network has not read yet, ``states`` the features that it reads with them.
    """

    context: Context
    budget: Budget
    sequence: SequenceState
    seen: Candidates
    scratch_of: dict[int, int] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class FeatureDrafter(FeatureReader, Drafter):
    """Point proposals: the tree that the draft's own confidence makes.

    Args:
        model: the network over the target's features.
        nodes: draft nodes that are kept of all that were looked at.
        depth: levels.
        width: children that every expanded node gets, and with ``eagle2`` nodes that are expanded per level.
        grow: how the tree grows, the spec of a dynamic tree: ``eagle2``, ``opt_tree,threshold=0.2`` or
            ``cost_aware,node_cost=0.01,step_cost=0.1``.

    Attributes:
        growth: that tree; one made by hand (``CostAware(cost=...)`` with measured costs) may be put in its place.

    Raises:
        ValueError: an option below 1, or no dynamic tree.
    """

    def __init__(
        self, model: FeatureModel, nodes: int = 16, depth: int = 5, width: int = 4, grow: str = "eagle2"
    ) -> None:
        for key, value in (("nodes", nodes), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{self.name} needs {key} >= 1, not {value}")
        super().__init__(model)
        self.width = width
        self.growth = growth_of(grow)
        self.max_depth, self.max_nodes = depth, nodes
        self.vocab_size = model.vocab_size

    @property
    def draws_trees(self) -> bool:
        """Unless every node gets one child."""
        return self.width > 1

    # -- a request's life --------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        """Read the prompt: pairs of the token that follows and the state before it."""
        super().start(context)
        self._heads([context])

    def finish(self, context: Context) -> None:
        """Free the row."""
        super().finish(context)
        context.state.pop((self, "head"), None)

    # -- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Draft for one request."""
        return self.propose_batch([context], [budget])[0]

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call for what was committed, then one per level, for the whole batch."""
        heads = self._heads(contexts)
        trees = [Growing(c, b, c.state[self], Candidates([c.root])) for c, b in zip(contexts, budgets, strict=True)]
        growing = [tree for tree in trees if id(tree.context) in heads]
        for tree in growing:
            logits, state = heads[id(tree.context)]
            self._expand(tree, [0], logits[-1:], state[None])
        for level in range(1, self.max_depth):
            growing = [t for t in growing if t.frontier and level < t.budget.max_depth and self._has_room(t, level)]
            if not growing:
                break
            rows = self.model.forward([self._feed(tree) for tree in growing])
            for tree, row in zip(growing, rows, strict=True):
                self._expand(tree, tree.frontier, row.logits, row.taps["state"])
        return [self._finished(tree) for tree in trees]

    def _heads(self, contexts: Sequence[Context]) -> dict[int, tuple[Tensor, Tensor]]:
        """Per request the logits [1, V] and the output state [D] at its root, once its text has been read."""
        rows = self.follow(contexts)
        for context in contexts:
            row = rows.get(id(context))
            if row is not None:
                context.state[self, "head"] = row.logits, row.taps["state"][-1]
        return {id(c): c.state[self, "head"] for c in contexts if (self, "head") in c.state}

    def _has_room(self, tree: Growing, level: int) -> bool:
        return len(tree.sequence.tokens) + level <= self.model.context_length

    def _feed(self, tree: Growing) -> Feed:
        """The frontier, each node below its parent's scratch node (the children of the root hang from the text)."""
        first = len(tree.sequence.scratch_tokens)
        parents = [tree.scratch_of.get(tree.seen.parents[node], -1) for node in tree.frontier]
        for i, node in enumerate(tree.frontier):
            tree.scratch_of[node] = first + i
        return Feed(
            tree.sequence, [tree.seen.tokens[n] for n in tree.frontier], parents, states=torch.stack(tree.states)
        )

    def _expand(self, tree: Growing, nodes: Sequence[int], logits: Tensor, outputs: Tensor) -> None:
        """Give every node its best children; some of these are expanded next."""
        seen = tree.seen
        law = torch.log_softmax(logits.float(), -1)
        values, tokens = law.topk(min(self.width, law.shape[-1]), -1)
        values, tokens = values + torch.tensor([seen.scores[node] for node in nodes])[:, None], self.mapped(tokens)
        first = len(seen)
        for node, mine, scores in zip(nodes, tokens.tolist(), values.tolist(), strict=True):
            seen.add(node, mine, scores)
        tree.frontier = self.growth.frontier(seen, first, self.width, self._most(tree))
        row_of = {node: row for row, node in enumerate(nodes)}
        tree.states = [outputs[row_of[seen.parents[node]]] for node in tree.frontier]

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return tokens

    def _most(self, tree: Growing) -> int:
        return min(self.max_nodes, tree.budget.max_nodes)

    def _finished(self, tree: Growing) -> TokenTree:
        """What is kept of all candidates."""
        return tree.seen.tree(self.growth.kept(tree.seen, self._most(tree)))


def growth_of(spec: str) -> Growth:
    """The dynamic tree of an option ``grow``.

    Raises:
        ValueError: an unknown name or option, or a tree of fixed shape; the message lists the choices.
    """
    if spec == Eagle2.name:
        return Eagle2()
    from foretoken.loading import build_tree

    found: Growth = build_tree(spec, Growth)
    return found


def load_net(name: str, path: str | None, target: LanguageModel, source: Any, config: type[Any], net: type[Any]) -> Any:
    """The trained network of a ``NAME[:FOLDER]`` spec, and the target's parts.

    Raises:
        ValueError: no folder, one trained for another target, or damaged files.
    """
    from foretoken.drafters.nets.store import load_weights, read_description
    from foretoken.loading import drafter_folder
    from foretoken.models.parts import TargetParts

    parts = TargetParts(target)
    folder = drafter_folder(name, path, source)
    found = read_description(folder, name, parts.fingerprint())
    made = net(config(**found["config"]))
    load_weights(folder, made)
    return made.to(parts.device), parts
