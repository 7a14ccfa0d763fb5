"""A draft model that is itself accelerated by a smaller drafter, recursively if needed.

Chen et al. 2023, "Cascade Speculative Drafting" (https://arxiv.org/abs/2312.11462): a *vertical* cascade (drafts of
drafts), and a *horizontal* one (the larger drafter for the early positions, a smaller one for the later ones).

The top level is lossless because every level emits exactly from its own distribution: after a rejection a token comes
from the residual, never from the model's distribution itself (an error in TriForce's code, arXiv 2404.11912).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict, check_least
from foretoken.core.sampling import Sampler
from foretoken.methods.drafters.base import BatchDrafter, BuildContext, Drafter, Traits, Verify
from foretoken.methods.drafters.group import ask
from foretoken.methods.drafters.growing import check_growth, cut_back, readable, widened
from foretoken.methods.drafters.nested import Nested, works_nested
from foretoken.methods.drafters.texts import TextReader, level
from foretoken.models.base import Feed, LanguageModel, SequenceState
from foretoken.models.cache.window import Window


@dataclass
class Chain:
    """A chain under construction.

    Attributes:
        inside: the request's context for the inner drafters.
        length: planned number of draft tokens.
        to_write: how many of them the model writes; the late drafter adds the others.
        distributions: per draft token the distribution [V] that it was drawn from; ``None`` for a point mass.
        sources: per token that the model wrote, the scores and the node that it follows.
        unread: tokens to feed to the model next; the last is the root of the next inner draft.
        parent: scratch node that they follow.
        root: scratch node of the last root.
        spots: the model's scratch node for each of ``sources``.
        stopped: whether the budget's stop rule ended the chain.
        most_guesses: maximum nodes of an inner draft; 0: no limit but the inner drafter's.
    """

    context: Context
    inside: Nested
    sequence: SequenceState
    budget: Budget
    length: int
    to_write: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor | None] = field(default_factory=list)
    sources: list[tuple[Scores, int]] = field(default_factory=list)
    unread: Sequence[int] = ()
    parent: int = -1
    root: int = -1
    spots: list[int] = field(default_factory=list)
    stopped: bool = False
    most_guesses: int = 0

    @property
    def remaining(self) -> int:
        """Number of tokens that the model still has to write."""
        return 0 if self.stopped else self.to_write - len(self.tokens)

    def enter(self) -> None:
        """Switch the inner context to this chain, for chains that share one."""


class CascadeDrafter(BatchDrafter):
    """Drafts a chain with a :class:`LanguageModel` that is itself sped up by another drafter.

    Args:
        inner: drafter that accelerates the draft model and can take back text: ``(ngram,n=4,k=6)``,
            ``(model:PATH,k=3)``, ``(cascade:PATH,k=4)``.  It affects the time, not the distribution of the chain.
        rule: verifies these inner drafts, for example :func:`foretoken.methods.verifiers.compatibility.inner_rule`.
        k: length of the chain.
        early: number of tokens that the model writes before ``late`` takes over.
        late: drafter of chains for the later tokens.
        lenience: above 1, the model writes greedily and also accepts inner drafts to which it gives a probability above
            1 / ``lenience``, for temperature 0.  The chain is then verified as point masses.
        target: the target model, as in :class:`~foretoken.methods.drafters.model.ModelDrafter`.
    """

    name = "cascade"
    traits = Traits(rewinds=True, learns=False)

    def __init__(
        self,
        model: LanguageModel,
        inner: Drafter,
        rule: Verify,
        k: int = 8,
        early: int = 0,
        late: Drafter | None = None,
        lenience: float = 1.0,
        target: LanguageModel | None = None,
    ) -> None:
        check_growth(model, True)
        self.model, self.inner, self.late = model, inner, late
        self.target_bytes = 0 if target is None else target.weight_bytes
        self.nested = [inner] if late is None or late is inner else [inner, late]
        self.vocab_size = model.vocab_size if target is None else target.vocab_size
        self.k = self.max_depth = self.max_nodes = k
        self.early, self.lenience = early, lenience
        self._check_options()
        self._rule: Verify = rule if lenience == 1.0 else self._review_leniently
        self.traits = replace(
            self.traits,
            kind=Kind.POINT if lenience > 1.0 else Kind.IID,
            shares_state=any(drafter.traits.shares_state for drafter in self.nested),
        )

    def _check_options(self) -> None:
        name, late, early = self.name, self.late, self.early
        check_least(name, 1, k=self.k, lenience=self.lenience)
        if early and late is None:
            raise ValueError(f"{name} needs a drafter for the tokens after early={early}: give late=SPEC")
        if late is not None and not 1 <= early < self.k:
            raise ValueError(
                f"{name} with late={late.name} needs early between 1 and k - 1 = {self.k - 1}, not {early}"
            )
        if late is not None and late.traits.draws_trees:
            raise ValueError(f"{name} needs a late drafter of chains, and {late.name!r} drafts trees")
        for drafter in self.nested:
            if not works_nested(drafter):
                raise ValueError(
                    f"{name} cannot use {drafter.name!r} inside: it cannot roll back draft tokens, or it reads the "
                    "target; use for example ngram or model"
                )

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        inner: str = "ngram",
        late: str = "",
        quantize: str = "auto",
        window: int = 0,
        sink: int = 0,
        **options: Any,
    ) -> Self:
        """Build from a spec ``cascade[:PATH][,inner=SPEC]``: load the draft model and its inner drafters.

        Args:
            quantize, window, sink: as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        """
        model = context.draft_model(cls.name, path, quantize=quantize, window=Window(window, sink))
        # Inner drafters use the target's vocabulary, and no draft model is built in for a draft model.
        if late:
            options["late"] = context.nested(cls.name, late, for_target=False)
        guesser = context.nested(cls.name, inner, for_target=False)
        return cls(model, guesser, context.inner_rule, target=context.target, **options)

    def start(self, context: Context) -> None:
        sampler = context.sampler
        if self.lenience > 1.0:  # the same pipeline at temperature 0
            params = replace(sampler.params, temperature=0.0)
            sampler = Sampler(params, sampler.prompt_length, skipped=sampler.skipped)
        inside = context.state[self] = Nested(context, self.nested, sampler)
        inside.start()

    def rewind(self, context: Context, length: int) -> None:
        inside: Nested = context.state[self]
        if inside.rewind(length):
            cut_back(self.model, context.state.get((self, "text")), length)

    def finish(self, context: Context) -> None:
        try:
            if self in context.state:
                context.state[self].finish(context.tokens)
        finally:
            super().finish(context)

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Run inner rounds for the whole batch, one forward of the model each, until every chain has its length.

        A round never emits more tokens than are missing, so a chain's length does not depend on what was drawn, and its
        joint distribution is the product of the model's distributions.  A request gets no draft tokens if the model has
        not yet read its tokens or cannot hold them.
        """
        trees = [TokenTree.root_only(context.root) for context in contexts]
        sequences = [self._readable(context.tokens) for context in contexts]
        levels = level((self, "text"), TextReader(self.model), contexts, sequences)
        ready = [i for i, is_level in enumerate(levels) if is_level]
        chains = [self._begin(contexts[i], budgets[i]) for i in ready]
        self._write(chains)
        for i, chain in zip(ready, chains, strict=True):
            trees[i] = self._finished(chain)
        return trees

    def _write(self, chains: Sequence[Chain]) -> None:
        writing = [chain for chain in chains if chain.remaining > 0]
        for chain in writing:
            chain.inside.follow(chain.context.tokens)
            chain.unread = self.model.catch_up(chain.sequence, self._readable(chain.context.tokens))
        self._write_rounds(writing)
        self._add_late([chain for chain in chains if not chain.stopped and chain.length > len(chain.tokens)])

    def _write_rounds(self, writing: Sequence[Chain]) -> None:
        while writing:
            trees = self._guesses(writing)
            for chain, tree, logits in zip(writing, trees, self._scored(writing, trees), strict=True):
                self._review(chain, tree, logits)
            writing = [chain for chain in writing if chain.remaining > 0]

    def _begin(self, context: Context, budget: Budget) -> Chain:
        # The last draft token is not read, so one more than the context's room can be written, and none beyond that.
        room = self.model.context_length - len(context.tokens) + 1
        length = max(min(self.k, budget.max_depth, budget.max_nodes, room), 0)
        inside, sequence = context.state[self], context.state[self, "text"]
        return Chain(context, inside, sequence, budget, length, min(length, self.early or length))

    def _guesses(self, chains: Sequence[Chain]) -> list[TokenTree]:
        """Inner drafts with at most one token fewer than are missing, because the round adds one itself."""
        trees: list[TokenTree] = [TokenTree.root_only(chain.unread[-1]) for chain in chains]
        waiting = [i for i, chain in enumerate(chains) if chain.remaining > 1]
        while waiting:
            firsts = {id(chains[i].inside): i for i in reversed(waiting)}  # an inner context serves one chain at a time
            indices = sorted(firsts.values())
            for i in indices:
                chains[i].enter()
            depths = [min(self.inner.max_depth, chains[i].remaining - 1) for i in indices]
            nodes = [chains[i].most_guesses or self.inner.max_nodes for i in indices]
            budgets = [Budget(depth, most) for depth, most in zip(depths, nodes, strict=True)]
            guessed = ask(self.inner, [chains[i].inside.context for i in indices], budgets)
            for i, tree in zip(indices, guessed, strict=True):
                trees[i] = tree
            waiting = [i for i in waiting if i not in indices]
        return trees

    def _scored(self, chains: Sequence[Chain], trees: Sequence[TokenTree]) -> list[Tensor]:
        """Logits [n, V'] of every tree's nodes, by one forward.

        Chains of one request share a feed, in which only the first may have several unread tokens.
        """
        feeds: dict[int, Feed] = {}
        for chain, tree in zip(chains, trees, strict=True):
            key = id(chain.sequence)
            feeds[key] = self._feed(chain, tree, feeds.get(key))
        rows = dict(zip(feeds, self.model.forward(list(feeds.values())), strict=True))
        offsets = dict.fromkeys(feeds, 0)
        logits = []
        for chain, tree in zip(chains, trees, strict=True):
            key = id(chain.sequence)
            logits.append(rows[key].logits[offsets[key] : offsets[key] + len(tree)])
            offsets[key] += len(tree)
        return logits

    def _feed(self, chain: Chain, tree: TokenTree, before: Feed | None) -> Feed:
        """Append a chain's unread tokens (the last is the tree's root) and draft tokens to the feed of the request's
        other chains."""
        earlier: Sequence[int] = () if before is None else before.tokens
        above: Sequence[int] = () if before is None else before.parents or ()
        num_logits = 0 if before is None else before.wanted or 0
        first = len(chain.sequence.scratch_tokens) + len(earlier)
        root = chain.root = first + len(chain.unread) - 1
        parents = [chain.parent, *range(first, root), *(root + parent for parent in tree.parents[1:])]
        tokens = self._readable([*chain.unread, *tree.tokens[1:]])
        return Feed(chain.sequence, [*earlier, *tokens], [*above, *parents], wanted=num_logits + len(tree))

    def _review(self, chain: Chain, tree: TokenTree, logits: Tensor) -> None:
        """Run one inner verification; each token has the model's distribution after the node before it."""
        chain.enter()
        context = chain.inside.context
        # The context grows below, and siblings are chosen from these scores later.
        scores = Scores(widened(logits, self.vocab_size), tree, tuple(context.tokens), context.sampler)
        verdict = self._rule(tree, scores, context.rng)
        nodes = [0, *verdict.path]
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        for node, token in zip(nodes, tokens, strict=True):
            if not chain.stopped:
                self._add(chain, token, scores, node)
        chain.parent, chain.unread = chain.root + nodes[-1], tokens[-1:]
        context.tokens.extend(tokens)
        self.inner.observe(context, tree, scores, verdict)

    def _add(self, chain: Chain, token: int, scores: Scores, node: int) -> None:
        """Append the token after ``node`` to the chain.  A stop rule suppresses the tokens after it, never the token
        itself."""
        distribution = None if scores.sampler.fixed else scores.p(node)
        chain.tokens.append(token)
        chain.distributions.append(distribution)
        chain.sources.append((scores, node))
        chain.spots.append(chain.root + node)
        chain.stopped = self._is_last(chain, scores, node, token)

    def _is_last(self, chain: Chain, scores: Scores, node: int, token: int) -> bool:
        """Whether the budget's stop rule ends the chain after this token, which follows ``node``."""
        if not chain.budget.asks_for_confidence:
            return False
        sure = torch.softmax(scores.ranking(node), -1) if scores.sampler.fixed else scores.p(node)
        return chain.budget.stops_after(sure, float(sure[token]))

    def _add_late(self, chains: Sequence[Chain]) -> None:
        """Append the late drafter's tokens, each with the distribution that it was drawn from."""
        if self.late is None or not chains:
            return
        rooms = [chain.length - len(chain.tokens) for chain in chains]
        budgets = [replace(c.budget, max_depth=room, max_nodes=room) for c, room in zip(chains, rooms, strict=True)]
        trees = ask(self.late, [chain.inside.context for chain in chains], budgets)
        for chain, tree in zip(chains, trees, strict=True):
            for node in range(1, len(tree)):
                chain.tokens.append(tree.tokens[node])
                chain.distributions.append(tree.distribution(node))

    def _finished(self, chain: Chain) -> TokenTree:
        tree = TokenTree.chain(chain.context.root, chain.tokens)
        drawn = [distribution for distribution in chain.distributions if distribution is not None]
        if not drawn:
            return tree
        rows = iter(range(len(drawn)))
        q_rows = (-1, *(-1 if distribution is None else next(rows) for distribution in chain.distributions))
        return replace(
            tree, kind=Kind.IID, q=torch.stack([distribution.to(drawn[0]) for distribution in drawn]), q_rows=q_rows
        )

    def _review_leniently(self, tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
        """Follow the model's best token, else the likeliest draft token above 1 / lenience; nothing is random."""
        path: list[int] = []
        while True:
            node = path[-1] if path else 0
            best, children = scores.argmax(node), tree.children[node]
            distribution = torch.softmax(scores.logits[node].float(), -1)  # [V]
            distribution[best] = 2.0  # always accepted, and before all others
            weights = distribution[[tree.tokens[child] for child in children]].tolist()
            if not weights or max(weights) * self.lenience <= 1.0:
                return Verdict(tuple(path), best, next_is_bonus=not children)
            path.append(children[weights.index(max(weights))])

    def _readable(self, tokens: list[int]) -> list[int]:
        return readable(tokens, self.model.vocab_size, self.vocab_size)
