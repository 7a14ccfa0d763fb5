"""Drafts that are chains of the tokens that follow one another, whatever their chances, by one call of their model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from foretoken.core import argmaxes, is_large
from foretoken.core.sampling import fixed_tokens
from foretoken.methods.drafters.drawing import draw_each
from foretoken.methods.drafters.growing import Growing, widened
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.native_chain import Pick

Next = tuple[int, Tensor | None]
"""A token, and the distribution [V] that it was drawn from if it was drawn."""


def grow_chains(
    model: LanguageModel,
    head: DraftHead | None,
    depth: int,
    trees: Sequence[Growing],
    feeds: Sequence[Feed],
    vocab_size: int,
) -> bool:
    """Grow them all, if all are such chains and the model has such a call; whether that was so.

    Args:
        model: what drafts.
        head: the vocabulary projection that takes the place of its own, if any does.
        depth: most tokens of a chain.
        trees: of the requests.
        feeds: what the model must be fed of each.
        vocab_size: of the target.
    """
    fits = head is not None or model.vocab_size == vocab_size
    if not fits or not all(map(_follows, trees)):
        return False
    room = [1 + model.context_length - len(tree.text) for tree in trees]
    counts = [min(depth, tree.budget.max_depth, tree.most, most) for tree, most in zip(trees, room, strict=True)]
    pick = None
    drawn_from: list[list[Tensor | None]] = [[] for _ in trees]
    if head is not None or any(tree.races or tree.draws for tree in trees):

        def choose(active: Sequence[int], at: int, rows: Tensor) -> list[int]:
            chosen = _chosen([trees[i] for i in active], at, rows, head, vocab_size)
            for i, (_, distribution) in zip(active, chosen, strict=True):
                drawn_from[i].append(distribution)
            return [token for token, _ in chosen]

        pick = Pick(choose, states=head is not None)
    chains = model.chains(feeds, counts, pick)
    if chains is None:
        return False
    for tree, chain, distributions in zip(trees, chains, drawn_from, strict=True):
        for parent, token in enumerate(chain):
            if tree.width(parent):
                tree.add(parent, [token], distributions[parent] if tree.draws else None)
    return True


def _follows(tree: Growing) -> bool:
    """Whether every token is the one that follows the last: no choice of nodes, no stop."""
    budget, sampler = tree.budget, tree.sampler
    stops = budget.asks_for_confidence or budget.path_stop is not None
    chooses = tree.branches or tree.seen is not None
    return sampler.context_free and (tree.draws or tree.races or sampler.greedy) and not (stops or chooses)


def _chosen(trees: Sequence[Growing], depth: int, rows: Tensor, head: DraftHead | None, vocab_size: int) -> list[Next]:
    """The tokens behind ``depth`` drafts of each, from logits [n, V], or states [n, D] where there is a head."""
    logits = rows if head is None else head(rows)
    chosen: dict[int, Next] = {}
    freely = [i for i, tree in enumerate(trees) if tree.races or tree.draws]
    likeliest = [i for i, tree in enumerate(trees) if not (tree.races or tree.draws)]
    if likeliest:
        best, _ = argmaxes(logits[likeliest])
        tokens = best if head is None else head.mapped(torch.tensor(best)).tolist()
        chosen |= {i: (token, None) for i, token in zip(likeliest, tokens, strict=True)}
    if freely:
        wide = widened(logits[freely] if head is None else head.widened(logits[freely]), vocab_size)
        lengths = [len(trees[i].context.tokens) + depth for i in freely]
        chosen |= zip(freely, following([trees[i] for i in freely], wide.split(1), lengths), strict=True)
    return [chosen[i] for i in range(len(trees))]


def following(trees: Sequence[Growing], logits: Sequence[Tensor], lengths: Sequence[int]) -> list[Next]:
    """The token behind a node of each tree that draws or races, of requests whose pipelines are context-free.

    Those that sample alike share a call unless rows are long: one by one that takes longer to call than to run, and a
    draft model's step is short.

    Args:
        trees: of the requests.
        logits: [1, V] for each.
        lengths: tokens before the one that follows.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, (tree, row) in enumerate(zip(trees, logits, strict=True)):
        alike.setdefault(i if is_large(row) else (tree.sampler.recipe, tree.races), []).append(i)
    chosen: dict[int, Next] = {}
    for group in alike.values():
        samplers, rows = [trees[i].sampler for i in group], [logits[i] for i in group]
        if trees[group[0]].races:
            tokens = fixed_tokens(samplers, rows, [[lengths[i]] for i in group])
            chosen |= {i: (token, None) for i, (token,) in zip(group, tokens, strict=True)}
            continue
        distributions = samplers[0].distributions(torch.cat(rows), None)
        drawn = draw_each(distributions, [trees[i].context for i in group])
        chosen |= {i: (token, q) for i, token, q in zip(group, drawn, distributions, strict=True)}
    return [chosen[i] for i in range(len(trees))]
