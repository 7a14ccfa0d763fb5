"""Drafts for the likely outcomes of a round in a second thread, while the target verifies it.

Speculative speculative decoding (Saguaro), https://arxiv.org/abs/2603.03251.  An outcome is the number of accepted
draft tokens and the token after them.  While the target scores the chain, the draft model predicts that token after
every number of accepted ones and drafts a chain after each prediction, all in one batch.  If the round ends in one of
these outcomes, the next chain is ready; otherwise it is drafted as usual.  Verification is unchanged.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree, check_least
from foretoken.core.noise import Noise
from foretoken.methods.drafters.base import BuildContext, Drafter, Traits
from foretoken.methods.drafters.drawing import best, distribution_of, drawn_at, ranked
from foretoken.methods.drafters.growing import check_growth
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.narrowed import projected
from foretoken.methods.drafters.texts import BESIDE
from foretoken.models.base import CapabilityError, Feed, LanguageModel, SequenceState


@dataclass
class OutcomeDraft:
    """A predicted outcome and the chain after it.

    Attributes:
        outcome: the accepted draft tokens and the token after them.
        node: scratch node of the last token that was fed.
        tokens: the chain.
        rows: distribution [V] of each drawn token; empty if tokens are not drawn.
    """

    outcome: tuple[int, ...]
    node: int
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


@dataclass
class Ahead:
    """Drafting state of one request while its round is verified.

    Attributes:
        sampler: the request's sampler, with noise that no other thread uses.
        sequence: the sequence in the second thread's copy of the draft model.
        tokens: the committed tokens in the draft model's ids.
        drafts: the chain under verification.
        uniforms: one uniform number per draft position, if tokens are drawn.  Outcomes share them because only one
            comes true.
        races: whether candidates are ranked by the race on the request's noise.
        branches: the outcomes, filled by the second thread.
    """

    sampler: Any
    sequence: SequenceState
    tokens: list[int]
    drafts: Sequence[int]
    depth: int
    uniforms: Sequence[float]
    races: bool
    branches: list[OutcomeDraft] = field(default_factory=list)


class AheadDrafter(ModelDrafter):
    """Drafts chains with a draft model, also while the target verifies.

    Requests with context-dependent sampling (penalties, grammars), and rounds with a stop rule that depends on the
    draft, are drafted for only between the rounds.

    Args:
        k: length of the chain.
        fanout: predicted tokens after every number of accepted ones; (k + 1) ``fanout`` is at most 256.
        draw: how tokens are drawn when the request samples: ``"iid"`` (the default) or ``"greedy"``, the most likely
            ones, verified as point masses.
        thread: draft in a separate thread; ``false`` does the same work before the target's call, for tests.

    Attributes:
        rounds: number of rounds whose outcomes were drafted for.
        hits: number of those whose outcome was among them.
    """

    name = "ahead"
    traits = Traits(learns=False)  # no outcome matches a sequence that is cut back

    def __init__(
        self,
        model: LanguageModel,
        k: int = 4,
        fanout: int = 2,
        draw: str = "",
        target: LanguageModel | None = None,
        thread: bool = True,
    ) -> None:
        check_least(self.name, 1, fanout=fanout)
        if draw == "without_replacement":
            raise ValueError("ahead drafts chains: draw must be iid or greedy")
        super().__init__(model, k, "", draw, target)
        if (k + 1) * fanout > 256:  # each outcome is a row of every call in the second thread
            raise ValueError(f"ahead drafts after (k + 1) * fanout outcomes, at most 256, not k={k}, fanout={fanout}")
        check_growth(model, branches=True)
        sibling = getattr(model, "sibling", None)
        if sibling is None:
            raise CapabilityError(
                f"{type(model).__name__} has no second cache to draft ahead in: use the drafter model"
            )
        self.twin: LanguageModel = sibling()
        self.fanout, self.rounds, self.hits = fanout, 0, 0
        self._pool, self._process = ThreadPoolExecutor(1, "ahead") if thread else None, os.getpid()
        self._job: Future[None] | None = None

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        quantize: str = "auto",
        vocab: str = "",
        window: int = 0,
        sink: int = 0,
        **options: Any,
    ) -> Drafter:
        """Build from a spec ``ahead[:PATH]``."""
        arguments = {"quantize": quantize, "vocab": vocab, "window": window, "sink": sink, **options}
        return super().build(path, context, parallel=False, **arguments)

    # -- a request's life --------------------------------------------------------------------------------------------

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Return the chains that are ready, draft the others as usual, and start the second thread again."""
        self._wait()
        if self._job is not None:
            job, self._job = self._job, None
            job.result()  # raises the exception of the second thread
        trees = [self._ready(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        missed = [i for i, tree in enumerate(trees) if tree is None]
        if missed:
            usual = super().propose_batch([contexts[i] for i in missed], [budgets[i] for i in missed])
            for i, tree in zip(missed, usual, strict=True):
                trees[i] = tree
        drafted = [tree for tree in trees if tree is not None]
        self._begin_ahead(contexts, drafted, budgets)
        return drafted

    def finish(self, context: Context) -> None:
        self._wait()
        sequence = context.state.get((self, "sequence"))
        try:
            if sequence is not None:
                self.twin.release(sequence)
        finally:
            super().finish(context)

    def _wait(self) -> None:
        if self._job is not None:
            wait([self._job])

    def _ready(self, context: Context, budget: Budget) -> TokenTree | None:
        """The chain after the actual outcome of the last round, if it was drafted."""
        ahead: Ahead | None = context.state.pop((self, "ahead"), None)
        if ahead is None or not _is_plain(budget):
            return None
        self.rounds += 1
        outcome = tuple(context.tokens[len(ahead.tokens) :])
        branch = next((branch for branch in ahead.branches if branch.outcome == outcome), None)
        if branch is None:
            return None
        self.hits += 1
        depth = min(len(branch.tokens), budget.max_depth, budget.max_nodes)
        if not depth:
            return None
        return TokenTree.chain(
            context.root, branch.tokens[:depth], torch.stack(branch.rows[:depth]) if branch.rows else None
        )

    # -- the second thread -------------------------------------------------------------------------------------------

    def _begin_ahead(self, contexts: Sequence[Context], trees: Sequence[TokenTree], budgets: Sequence[Budget]) -> None:
        items = []
        for context, tree, budget in zip(contexts, trees, budgets, strict=True):
            if tree.num_drafts and tree.is_chain and context.sampler.context_free and _is_plain(budget):
                ahead = self._prepared(context, tree, min(self.max_depth, budget.max_depth))
                if ahead is not None:
                    context.state[self, "ahead"] = ahead
                    items.append(ahead)
        if items and self._pool is None:
            self._draft(items)
        elif items and self._pool is not None:
            if os.getpid() != self._process:  # Threads do not survive a fork; the job would never finish.
                self._pool, self._process = ThreadPoolExecutor(1, "ahead"), os.getpid()
            self._job = self._pool.submit(self._draft, items)

    def _prepared(self, context: Context, tree: TokenTree, depth: int) -> Ahead | None:
        """The second thread's state of a request, which this thread no longer changes; ``None`` if the draft model's
        context is too short."""
        tokens = list(self.read(context))
        if len(tokens) + tree.num_drafts + depth > self.model.context_length:
            return None
        sampler = copy.copy(context.sampler)
        draws, races = not (sampler.fixed or self.draw == "greedy"), False
        if sampler.noise is not None:
            sampler.noise, races = Noise(sampler.noise.seed, sampler.noise.source), self.draw != "greedy"
        uniforms = context.rng.uniforms(depth) if draws else []
        return Ahead(sampler, self._sequence(context, len(tokens)), tokens, tree.tokens[1:], depth, uniforms, races)

    def _sequence(self, context: Context, length: int) -> SequenceState:
        """The request's sequence in the second cache, with a copy of a long prefix that the first cache holds."""
        key = (self, "sequence")
        if key not in context.state:
            context.state[key] = self.twin.open()
        sequence: SequenceState = context.state[key]
        first: SequenceState | None = context.state.get(self)
        if first is not None and not sequence.tokens and len(first.tokens) > BESIDE:
            self.twin.expect(sequence, length)
            snapshot = self.model.snapshot(first, len(first.tokens)) if first.regime == sequence.regime else None
            if snapshot is not None:
                self.twin.restore(sequence, snapshot, len(snapshot.tokens))
        return sequence

    @torch.inference_mode()
    def _draft(self, items: Sequence[Ahead]) -> None:
        """Predict the outcomes in one call, and extend their chains in one call per draft position."""
        feeds = []
        for item in items:
            unread = self.twin.catch_up(item.sequence, item.tokens)
            feeds.append(
                Feed(item.sequence, [*unread, *self._readable(list(item.drafts))], wanted=1 + len(item.drafts))
            )
        rows = projected(self.head, self.twin.forward, feeds)
        for item, feed, row in zip(items, feeds, rows, strict=True):
            self._guess(item, self._widened(row.logits), len(feed.tokens) - 1 - len(item.drafts))
        for position in range(self.max_depth):
            going = [item for item in items if item.branches and position < item.depth]
            feeds = [self._next_feed(item, position) for item in going]
            if not feeds:
                break
            for item, row in zip(going, projected(self.head, self.twin.forward, feeds), strict=True):
                self._extend(item, self._widened(row.logits), position)

    def _guess(self, item: Ahead, logits: Tensor, root: int) -> None:
        """Set the predicted outcomes from draft logits [k + 1, V] after the root and every draft token; the root is
        scratch node ``root``.  A rejected draft token cannot be the token that replaces it."""
        lengths = [len(item.tokens) + accepted for accepted in range(len(logits))]
        ranking = ranked(item.sampler, logits, lengths, None) if item.races else logits
        for accepted, row in enumerate(ranking):
            rejected = item.drafts[accepted] if accepted < len(item.drafts) else None
            recovered = [token for token in best(row, self.fanout + 1) if token != rejected][: self.fanout]
            path = tuple(item.drafts[:accepted])
            item.branches += [OutcomeDraft((*path, token), root + accepted) for token in recovered]

    def _next_feed(self, item: Ahead, position: int) -> Feed:
        tokens = [branch.outcome[-1] if not position else branch.tokens[-1] for branch in item.branches]
        parents, first = [branch.node for branch in item.branches], len(item.sequence.scratch_tokens)
        for i, branch in enumerate(item.branches):
            branch.node = first + i
        return Feed(item.sequence, self._readable(tokens), parents)

    def _extend(self, item: Ahead, logits: Tensor, position: int) -> None:
        """Append one token to every branch, from draft logits [n, V]."""
        if item.uniforms:
            for branch, row in zip(item.branches, logits, strict=True):
                distribution = distribution_of(item.sampler, row, ())
                if distribution is None:
                    raise ValueError("the draft model excludes every token: nothing can be drafted ahead")
                branch.rows.append(distribution)
                branch.tokens += drawn_at(distribution, [item.uniforms[position]])
            return
        if item.races:
            lengths = [len(item.tokens) + len(branch.outcome) + position for branch in item.branches]
            logits = ranked(item.sampler, logits, lengths, None)
        for branch, token in zip(item.branches, logits.argmax(-1).tolist(), strict=True):
            branch.tokens.append(token)


def _is_plain(budget: Budget) -> bool:
    """Whether no stop rule depends on the draft."""
    return not budget.asks_for_confidence and budget.path_stop is None
