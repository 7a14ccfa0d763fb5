"""Drafts that are chains of the tokens that follow one another, whatever their chances, by one call of their model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.methods.drafters.drawing import ranked
from foretoken.methods.drafters.growing import Growing, widened
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.native_chain import Pick


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
    if head is not None or any(tree.races for tree in trees):

        def choose(active: Sequence[int], at: int, rows: Tensor) -> list[int]:
            return _chosen([trees[i] for i in active], at, rows, head, vocab_size)

        pick = Pick(choose, states=head is not None)
    chains = model.chains(feeds, counts, pick)
    if chains is None:
        return False
    for tree, chain in zip(trees, chains, strict=True):
        for parent, token in enumerate(chain):
            if tree.width(parent):
                tree.add(parent, [token])
    return True


def _follows(tree: Growing) -> bool:
    """Whether every token is the one that follows the last: no draw, no choice of nodes, no stop."""
    budget, sampler = tree.budget, tree.sampler
    stops = budget.asks_for_confidence or budget.path_stop is not None
    open_ended = tree.draws or tree.branches or tree.seen is not None
    return sampler.context_free and (tree.races or sampler.greedy) and not (stops or open_ended)


def _chosen(trees: Sequence[Growing], depth: int, rows: Tensor, head: DraftHead | None, vocab_size: int) -> list[int]:
    """The tokens behind ``depth`` drafts of each, from logits [n, V], or states [n, D] where there is a head."""
    logits = rows if head is None else head(rows)
    best = logits.argmax(-1)
    tokens: list[int] = (best if head is None else head.mapped(best)).tolist()
    for i, tree in enumerate(trees):
        if tree.races:
            row = logits[i : i + 1] if head is None else head.widened(logits[i : i + 1])
            length = len(tree.context.tokens) + depth
            tokens[i] = int(ranked(tree.sampler, widened(row, vocab_size), [length], None).argmax())
    return tokens
