"""What all drafters share that predict the target's next hidden state: EAGLE's kin, grown as dynamic trees.

EAGLE-2 (arXiv 2406.16858): a node's score is the sum of its path's draft log-probabilities, which is close to the
chance that it is accepted; the best leaves are expanded level by level, and the best nodes of all are kept.
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
from foretoken.types import Budget, Context, TokenTree


@dataclass
class Growth:
    """A tree under construction; node 0 is the root, lists are per node.

    ``frontier`` are nodes that the network has not read yet, ``states`` the features that it reads with them.
    """

    context: Context
    budget: Budget
    sequence: SequenceState
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    scratch_of: dict[int, int] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class FeatureDrafter(FeatureReader, Drafter):
    """Point proposals: the tree that the draft's own confidence makes.

    Args:
        model: the network over the target's features.
        nodes: draft nodes that are kept of all that were looked at.
        depth: levels.
        width: nodes that are expanded per level, and children that each of them gets.

    Raises:
        ValueError: an option below 1.
    """

    def __init__(self, model: FeatureModel, nodes: int = 16, depth: int = 5, width: int = 4) -> None:
        for key, value in (("nodes", nodes), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{self.name} needs {key} >= 1, not {value}")
        super().__init__(model)
        self.width = width
        self.max_depth, self.max_nodes = depth, nodes
        self.vocab_size = model.vocab_size

    @property
    def draws_trees(self) -> bool:
        """Unless one node is expanded per level and gets one child."""
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
        trees = [Growth(c, b, c.state[self], [c.root]) for c, b in zip(contexts, budgets, strict=True)]
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

    def _has_room(self, tree: Growth, level: int) -> bool:
        return len(tree.sequence.tokens) + level <= self.model.context_length

    def _feed(self, tree: Growth) -> Feed:
        """The frontier, each node below its parent's scratch node (the children of the root hang from the text)."""
        first = len(tree.sequence.scratch_tokens)
        parents = [tree.scratch_of.get(tree.parents[node], -1) for node in tree.frontier]
        for i, node in enumerate(tree.frontier):
            tree.scratch_of[node] = first + i
        return Feed(tree.sequence, [tree.tokens[n] for n in tree.frontier], parents, states=torch.stack(tree.states))

    def _expand(self, tree: Growth, nodes: Sequence[int], logits: Tensor, outputs: Tensor) -> None:
        """Give every node its best children; the best of these are expanded next."""
        law = torch.log_softmax(logits.float(), -1)
        values, tokens = law.topk(min(self.width, law.shape[-1]), -1)
        values, tokens = values + torch.tensor([tree.scores[node] for node in nodes])[:, None], self.mapped(tokens)
        fresh: list[tuple[float, int, int]] = []
        for row, node in enumerate(nodes):
            for score, token in zip(values[row].tolist(), tokens[row].tolist(), strict=True):
                fresh.append((score, row, len(tree.tokens)))
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.scores.append(score)
        best = sorted(fresh, key=lambda item: -item[0])[: self.width]
        tree.frontier = [node for _, _, node in best]
        tree.states = [outputs[row] for _, row, _ in best]

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return tokens

    def _finished(self, tree: Growth) -> TokenTree:
        """The best nodes of all; a node never scores above its parent, so that they are a tree."""
        count = min(self.max_nodes, tree.budget.max_nodes)
        ranked = sorted(range(1, len(tree.tokens)), key=lambda node: (-tree.scores[node], node))[:count]
        chosen = [0, *sorted(ranked)]
        place = {node: i for i, node in enumerate(chosen)}
        parents = [-1, *(place[tree.parents[node]] for node in chosen[1:])]
        return TokenTree(tuple(tree.tokens[node] for node in chosen), tuple(parents))


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
