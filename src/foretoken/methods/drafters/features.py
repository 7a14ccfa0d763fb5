"""What all drafters share that predict the target's next hidden state: EAGLE's kin, grown as dynamic trees.

A node's score is the sum of its path's draft log-probabilities, which is close to the chance that it is accepted.  How
the tree grows by it is a method of its own in :mod:`foretoken.methods.trees` (``eagle2`` unless another is asked for).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.base import BuildContext, Drafter, share_of_bytes
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.drawing import distribution_of, log_beliefs, ranked
from foretoken.methods.drafters.drawn_tree import DrawnTree, check_draw, drawn_places, paying_places, traits_of
from foretoken.methods.drafters.dynamic import MOST_NODES
from foretoken.methods.drafters.growing import asks_for_confidence
from foretoken.methods.drafters.nets.store import build_net, read_description, read_stored
from foretoken.methods.drafters.reading import FeatureReader
from foretoken.methods.trees.base import Candidates, Growth
from foretoken.methods.trees.cost_aware import paying_count
from foretoken.methods.trees.eagle2 import Eagle2
from foretoken.methods.trees.specs import build_tree
from foretoken.models.base import Feed, LanguageModel, Rows, SequenceState
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.native import HeadRows
from foretoken.models.forward.parts import TargetParts


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
    drawn: DrawnTree | None = None  # what is drawn instead, and is not chosen by confidence
    sharing: int = 1  # requests whose nodes are scored by the same call, as far as the tree may depend on that


class FeatureDrafter(FeatureReader, Drafter):
    """Point proposals, the tree that the draft's own confidence makes; or what is drawn from the draft's distributions.

    A point is accepted with chance p(x), a drawn token with sum min(p, q) on average, which is more where p and q are
    spread alike: at high temperatures what is drawn wins, at low ones the tree of points.  With noise
    (:mod:`foretoken.core.noise`) that tree is as good at every temperature: draft and target look for the best token of
    one perturbed distribution.

    Args:
        model: the network over the target's features.
        nodes: draft nodes that are kept of all that were looked at.  A spec that leaves it out gets up to 60, as many
            as pay by what the target's calls cost on this machine.
        depth: levels.
        width: children that every expanded node gets, and with ``eagle2`` nodes that are expanded per level.
        grow: how the tree grows, the spec of a dynamic tree: ``eagle2``, ``opt_tree,threshold=0.2`` or
            ``cost_aware,node_cost=0.01,step_cost=0.1``.
        draw: what requests that sample without noise get.  ``"iid"``: a drawn chain; ``"without_replacement"``: a tree
            of distinct siblings, in the order in which they were drawn; ``"greedy"``: the tree of the likeliest tokens,
            as greedy requests always do.  Requests with noise get the tree of what comes first in the race, with
            ``"greedy"`` that of the likeliest tokens.
        tree: the shape of a drawn tree: children per level, ``"3x2x1"``, or the spec of a static tree; Sequoia's of
            ``nodes`` nodes by default.
        window: places of the text that the network looks back, if it was trained without a window; 0: all.
        sink: first places of the text that it looks at as well.

    Attributes:
        growth: that tree; one made by hand (``CostAware(cost=...)`` with measured costs) may be put in its place.
        costs: what a call of the target costs by its nodes; with it a tree keeps as many of its nodes as pay, by the
            chances that the draft gives them.

    Raises:
        ValueError: an option below 1, or no dynamic tree.
    """

    def __init__(
        self,
        model: FeatureModel,
        nodes: int = 16,
        depth: int = 5,
        width: int = 4,
        grow: str = "eagle2",
        draw: str = "iid",
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        check_draw(self.name, draw)
        for key, value in (("nodes", nodes), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{self.name} needs {key} >= 1, not {value}")
        super().__init__(model)
        model.window, model.top = Window(window, sink), width
        self.width, self.draw = width, draw
        self.growth = growth_of(grow)
        self.costs: TargetCost | None = None
        self.places = drawn_places(draw, tree, self.name, nodes, depth)
        self.max_depth, self.max_nodes = depth, nodes
        self.vocab_size = model.vocab_size
        self.traits = traits_of(draw, width > 1, self.places.branches)

    @property
    def head(self) -> DraftHead | None:
        """The vocabulary projection; ``None`` where the network has one of its own kind, over the target's tokens."""
        found = getattr(self.model, "project", None)
        return found if isinstance(found, DraftHead) else None

    def describe(self) -> list[dict[str, Any]]:
        """How many tokens it can guess, and what runs its network."""
        size = self.vocab_size if self.head is None else self.head.size
        runs = {"forward": self.model.forward_name, "native_off": self.model.native_off}
        return [{**told, "vocabulary": size, **runs} for told in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """The network, and the vocabulary projection that it borrows from the target."""
        return share_of_bytes(self.model.weight_bytes + (self.head.weight_bytes if self.head else 0), target_bytes)

    @classmethod
    def sized(cls, model: FeatureModel, target: LanguageModel, options: dict[str, Any]) -> Self:
        """With a tree that is as large as pays on this machine, unless ``nodes`` says how large it is."""
        if "nodes" in options:
            return cls(model, **options)
        built = cls(model, nodes=MOST_NODES, **options)
        built.costs = quick_costs(target)
        built.places = paying_places(built.places, built.costs)
        return built

    # -- a request's life --------------------------------------------------------------------------------------------

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
        found = [TokenTree.root_only(context.root) for context in contexts]
        ready = [i for i, context in enumerate(contexts) if id(context) in heads]
        growing = trees = [self._begin(contexts[i], budgets[i], len(ready)) for i in ready]
        for tree in trees:
            self._expand(tree, [0], *heads[id(tree.context)])
        for level in range(1, self.max_depth):
            growing = [t for t in growing if t.frontier and level < t.budget.max_depth and self._has_room(t, level)]
            if not growing:
                break
            rows = self.model.forward([self._feed(tree) for tree in growing])
            for tree, row in zip(growing, rows, strict=True):
                self._expand(tree, tree.frontier, row, row.taps["state"])
        for i, tree in zip(ready, trees, strict=True):
            found[i] = self._finished(tree)
        return found

    def _begin(self, context: Context, budget: Budget, batch: int) -> Growing:
        draws = self.draw != "greedy" and not context.sampler.fixed
        drawn = DrawnTree(context, self.places, budget, self.max_nodes) if draws else None
        seen, sharing = Candidates([context.root]), batch if context.sampler.fixed else 1
        return Growing(context, budget, context.state[self], seen, drawn=drawn, sharing=sharing)

    def _heads(self, contexts: Sequence[Context]) -> dict[int, tuple[Rows, Tensor]]:
        """Per request what is said at its root and the output state [1, D] there, once its text has been read."""
        ready, rows = self.follow(contexts)
        for context in contexts:
            row = rows.get(id(context))
            if row is not None:
                context.state[self, "head"] = row, row.taps["state"][-1:]
        level = [context for context, is_level in zip(contexts, ready, strict=True) if is_level]
        return {id(c): c.state[self, "head"] for c in level if (self, "head") in c.state}

    def _has_room(self, tree: Growing, level: int) -> bool:
        return len(tree.sequence.tokens) + level <= self.model.context_length

    def _feed(self, tree: Growing) -> Feed:
        """The frontier, each node below its parent's scratch node (the children of the root hang from the text)."""
        first, made = len(tree.sequence.scratch_tokens), tree.drawn or tree.seen
        parents = [tree.scratch_of.get(made.parents[node], -1) for node in tree.frontier]
        for i, node in enumerate(tree.frontier):
            tree.scratch_of[node] = first + i
        return Feed(tree.sequence, [made.tokens[n] for n in tree.frontier], parents, states=torch.stack(tree.states))

    def _expand(self, tree: Growing, nodes: Sequence[int], row: Rows, outputs: Tensor) -> None:
        """Give every node its best children; some of these are expanded next."""
        if tree.drawn is not None:
            self._draw(tree, tree.drawn, nodes, self.widened(self._logits(row)), outputs)
            return
        seen, first = tree.seen, len(tree.seen)
        sure: Tensor | None = None
        if isinstance(row, HeadRows) and row.tokens and not self._looks(tree):
            best = row.tokens, row.values
        else:
            sure = self._sure(tree, nodes, self._logits(row))
            best = self._best(sure)
        for node, mine, values in zip(nodes, *best, strict=True):
            possible = [i for i, value in enumerate(values) if value > -math.inf]
            seen.add(node, [mine[i] for i in possible], [seen.scores[node] + values[i] for i in possible])
        grew = len(seen) > first
        row_of = {node: row for row, node in enumerate(nodes)}
        wanted = self.growth.frontier(seen, first, self.width, self._most(tree)) if grew else []
        if self.costs is not None:  # behind a node that is not worth its score nothing is: that is less likely still
            paying = set(self._kept(tree))
            wanted = [node for node in wanted if node in paying]
        if sure is not None and asks_for_confidence(tree.budget):
            wanted = [node for node in wanted if not self._ends(tree, node, sure[row_of[seen.parents[node]]])]
        tree.frontier = list(wanted)
        tree.states = [outputs[row_of[seen.parents[node]]] for node in tree.frontier]

    def _looks(self, tree: Growing) -> bool:
        """Whether more than the best tokens of a distribution is looked at."""
        return self._races(tree) or asks_for_confidence(tree.budget)

    def _logits(self, row: Rows) -> Tensor:
        """All logits [n, V'] of a row."""
        return row.whole() if isinstance(row, HeadRows) else row.logits

    def _races(self, tree: Growing) -> bool:
        return tree.context.sampler.noise is not None and self.draw != "greedy"

    def _sure(self, tree: Growing, nodes: Sequence[int], logits: Tensor) -> Tensor:
        """Per node how sure the draft is of every token behind it: log-probabilities [n, V'], with noise those of the
        race."""
        sampler, seen, text = tree.context.sampler, tree.seen, tree.context.tokens
        if self._races(tree):
            lengths = [len(text) + seen.depths[node] for node in nodes]
            prefixes = None if sampler.context_free else [[*text, *seen.path_tokens(node)] for node in nodes]
            rows = self.narrowed(ranked(sampler, self.widened(logits), lengths, prefixes))
        else:
            rows = logits.float()
        return log_beliefs(rows)

    def _best(self, sure: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Per row of log-probabilities its ``width`` best tokens, and the values of these."""
        values, tokens = sure.topk(min(self.width, sure.shape[-1]), -1)
        return self.mapped(tokens).tolist(), values.tolist()

    def _ends(self, tree: Growing, node: int, sure: Tensor) -> bool:
        """Whether a stop rule ends the path with this node, by the log-probabilities [V'] that it was chosen from."""
        own = tree.seen.scores[node] - tree.seen.scores[tree.seen.parents[node]]
        return tree.budget.stops_after(sure.exp(), math.exp(own))

    def _draw(self, tree: Growing, drawn: DrawnTree, nodes: Sequence[int], logits: Tensor, outputs: Tensor) -> None:
        """Draw the children of all nodes by the request's own pipeline from logits [n, V]."""
        tree.frontier, tree.states = [], []
        for node, row, output in zip(nodes, logits, outputs, strict=True):
            # A small draft vocabulary may hold nothing of what the request allows.
            children = drawn.draw(node, distribution_of(tree.context.sampler, row, drawn.prefix(node)))
            tree.frontier += children
            tree.states += [output] * len(children)

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return tokens if self.head is None else self.head.mapped(tokens)

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids from the draft's."""
        return logits if self.head is None else self.head.widened(logits)

    def narrowed(self, rows: Tensor) -> Tensor:
        """Rows [n, V'] over the draft's ids from the target's: sums over all others would cost more than they say."""
        return rows if self.head is None else self.head.narrowed(rows)

    def _most(self, tree: Growing) -> int:
        return min(self.max_nodes, tree.budget.max_nodes)

    def _kept(self, tree: Growing) -> list[int]:
        """The nodes that are worth their scores, of those that were looked at so far."""
        kept = self.growth.kept(tree.seen, self._most(tree))
        if self.costs is None:
            return kept
        return kept[: paying_count(tree.seen.values(kept), self.costs, tree.sharing)]

    def _finished(self, tree: Growing) -> TokenTree:
        """What is kept of all candidates, or all that was drawn."""
        return tree.seen.tree(self._kept(tree)) if tree.drawn is None else tree.drawn.finished()


def growth_of(spec: str) -> Growth:
    """The dynamic tree of an option ``grow``.

    Raises:
        ValueError: an unknown name or option, or a tree of fixed shape; the message lists the choices.
    """
    if spec == Eagle2.name:
        return Eagle2()
    found: Growth = build_tree(spec, Growth)
    return found


def load_frequent(context: BuildContext, name: str, path: str | None, parts: TargetParts, vocab: str) -> DraftHead:
    """The vocabulary projection of a trained drafter without one of its own: the target's, of the tokens that were
    frequent in its training text.

    Args:
        context: the target.
        name: the method.
        path: the drafter's folder.
        parts: the target's pieces.
        vocab: the tokens that can be guessed (:func:`~foretoken.methods.drafters.draft_vocabulary.chosen_ids`).

    Raises:
        ValueError: no such draft vocabulary, or ids that the target does not have.
    """
    measured = read_stored(context.folder(name, path), name)[0]["measured"]
    return DraftHead(parts, chosen_ids(vocab, context, parts.vocab_size, measured.get("frequent", ())))


def load_net(context: BuildContext, name: str, path: str | None, config: type[Any], net: type[Any]) -> Any:
    """The trained network of a ``NAME[:FOLDER]`` spec, and the target's parts.

    Raises:
        ValueError: no folder, one trained for another target, or damaged files.
    """
    parts = TargetParts(context.target)
    folder = context.folder(name, path)
    found = read_description(folder, name, parts.fingerprint())
    made = build_net(folder, net, config, found)
    return made.to(parts.device), parts
