"""A smaller language model with the target's tokenizer drafts a chain or a tree.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318); trees by fixed expansion as in SpecInfer
(2305.09781); children without replacement as in recursive rejection sampling (2402.14160).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, TokenTree, check_least, is_large
from foretoken.core.largest import largest
from foretoken.methods.drafters.base import BatchDrafter, BuildContext, Drafter, Traits, share_of_bytes
from foretoken.methods.drafters.chains import following, grow_chains
from foretoken.methods.drafters.drawing import (
    best,
    distribution_of,
    draw_iid,
    draw_without_replacement,
    ranked,
    ranker,
)
from foretoken.methods.drafters.dynamic import MOST_NODES, DynamicTree, beliefs, best_of, is_dynamic
from foretoken.methods.drafters.growing import Growing, check_growth, cut_back, ends_path, follow, readable, widened
from foretoken.methods.drafters.levels import choose_together
from foretoken.methods.drafters.narrowed import bytes_read, described, light_head, projected, reduced_head
from foretoken.methods.drafters.pard import PardDrafter, mask_token
from foretoken.methods.drafters.texts import TextReader, level
from foretoken.methods.trees.base import Candidates
from foretoken.methods.trees.counts import Levels, Ranks, StaticTree
from foretoken.methods.trees.shapes import Choice
from foretoken.methods.trees.specs import static_tree_of
from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import Fingerprint, TargetParts

KINDS = {"iid": Kind.IID, "without_replacement": Kind.WITHOUT_REPLACEMENT, "greedy": Kind.POINT}
"""Proposal kind of sampled requests for each value of the option ``draw``."""


class ModelDrafter(BatchDrafter):
    """Drafts with a :class:`LanguageModel`.

    Args:
        k: chain length without a tree.
        tree: children per level, ``"3x2x1"`` (SpecInfer's fixed expansion); a file of ``foretoken tune tree``; or the
            spec of a static tree, ``"(sequoia,nodes=16)"``.  Siblings take the ranks of such a tree in the order in
            which they are drawn.  ``eagle2``, ``opt_tree`` or ``cost_aware`` grow a tree of at most 60 nodes and k
            levels by the draft's confidence, for greedy requests and those with a seed, and keep as many nodes as pay
            off on this machine.  Requests that sample without a seed then get a drawn chain.
        draw: how siblings are drawn when the request samples: ``"iid"``, ``"without_replacement"`` or ``"greedy"`` (the
            most likely ones, verified as point masses).  The default is ``"without_replacement"`` for trees and
            ``"iid"`` for chains.  A greedy request always gets greedy drafts, and one with a seed gets the winners of
            the race unless this is ``"greedy"``.
        target: the target model.  Its vocabulary may be padded to another width than the draft model's (151936 and
            152064 rows of one tokenizer).  Drafts then come from the tokens that both have, and their distributions
            have the target's width.
    """

    name = "model"
    traits = Traits(rewinds=True, learns=False)
    draws_together: ClassVar[bool] = True
    """Whether one call may draw the children of several requests, as it may where this class makes the distributions
    and draws from them as usual."""
    chains_in_one_call: ClassVar[bool] = True
    """Whether one call of the model may grow whole chains, which requires that the model alone drafts, in the target's
    ids."""
    dynamic: DynamicTree | None = None
    head: DraftHead | None = None
    """Vocabulary projection over the draft vocabulary that replaces the draft model's."""

    def __init__(
        self, model: LanguageModel, k: int = 4, tree: str = "", draw: str = "", target: LanguageModel | None = None
    ) -> None:
        check_least(self.name, 1, k=k)
        dynamic = is_dynamic(tree)
        self.shape = static_tree_of(tree, self.name) if tree and not dynamic else Levels((1,) * k)
        draw = draw or ("without_replacement" if self.shape.branches else "iid")
        if draw not in KINDS:
            raise ValueError(f"draw must be iid, without_replacement or greedy, not {draw!r}")
        if dynamic and draw == "without_replacement":
            raise ValueError(f"tree={tree} grows by the draft's confidence, and drawn trees must not: leave out draw")
        check_growth(model, self.shape.branches or dynamic)
        self.model = model
        self.target_bytes = 0 if target is None else target.weight_bytes
        self.vocab_size = model.vocab_size if target is None else target.vocab_size
        self._take(self.shape, draw)
        if dynamic:
            self._grow_by_confidence(tree, model if target is None else target)

    def _grow_by_confidence(self, tree: str, target: LanguageModel) -> None:
        """Enable branching point proposals beside the drawn chains."""
        self.dynamic = DynamicTree.of(tree, target, self.cost_beside(self.target_bytes))
        self.max_nodes = MOST_NODES
        sorts = {(Kind.POINT, True)} | ({(Kind.IID, False)} if self.draw == "iid" else set())
        self.traits = replace(self.traits, draws_trees=True, sorts=frozenset(sorts))

    def _take(self, shape: StaticTree, draw: str) -> None:
        self.shape, self.max_depth, self.draw = shape, shape.max_depth, draw
        self.dynamic = None
        self.traits = replace(self.traits, kind=KINDS[draw], draws_trees=shape.branches, sorts=frozenset())
        if isinstance(shape, Ranks):
            self.max_nodes = len(shape.choices)
        elif isinstance(shape, Levels):
            # Not below the usual limit, because an ensemble divides the sum of its members' limits.
            self.max_nodes = max(type(self).max_nodes, shape.size)

    def reshaped(self, choices: Sequence[Choice]) -> Self:
        """A copy of this drafter that fills another tree, with distinct siblings if it branches.

        Raises:
            ValueError: the siblings of the tree cannot be drawn in order.
            CapabilityError: the draft model cannot grow trees.
        """
        shape = Ranks(choices)
        check_growth(self.model, shape.branches)
        other = copy.copy(self)
        other._take(shape, "without_replacement" if shape.branches and self.draw == "iid" else self.draw)
        return other

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        quantize: str = "auto",
        vocab: str = "",
        parallel: bool = True,
        window: int = 0,
        sink: int = 0,
        **options: Any,
    ) -> Drafter:
        """Build from a spec ``model[:PATH]``: load the draft model and check that it fits the target.

        Args:
            quantize: number format of the draft model on a CPU: ``int4``, ``int8``, ``none``, or ``auto``, which
                quantises a large model where that is clearly faster.
            vocab: draft vocabulary: the N lowest token ids, or the ids in a JSON file; by default all tokens.
            parallel: predict all positions in one pass, as ``pard``, with a model trained to fill masks (its
                configuration has a ``pard_token``).
            window: last tokens that the draft model reads; 0: all.
            sink: with ``window``, first tokens that it reads as well (StreamingLLM, arXiv 2309.17453).
        """
        draft = context.draft_model(cls.name, path, quantize=quantize, window=Window(window, sink))
        if parallel and mask_token(draft) is not None:
            if options.get("tree") and options.get("draw") != "without_replacement":
                raise ValueError("this draft model predicts all positions in one pass: give parallel=false with tree=")
            return PardDrafter.over(draft, context, vocab, **options)
        built = cls(draft, target=context.target, **options)
        built.head = reduced_head(vocab, draft, context) or light_head(draft)
        return built

    def cost_beside(self, target_bytes: int) -> float:
        return share_of_bytes(bytes_read(self.model, self.head), target_bytes)

    def describe(self) -> list[dict[str, Any]]:
        return [{**entry, **described(self.model, self.head)} for entry in super().describe()]

    @cached_property
    def states(self) -> Fingerprint | None:
        """Fingerprint of the draft model; ``None`` when it has no hidden states."""
        try:
            return TargetParts(self.model).fingerprint()
        except CapabilityError:
            return None

    def rewind(self, context: Context, length: int) -> None:
        cut_back(self.model, context.state.get(self), length)

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Grow all trees level by level, with one draft forward per level for the whole batch.

        A request gets no draft tokens if the model has not yet read its tokens or cannot hold them.
        """
        drafts = [TokenTree.root_only(context.root) for context in contexts]
        sequences = [self.read(context) for context in contexts]
        ready = [i for i, is_level in enumerate(self._level(contexts, sequences)) if is_level]
        trees = [self._begin(contexts[i], budgets[i], sequences[i]) for i in ready]
        for tree in trees:  # Drawn tokens must not depend on the other requests of the call.
            tree.sharing = len(trees) if tree.sampler.fixed else 1
        self._grow(trees)
        for i, tree in zip(ready, trees, strict=True):
            if tree.candidates is None or self.dynamic is None:
                drafts[i] = self._finished(tree)
            else:
                drafts[i] = self.dynamic.finished(tree, tree.candidates)
        return drafts

    def _level(self, contexts: Sequence[Context], sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Feed the unread tokens of each request; return whether the model has then read all of them."""
        return level(self, TextReader(self.model), contexts, sequences)

    def _grow(self, trees: Sequence[Growing]) -> None:
        growing = [t for t in trees if self._width(t, 0)]  # children of the root
        feeds = [Feed(t.sequence, self._unread(t), wanted=1) for t in growing]
        at_once = bool(growing) and self.chains_in_one_call
        if at_once and grow_chains(self.model, self.head, self.max_depth, growing, feeds, self.vocab_size):
            return
        for _ in range(self.max_depth):
            if not feeds:
                break
            rows = self._score(feeds, growing)
            following, feeds = [], []
            wide = [self._widened(row.logits) for row in rows]
            self._draw_together(growing, wide)
            for tree, row, logits in zip(growing, rows, wide, strict=True):
                follow(tree, row)
                feed = self._expand(tree, logits)
                if feed is not None:
                    following.append(tree)
                    feeds.append(feed)
            growing = following

    def _draw_together(self, trees: Sequence[Growing], logits: Sequence[Tensor]) -> None:
        """Draw the next token of all chains whose requests sample alike in one call; logits [1, V] for each.

        (An argmax is one call already; batching several was no faster.)  On a device, all children of a level are
        chosen together.
        """
        if not self.draws_together or (logits and is_large(logits[0])):
            return
        if logits and logits[0].device.type != "cpu":
            choose_together(trees, logits, self._width, self.draw == "iid")
            return
        chosen: list[int] = []
        for index, (tree, row) in enumerate(zip(trees, logits, strict=True)):
            plain = tree.draws or (tree.races and not tree.budget.asks_for_confidence)
            is_chain = tree.candidates is None and len(row) == 1 and self._width(tree, tree.frontier[0]) == 1
            if plain and tree.sampler.context_free and is_chain:
                chosen.append(index)
        if len(chosen) > 1:
            alike, rows = [trees[index] for index in chosen], [logits[index] for index in chosen]
            lengths = [tree.length(tree.frontier[0]) for tree in alike]
            for tree, (token, distribution) in zip(alike, following(alike, rows, lengths), strict=True):
                tree.ready[tree.frontier[0]] = (distribution, [] if token is None else [token])

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        rules = (tree.budget.path_stop for tree in trees)
        taps = {rule.tap for rule in rules if rule and self.states is not None}
        return projected(self.head, self.model.forward, feeds, tuple(taps))

    def _unread(self, tree: Growing) -> Sequence[int]:
        return self.model.catch_up(tree.sequence, tree.committed)

    def read(self, context: Context) -> Sequence[int]:
        """The committed tokens in the draft model's ids."""
        return self._readable(context.tokens)

    def _readable(self, tokens: list[int]) -> list[int]:
        """The tokens with 0 in place of ids that only the target has."""
        return readable(tokens, self.model.vocab_size, self.vocab_size)

    def _widened(self, logits: Tensor) -> Tensor:
        """Draft logits [n, V'] over the target's vocabulary [n, V]; ids that only one of them has get probability 0."""
        return widened(logits if self.head is None else self.head.widened(logits), self.vocab_size)

    def _begin(self, context: Context, budget: Budget, tokens: Sequence[int]) -> Growing:
        sampler, likeliest = context.sampler, self.draw == "greedy"
        draws = not (sampler.fixed or likeliest)
        confident = self.dynamic is not None and not draws
        return Growing(
            context,
            self.shape,
            budget,
            self.max_nodes if confident else budget.max_nodes,
            context.state[self],
            draws=draws,
            ranker=ranker(sampler, likeliest),
            tokens=tokens,
            candidates=Candidates([context.root]) if confident else None,
        )

    def _width(self, tree: Growing, node: int) -> int:
        has_room = tree.committed and len(tree.choices[node]) <= self.model.context_length - len(tree.committed)
        return tree.width(node) if has_room else 0

    def _expand(self, tree: Growing, logits: Tensor) -> Feed | None:
        """Add the children of the frontier; return the feed that scores them, ``None`` if the tree is complete."""
        if tree.candidates is not None and self.dynamic is not None:
            self._expand_by_confidence(self.dynamic, tree, tree.candidates, logits)
        else:
            parents, tree.frontier = tree.frontier, []
            for row, parent in enumerate(parents):
                width = self._width(tree, parent)
                if width:
                    self._add_children(tree, logits[row], parent, width)
            tree.frontier = [node for node in tree.frontier if self._width(tree, node)]
        if not tree.frontier:
            return None
        last_read = len(tree.sequence.scratch_tokens) - 1  # the root, where the root's children are fed
        tokens = self._readable([tree.tokens[node] for node in tree.frontier])
        return Feed(tree.sequence, tokens, tree.enter(last_read))

    def _expand_by_confidence(
        self, dynamic: DynamicTree, tree: Growing, candidates: Candidates, logits: Tensor
    ) -> None:
        if tree.ranked is not None:  # chosen for the whole batch
            (sure, tokens, values), tree.ranked = tree.ranked, None
        else:
            sure = beliefs(tree, logits)
            tokens, values = best_of(sure, dynamic.width)
        levels = min(self.max_depth, tree.budget.max_depth, 1 + self.model.context_length - len(tree.committed))
        dynamic.grow(tree, candidates, tokens, values, sure, levels)

    def _add_children(self, tree: Growing, logits: Tensor, parent: int, width: int) -> None:
        if parent in tree.ready:
            distribution, chosen = tree.ready.pop(parent)
            chosen = chosen[:width]
        else:
            distribution, chosen = self._candidates(tree, logits, parent, width)
        children = tree.add(parent, chosen, distribution if tree.draws else None)
        # A stop may only suppress the tokens after this one, which stays in the draft.
        if ends_path(tree, parent):
            return
        for node, token in zip(children, chosen, strict=True):
            if not self._stops_after(tree, token, distribution, logits):
                tree.frontier.append(node)

    def _candidates(self, tree: Growing, logits: Tensor, parent: int, width: int) -> tuple[Tensor | None, list[int]]:
        """Children of a node from draft logits [V], best first or in sampling order, and a distribution [V]: the one
        that the request's sampler drew them from or that a stop rule judges them by (``None`` if there is neither)."""
        sampler, confident = tree.sampler, tree.budget.asks_for_confidence
        if not tree.draws and not tree.races and width == 1 and sampler.context_free and not confident:
            return None, [int(logits.argmax())]
        prefix = tree.prefix(parent)
        if tree.ranker is not None:
            ranking = ranked(tree.ranker, logits[None], [tree.length(parent)], [prefix])[0]
            return torch.softmax(ranking, -1) if confident else None, best(ranking, width)
        distribution = distribution_of(sampler, logits, prefix)
        if distribution is None:
            return None, []
        if not tree.draws:
            # A one-hot distribution names the best token, penalties included, but ranks no others.
            ranking = logits if sampler.greedy and width > 1 else distribution
            return distribution, largest(ranking, min(width, len(ranking)))[1].tolist()
        if self.draw == "iid" or width == 1:
            return distribution, draw_iid(distribution, width, tree.context)
        return distribution, draw_without_replacement(distribution, width, tree.context)

    def _stops_after(self, tree: Growing, token: int, distribution: Tensor | None, logits: Tensor) -> bool:
        """Whether a stop rule ends the path after a token, by the distribution [V] that it was chosen from, or by the
        untempered softmax for greedy drafts without rules."""
        if distribution is None or not tree.budget.asks_for_confidence:
            return False
        probabilities = torch.softmax(logits.float(), -1) if tree.sampler.greedy and not tree.races else distribution
        return tree.budget.stops_after(probabilities, float(probabilities[token]))

    def _finished(self, tree: Growing) -> TokenTree:
        return tree.finished(self.traits.kind)
