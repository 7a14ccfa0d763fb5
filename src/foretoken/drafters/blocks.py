"""What all drafters share that guess a block of places in one pass of a network over the target's hidden states.

A request whose tokens are fixed, a greedy one or one with noise, gets the likeliest prefixes of the lattice of
candidates; one that samples gets a chain or a tree whose tokens are drawn from the distributions that it carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree
from foretoken.costs import TargetCost
from foretoken.drafters.base import BuildContext, Drafter, share_of_bytes
from foretoken.drafters.draft_vocabulary import chosen_ids
from foretoken.drafters.drawing import distribution_of, log_beliefs, ranked
from foretoken.drafters.drawn_tree import DrawnTree, check_draw, drawn_places, paying_places, traits_of
from foretoken.drafters.dynamic import MOST_NODES
from foretoken.drafters.features import load_net
from foretoken.drafters.growing import asks_for_confidence
from foretoken.drafters.nets.block import BlockConfig, BlockNet
from foretoken.drafters.nets.block_model import BlockModel
from foretoken.drafters.nets.store import read_stored
from foretoken.drafters.reading import FeatureReader
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.trees.cost_aware import paying_count
from foretoken.trees.lattice import Place, lattice


@dataclass(frozen=True)
class Row:
    """What may stand at one place.

    Attributes:
        scores: [C] unnormalised log-probabilities.
        ids: [C] draft ids that they are of; ``None``: all, in order.
        ends: nothing is drafted here.
    """

    scores: Tensor
    ids: Tensor | None = None
    ends: bool = False


class Guesses:
    """What the network says of the places of one request's block.

    Args:
        context: the request.
        states: [k, D] the network's states of the rows that guess.
        logits: [k, V_d] their logits.
        head: what the logits are of.
        races: whether candidates are those of a race on the request's noise.
    """

    def __init__(self, context: Context, states: Tensor, logits: Tensor, head: DraftHead, races: bool) -> None:
        self.context, self.states, self.logits, self.head, self.races = context, states, logits, head, races

    def row(self, path: Sequence[int], state: Any) -> tuple[Row, Any]:
        """The place behind a path of drafted tokens, and what the next place is asked with."""
        return Row(self.logits[len(path)]), None

    def place(self, path: Sequence[int], state: Any, width: int, budget: Budget) -> Place:
        """The ``width`` best candidates behind a path; with noise those of the race."""
        row, after = self.row(path, state)
        if row.ends:
            return Place((), (), ())
        sure = log_beliefs(self._ranking(path, row) if self.races else row.scores[None].float())[0]
        values, best = sure.topk(min(width, len(sure)))
        if not self.races:
            best = self.head.mapped(best if row.ids is None else row.ids[best])
        log_probs = values.tolist()
        confident = asks_for_confidence(budget)
        ends = [confident and budget.stops_after(sure.exp(), math.exp(value)) for value in log_probs]
        return Place(best.tolist(), log_probs, ends, after)

    def distribution(self, path: Sequence[int], row: Row) -> Tensor | None:
        """[V] what a token behind a path is drawn from; ``None`` where the request allows nothing of it."""
        maker = self.context.maker
        prefix = () if maker.context_free else (*self.context.tokens, *path)
        return distribution_of(maker, self._spread(row)[0], prefix)

    def _ranking(self, path: Sequence[int], row: Row) -> Tensor:
        text, maker = self.context.tokens, self.context.maker
        prefixes = None if maker.context_free else [[*text, *path]]
        return ranked(maker, self._spread(row), [len(text) + len(path)], prefixes)

    def _spread(self, row: Row) -> Tensor:
        """Scores [1, V] over the target's ids: what is no candidate is impossible."""
        if row.ids is None:
            return self.head.widened(row.scores[None])
        wide = row.scores.new_full((1, self.head.vocab_size), -torch.inf)
        wide[0, self.head.mapped(row.ids)] = row.scores
        return wide


class BlockDrafter(FeatureReader, Drafter):
    """Trees of the lattice, or drawn chains.

    Args:
        model: the network over the target's hidden states.
        nodes: most draft nodes.  A spec that leaves it out gets up to 60, as many as pay by what the target's calls
            cost on this machine.
        depth: most tokens of a path; 0: all that a block guesses.
        width: candidates of every place; 1: a chain.
        draw: what requests that sample without noise get.  ``"iid"``: a drawn chain; ``"without_replacement"``: a tree
            of distinct siblings, in the order in which they were drawn; ``"greedy"``: the tree of the likeliest tokens,
            as greedy requests always do.  Requests with noise get the tree of what comes first in the race, with
            ``"greedy"`` that of the likeliest tokens.
        tree: the shape of a drawn tree: children per level, ``"3x2x1"``, or the spec of a static tree; Sequoia's of
            ``nodes`` nodes by default.
        window: places of the text that layers without a reach of their own look back; 0: all.
        sink: first places of the text that they look at as well.

    Attributes:
        costs: what a call of the target costs by its nodes; with it a tree keeps as many of its nodes as pay, by the
            chances that the draft gives them.

    Raises:
        ValueError: an option outside its range.
    """

    model: BlockModel
    net_config: ClassVar[type[BlockConfig]] = BlockConfig
    net_class: ClassVar[type[BlockNet]] = BlockNet

    def __init__(
        self,
        model: BlockModel,
        nodes: int = 16,
        depth: int = 0,
        width: int = 8,
        draw: str = "iid",
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        check_draw(self.name, draw)
        for key, value in (("nodes", nodes), ("width", width)):
            if value < 1:
                raise ValueError(f"{self.name} needs {key} >= 1, not {value}")
        self.net: BlockNet = model.model
        most = self.net.config.drafts
        if not 0 <= depth <= most:
            raise ValueError(f"{self.name} needs depth from 1 to {most}, which its block guesses, or 0, not {depth}")
        super().__init__(model, wanted=0)
        model.window = Window(window, sink)
        self.taps = tuple(dict.fromkeys(self.net.config.tap_names))
        self.width, self.draw = width, draw
        self.costs: TargetCost | None = None
        self.max_depth, self.max_nodes = depth or most, nodes
        self.places = drawn_places(draw, tree, self.name, nodes, self.max_depth)
        self.traits = traits_of(draw, width > 1, self.places.branches)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> Self:
        """From a spec ``NAME[:FOLDER]``; ``vocab=N|FILE`` are the tokens that can be guessed, as trained by default.

        Raises:
            ValueError: no folder, one trained for another target, damaged files, or no such draft vocabulary.
        """
        net, parts = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        stored = read_stored(context.folder(cls.name, path), cls.name)[0]["measured"].get("frequent", ())
        if vocab and net.vocabulary is not None:
            raise ValueError(f"this {cls.name} has a draft vocabulary of its own: leave vocab out")
        ids = chosen_ids(vocab, context, parts.vocab_size, stored) if net.vocabulary is None else None
        model = block_model(net, parts, context.target, ids)
        if "nodes" in options:
            return cls(model, **options)
        built = cls(model, nodes=MOST_NODES, **options)
        built.costs = quick_costs(context.target)
        built.places = paying_places(built.places, built.costs)
        return built

    @classmethod
    def of(
        cls, net: BlockNet, parts: TargetParts, target: LanguageModel, ids: Tensor | None = None, **options: Any
    ) -> Self:
        """A drafter over a network as it is now.

        Args:
            net: the network.
            parts: the target's pieces.
            target: the target.
            ids: [V_d] the tokens that can be guessed, if the network has no draft vocabulary; all by default.
            **options: those of the drafter.
        """
        return cls(block_model(net, parts, target, ids), **options)

    @property
    def head(self) -> DraftHead:
        """The vocabulary projection."""
        found: DraftHead = self.model.project
        return found

    def cost_beside(self, target_bytes: int) -> float:
        """The network and the vocabulary projection, which run once, as a share of every level."""
        return share_of_bytes((self.model.weight_bytes + self.head.weight_bytes) // self.max_depth, target_bytes)

    @torch.inference_mode()
    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        """Places [n, D] of the target's hidden states."""
        return self.net.context([hidden[tap].float() for tap in self.net.config.tap_names])

    # -- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Draft for one request."""
        return self.propose_batch([context], [budget])[0]

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call for what was committed, one for the blocks of all requests; one without a text waits."""
        trees = [TokenTree.root_only(context.root) for context in contexts]
        level, _ = self.follow(contexts)
        depths = [min(self.max_depth, b.max_depth, b.max_nodes) for b in budgets]
        ready = [i for i, c in enumerate(contexts) if level[i] and depths[i] > 0 and c.state[self].tokens]
        if ready:
            guesses = self._guess([contexts[i] for i in ready], max(depths[i] for i in ready))
            for i, guess in zip(ready, guesses, strict=True):
                sharing = len(ready) if contexts[i].maker.fixed else 1
                trees[i] = self._tree(guess, budgets[i], depths[i], sharing)
        return trees

    @torch.inference_mode()
    def _guess(self, contexts: Sequence[Context], depth: int) -> list[Guesses]:
        config = self.net.config
        sequences, roots = [c.state[self] for c in contexts], [c.root for c in contexts]
        states = self.model.blocks(sequences, roots, config.rows_for(depth))
        first = 0 if config.from_anchor else 1
        states = states[:, first : first + depth]  # [n, k, D]
        logits = self.head(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        return [self.guesses(*each) for each in zip(contexts, states, logits, strict=True)]

    def guesses(self, context: Context, states: Tensor, logits: Tensor) -> Guesses:
        """What is said of a request's block; states [k, D], logits [k, V_d]."""
        return Guesses(context, states, logits, self.head, self._races(context))

    def _races(self, context: Context) -> bool:
        return context.maker.noise is not None and self.draw != "greedy"

    def _tree(self, guess: Guesses, budget: Budget, depth: int, sharing: int) -> TokenTree:
        if self.draw != "greedy" and not guess.context.maker.fixed:
            return self._drawn(guess, budget, depth)

        def place(path: Sequence[int], state: Any) -> Place:
            return guess.place(path, state, self.width, budget)

        seen = lattice(guess.context.root, place, depth, min(self.max_nodes, budget.max_nodes))
        kept = range(1, len(seen))
        if self.costs is not None and kept:
            kept = kept[: paying_count(seen.values(kept), self.costs, sharing)]
        return seen.tree(kept)

    def _drawn(self, guess: Guesses, budget: Budget, depth: int) -> TokenTree:
        """Tokens that are drawn behind each other, each from its recorded distribution."""
        drawn = DrawnTree(guess.context, self.places, replace(budget, max_depth=depth), self.max_nodes)
        behind: dict[int, Any] = {}  # by node what the places of its children are asked with

        def after(node: int) -> Tensor | None:
            path = drawn.path(node)
            row, behind[node] = guess.row(path, behind[drawn.parents[node]] if node else None)
            return None if row.ends else guess.distribution(path, row)

        return drawn.grow(after)


def block_model(net: BlockNet, parts: TargetParts, target: LanguageModel, ids: Tensor | None = None) -> BlockModel:
    """The network as a model, with its vocabulary projection."""
    net = net.to(parts.device)
    weight = None if net.lm_head is None else net.lm_head.weight.detach()
    return BlockModel(net, parts, target, DraftHead(parts, ids if net.vocabulary is None else net.vocabulary, weight))
