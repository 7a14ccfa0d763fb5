"""Drafts that are chains without stop rules, grown by a single call of their model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from foretoken.core import argmaxes, is_large
from foretoken.core.race import fixed_tokens
from foretoken.methods.drafters.drawing import distribution_of, draw_each, draw_iid, ranked
from foretoken.methods.drafters.growing import Growing, widened
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.native_chain import Pick

Next = tuple[int | None, Tensor | None]
"""A token, ``None`` if the request allows none; and the distribution [V] that it was drawn from, if it was drawn."""


def grow_chains(
    model: LanguageModel,
    head: DraftHead | None,
    depth: int,
    trees: Sequence[Growing],
    feeds: Sequence[Feed],
    vocab_size: int,
) -> bool:
    """Grow all trees, if all are such chains and the model has such a call; return whether it did.

    Args:
        head: a vocabulary projection that replaces the model's.
        feeds: the model's feed for each.
    """
    fits = head is not None or model.vocab_size == vocab_size
    if not fits or not all(map(_follows, trees)):
        return False
    room = [1 + model.context_length - len(tree.committed) for tree in trees]
    counts = [min(depth, tree.budget.max_depth, tree.most, most) for tree, most in zip(trees, room, strict=True)]
    drafts: list[list[Next]] = [[] for _ in trees]

    def choose(active: Sequence[int], at: int, rows: Tensor) -> list[int]:
        logits = rows if head is None else head(rows)
        chosen = _chosen([trees[i] for i in active], [drafts[i] for i in active], logits, head, vocab_size)
        for i, each in zip(active, chosen, strict=True):
            drafts[i].append(each)
        return [token or 0 for token, _ in chosen]

    plain = head is None and not any(map(_asks_sampler, trees))
    chains = model.chains(feeds, counts, None if plain else Pick(choose, states=head is not None))
    if chains is None:
        return False
    if plain:
        drafts = [[(token, None) for token in chain] for chain in chains]
    for tree, draft in zip(trees, drafts, strict=True):
        for parent, (token, distribution) in enumerate(draft):
            if token is None or not tree.width(parent):
                break
            tree.add(parent, [token], distribution)
    return True


def _follows(tree: Growing) -> bool:
    """Whether every token simply follows the last one, without a choice of nodes or a stop rule."""
    stops = tree.budget.asks_for_confidence or tree.budget.path_stop is not None
    chooses = tree.branches or tree.candidates is not None
    return (tree.draws or tree.races or tree.sampler.greedy) and not (stops or chooses)


def _asks_sampler(tree: Growing) -> bool:
    """Whether the next token is not simply the likeliest."""
    return tree.races or tree.draws or not tree.sampler.context_free


def _chosen(
    trees: Sequence[Growing], drafts: Sequence[Sequence[Next]], logits: Tensor, head: DraftHead | None, vocab_size: int
) -> list[Next]:
    """The next token of each draft, from logits [n, V'] over the draft vocabulary."""
    asking = [i for i, tree in enumerate(trees) if _asks_sampler(tree)]
    likeliest = [i for i, tree in enumerate(trees) if not _asks_sampler(tree)]
    chosen: dict[int, Next] = {}
    if likeliest:
        best, _ = argmaxes(logits[likeliest])
        tokens = best if head is None else head.mapped(torch.tensor(best)).tolist()
        chosen |= {i: (token, None) for i, token in zip(likeliest, tokens, strict=True)}
    if asking:
        wide = widened(logits[asking] if head is None else head.widened(logits[asking]), vocab_size).split(1)
        rows = dict(zip(asking, wide, strict=True))
        alike = [i for i in asking if trees[i].sampler.context_free]
        lengths = [len(trees[i].context.tokens) + len(drafts[i]) for i in alike]
        chosen |= zip(alike, following([trees[i] for i in alike], [rows[i] for i in alike], lengths), strict=True)
        chosen |= {i: _behind(trees[i], drafts[i], rows[i]) for i in asking if i not in chosen}
    return [chosen[i] for i in range(len(trees))]


def _behind(tree: Growing, draft: Sequence[Next], row: Tensor) -> Next:
    """The token after a draft of a request with a context-dependent sampler, from logits [1, V]."""
    prefix = [*tree.context.tokens]
    for token, _ in draft:
        if token is None:  # no token follows, so the request's rules are not applied after it
            return None, None
        prefix.append(token)
    if tree.draws:
        distribution = distribution_of(tree.sampler, row[0], prefix)
        return (None, None) if distribution is None else (draw_iid(distribution, 1, tree.context)[0], distribution)
    ranking = ranked(tree.ranker or tree.sampler, row, [len(prefix)], [prefix])
    (token,), _ = argmaxes(ranking)
    return (token if float(ranking[0, token]) > -torch.inf else None), None


def following(trees: Sequence[Growing], logits: Sequence[Tensor], lengths: Sequence[int]) -> list[Next]:
    """The token after a node of each tree that draws or races, for requests with context-free samplers.

    Requests that sample alike share a call unless rows are long, because call overhead exceeds the work of a single
    request in a draft model's short step.

    Args:
        logits: [1, V] for each.
        lengths: number of tokens before the next one.
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
