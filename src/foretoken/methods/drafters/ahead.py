"""Drafts for the likely outcomes of a round in a second thread, while the target verifies it.

Speculative speculative decoding (Saguaro), https://arxiv.org/abs/2603.03251.  An outcome is how many draft tokens were
accepted and the token after them.  While the target scores the chain, the draft model guesses that token behind every
number of accepted ones and drafts a chain behind each guess, all together.  If the round ends in one of these outcomes,
the next chain is there; otherwise it is drafted as usual.  Verification is untouched.
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

MOST_OUTCOMES = 256
"""Outcomes of a round that are drafted for at most: each is a row of every one of the second thread's calls."""


@dataclass
class OutcomeGuess:
    """A guessed outcome and the chain behind it.

    Attributes:
        outcome: the accepted draft tokens and the token after them.
        node: scratch node of the last token that was fed.
        tokens: the chain.
        rows: what its tokens were drawn from, each [V]; empty where they are fixed.
    """

    outcome: tuple[int, ...]
    node: int
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


@dataclass
class Ahead:
    """What is drafted for one request while its round is verified.

    Attributes:
        sampler: the request's sampling pipeline, with noise that no other thread looks at.
        sequence: the text in the second thread's copy of the draft model.
        text: the committed text in the draft model's ids.
        drafts: the chain that is verified.
        uniforms: one for each of these places, where tokens are drawn.  Outcomes share them: only one comes true.
        races: whether candidates are those of the race on the request's noise.
        branches: the outcomes, filled by the second thread.
    """

    sampler: Any
    sequence: SequenceState
    text: list[int]
    drafts: Sequence[int]
    depth: int
    uniforms: Sequence[float]
    races: bool
    branches: list[OutcomeGuess] = field(default_factory=list)


class AheadDrafter(ModelDrafter):
    """Chains of a draft model, which also works while the target does.

    Requests whose sampling looks at the prefix (penalties, grammars), and rounds with a stop rule that looks at the
    draft, are drafted for between the rounds only.

    Args:
        k: chain length.
        fanout: tokens that are guessed behind every number of accepted ones.
        draw: ``"iid"`` or ``"greedy"``, as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        thread: draft in a thread of its own; ``false`` does the same work before the target's call, for tests.

    Attributes:
        rounds: rounds whose outcomes were drafted for.
        hits: those whose outcome was among them.
    """

    name = "ahead"
    traits = Traits(learns=False)  # a text that is cut back has no outcome

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
        if (k + 1) * fanout > MOST_OUTCOMES:
            raise ValueError(
                f"ahead drafts behind (k + 1) * fanout outcomes, and {MOST_OUTCOMES} are the most: "
                f"not k={k}, fanout={fanout}"
            )
        check_growth(model, branches=True)
        sibling = getattr(model, "sibling", None)
        if sibling is None:
            raise CapabilityError(f"{type(model).__name__} has no second cache to draft ahead in: use model instead")
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
        """From a spec ``ahead[:PATH]``; ``quantize``, ``vocab``, ``window`` and ``sink`` are those of ``model``."""
        arguments = {"quantize": quantize, "vocab": vocab, "window": window, "sink": sink, **options}
        return super().build(path, context, parallel=False, **arguments)

    # -- a request's life --------------------------------------------------------------------------------------------

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """The chains that are there already, others as usual; then the second thread goes on."""
        self._wait()
        if self._job is not None:
            job, self._job = self._job, None
            job.result()  # what went wrong there goes wrong here
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
        """Free the row in the second cache, too."""
        self._wait()
        sequence = context.state.get((self, "sequence"))
        if sequence is not None:
            self.twin.release(sequence)
        super().finish(context)

    def _wait(self) -> None:
        if self._job is not None:
            wait([self._job])

    def _ready(self, context: Context, budget: Budget) -> TokenTree | None:
        """The chain behind the outcome of the last round, if it was drafted."""
        ahead: Ahead | None = context.state.pop((self, "ahead"), None)
        if ahead is None or not _is_plain(budget):
            return None
        self.rounds += 1
        outcome = tuple(context.tokens[len(ahead.text) :])
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
        """Hand over what is verified now."""
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
            if os.getpid() != self._process:  # threads are not forked: it would be waited for for ever
                self._pool, self._process = ThreadPoolExecutor(1, "ahead"), os.getpid()
            self._job = self._pool.submit(self._draft, items)

    def _prepared(self, context: Context, tree: TokenTree, depth: int) -> Ahead | None:
        """What the second thread needs of a request, none of which this one goes on to change; ``None`` where the
        draft model's context is too short."""
        text = list(self.read(context))
        if len(text) + tree.num_drafts + depth > self.model.context_length:
            return None
        sampler = copy.copy(context.sampler)
        draws, races = not (sampler.fixed or self.draw == "greedy"), False
        if sampler.noise is not None:
            sampler.noise, races = Noise(sampler.noise.seed, sampler.noise.source), self.draw != "greedy"
        uniforms = context.rng.uniforms(depth) if draws else []
        return Ahead(sampler, self._sequence(context, len(text)), text, tree.tokens[1:], depth, uniforms, races)

    def _sequence(self, context: Context, length: int) -> SequenceState:
        """The text in the second cache, with what the first one has read of it where that is much."""
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
        """Guess the outcomes, and draft behind them: one call, and one for every place of a chain."""
        feeds = []
        for item in items:
            unread = self.twin.catch_up(item.sequence, item.text)
            feeds.append(
                Feed(item.sequence, [*unread, *self._readable(list(item.drafts))], wanted=1 + len(item.drafts))
            )
        rows = projected(self.head, self.twin.forward, feeds)
        for item, feed, row in zip(items, feeds, rows, strict=True):
            self._guess(item, self._widened(row.logits), len(feed.tokens) - 1 - len(item.drafts))
        for place in range(self.max_depth):
            going = [item for item in items if item.branches and place < item.depth]
            feeds = [self._next_feed(item, place) for item in going]
            if not feeds:
                break
            for item, row in zip(going, projected(self.head, self.twin.forward, feeds), strict=True):
                self._extend(item, self._widened(row.logits), place)

    def _guess(self, item: Ahead, logits: Tensor, root: int) -> None:
        """The outcomes that are drafted for, from draft logits [k + 1, V] behind the root and every draft token; the
        root is scratch node ``root``.  A draft token that was rejected is not what follows instead."""
        lengths = [len(item.text) + accepted for accepted in range(len(logits))]
        ranking = ranked(item.sampler, logits, lengths, None) if item.races else logits
        for accepted, row in enumerate(ranking):
            rejected = item.drafts[accepted] if accepted < len(item.drafts) else None
            guesses = [token for token in best(row, self.fanout + 1) if token != rejected][: self.fanout]
            path = tuple(item.drafts[:accepted])
            item.branches += [OutcomeGuess((*path, token), root + accepted) for token in guesses]

    def _next_feed(self, item: Ahead, place: int) -> Feed:
        """The last token of every branch."""
        tokens = [branch.outcome[-1] if not place else branch.tokens[-1] for branch in item.branches]
        parents, first = [branch.node for branch in item.branches], len(item.sequence.scratch_tokens)
        for i, branch in enumerate(item.branches):
            branch.node = first + i
        return Feed(item.sequence, self._readable(tokens), parents)

    def _extend(self, item: Ahead, logits: Tensor, place: int) -> None:
        """One more token of every branch, from draft logits [n, V]."""
        if item.uniforms:
            for branch, row in zip(item.branches, logits, strict=True):
                distribution = distribution_of(item.sampler, row, ())
                if distribution is None:
                    raise ValueError("the draft model allows no token: nothing can be drafted ahead")
                branch.rows.append(distribution)
                branch.tokens += drawn_at(distribution, [item.uniforms[place]])
            return
        if item.races:
            lengths = [len(item.text) + len(branch.outcome) + place for branch in item.branches]
            logits = ranked(item.sampler, logits, lengths, None)
        for branch, token in zip(item.branches, logits.argmax(-1).tolist(), strict=True):
            branch.tokens.append(token)


def _is_plain(budget: Budget) -> bool:
    """Whether no stop rule looks at the draft."""
    return not budget.asks_for_confidence and budget.path_stop is None
