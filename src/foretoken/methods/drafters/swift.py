"""The target drafts with some sublayers skipped, and searches for the best set while it generates.

SWIFT, Xia et al. 2024 (arXiv 2410.06916).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.largest import largest
from foretoken.methods.drafters.drawing import probabilities_of, ranker
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.methods.drafters.skip_search import SkipSearch
from foretoken.methods.drafters.skip_sets import SkipSet
from foretoken.methods.drafters.tenants import Tenants
from foretoken.models.base import Feed, LanguageModel


def num_children(confidence: float, greedy: bool) -> int:
    """Number of tokens tried at a position whose best one has this probability."""
    level = sum(confidence <= bound for bound in (0.95, 0.8, 0.5))
    return ((3, 5, 8, 10) if greedy else (1, 3, 5, 10))[level]


class SwiftDrafter(OwnLayersDrafter):
    """Drafts a chain of most likely tokens with siblings; measures another set of skipped sublayers before rounds.

    A set's score is the number of the last ``window`` generated tokens that it would have predicted, in one parallel
    pass over them; the better set is kept.

    Args:
        k: longest chain, without siblings.
        threshold: the chain ends after a token of lower draft probability.
        nodes: maximum draft nodes; the chain comes first, then the likeliest siblings.  16 suit float32 on a CPU.
        skip_ratio: share of all sublayers that a set skips.
        window: last generated tokens that a measurement reads, at most 512.
        every: rounds between measurements.
        goal: matchness, the share of the window that a set predicts, above which the search ends.
        keep: layers at each end that always run.
        share: one search for all requests of a salt; else one per request.
    """

    name = "swift"
    traits = replace(OwnLayersDrafter.traits, prefers_noise=True)
    draws_together = False  # every node of the chain has its own siblings

    def __init__(
        self,
        target: LanguageModel,
        k: int = 25,
        threshold: float = 0.8,
        nodes: int = 64,
        skip_ratio: float = 0.45,
        window: int = 32,
        every: int = 1,
        goal: float = 0.95,
        keep: int = 1,
        share: bool = True,
    ) -> None:
        layers = num_layers_of(target)
        for name, value, least, most in (
            ("threshold", threshold, 0.0, 1.0),
            ("nodes", nodes, 1, None),
            ("skip_ratio", skip_ratio, 0.0, 1.0),
            ("window", window, 1, 512),
            ("every", every, 1, None),
            ("goal", goal, 0.0, 1.0),
            ("keep", keep, 0, None),
        ):
            if not value >= least or (most is not None and value > most):
                bounds = f">= {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"swift needs {name} {bounds}, not {value}")
        middle = frozenset(range(keep, layers - keep))
        if not middle:
            raise ValueError(f"with keep={keep} no layer of {layers} can be skipped: swift needs more than {2 * keep}")
        for skips in (SkipSet(attention=middle), SkipSet(mlp=middle)):
            skips.check(target)
        self._new_search = partial(SkipSearch, layers, skip_ratio, keep, goal)
        self.tenants = Tenants(self._new_search)
        super().__init__(target, self.tenants.of("").best.plan, k, "", "greedy")
        self.threshold, self.max_nodes, self.window, self.every = threshold, nodes, window, every
        self.traits = replace(self.traits, draws_trees=True, shares_state=share)  # siblings branch off the chain

    def search(self, context: Context) -> SkipSearch:
        if self.traits.shares_state:
            return self.tenants.of(context.salt)
        return context.state[self, "search"]

    def start(self, context: Context) -> None:
        super().start(context)
        if not self.traits.shares_state:
            context.state[self, "search"] = self._new_search()

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Measure a candidate, then draft with the best set so far."""
        searches = [self.search(context) for context in contexts]
        trees: dict[int, TokenTree] = {}
        for search in {id(s): s for s in searches}.values():
            indices = [i for i, s in enumerate(searches) if s is search]
            some = self._drafted(search, [contexts[i] for i in indices], [budgets[i] for i in indices])
            trees.update(zip(indices, some, strict=True))
        return [trees[i] for i in range(len(contexts))]

    def _drafted(self, search: SkipSearch, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        search.rounds += 1
        if not search.done and search.rounds % self.every == 0:
            ready = (c for c in contexts if len(c.tokens) - c.prompt_length >= self.window)
            context = next(ready, None)
            if context is not None:
                candidate = search.candidate()
                search.record(candidate, self.matchness(context, candidate))
        self.plan = search.best.plan
        return super().propose_batch(contexts, budgets)

    def matchness(self, context: Context, skips: SkipSet) -> float:
        """The share of the last ``window`` tokens that are most likely with these sublayers skipped."""
        sequence, window = context.sequence, context.tokens[-self.window - 1 :]
        feed = Feed(sequence, window[:-1], after=len(context.tokens) - len(window))
        rows = self.model.forward_part([feed], skips.plan)[0]
        self.model.commit(sequence, ())  # drop the scratch
        predicted = rows.logits.argmax(-1).tolist()
        return sum(a == b for a, b in zip(predicted, window[1:], strict=True)) / self.window

    # -- growing -----------------------------------------------------------------------------------------------------

    def _add_children(self, tree: Growing, logits: Tensor, parent: int, width: int) -> None:
        """Add the best token to the chain and keep the distribution for siblings."""
        distribution = probabilities_of(tree.sampler, logits, tree.prefix(parent), tree.length(parent))
        if distribution is None:
            return
        # A one-hot distribution names the best token, penalties included, but ranks no others.
        is_one_hot = tree.sampler.greedy and ranker(tree.sampler) is None
        ranking = torch.softmax(logits.float(), -1) if is_one_hot else distribution
        token = int(distribution.argmax())
        (node,) = tree.add(parent, [token], ranking)
        confidence = float(ranking[token])
        if confidence >= self.threshold and not tree.budget.stops_after(ranking, confidence):
            tree.frontier.append(node)

    def _finished(self, tree: Growing) -> TokenTree:
        """The chain, and the likeliest siblings that still fit."""
        spare: list[tuple[float, int, int]] = []  # (probability of the path, parent, token)
        probability = 1.0
        for parent, ranking in enumerate(tree.distributions):
            token = tree.tokens[parent + 1]
            confidence = float(ranking[token])
            count = num_children(confidence, tree.sampler.greedy) - 1
            best = largest(ranking, min(count + 1, len(ranking)))
            pairs = zip(*(each.tolist() for each in best), strict=True)
            spare += [(probability * p, parent, t) for p, t in pairs if t != token and p > 0][:count]
            probability *= confidence
        spare.sort(key=lambda sibling: -sibling[0])
        room = tree.budget.max_nodes - (len(tree.tokens) - 1)
        siblings = spare[:room]
        tokens = (*tree.tokens, *(token for _, _, token in siblings))
        return TokenTree(tokens, (*tree.parents, *(parent for _, parent, _ in siblings)))
