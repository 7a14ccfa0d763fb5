"""Shared code of the lossy rules: the path with the longest leading run of tokens that satisfy a predicate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, verdict_at


def graded_distribution(scores: Scores, node: int) -> Tensor:
    """The distribution [V] that ranks tokens after ``node``.

    At temperature 0 ``p`` is one-hot and ranks nothing, so this is the softmax of the raw logits. Penalties, biases and
    processors (a grammar, say) are not part of raw logits, so with them it is ``p`` itself.
    """
    if scores.sampler.greedy and scores.sampler.context_free:
        logits = scores.logits[node]
        return torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return scores.p(node)


def is_forbidden(scores: Scores, p: Tensor, token: int) -> bool:
    """Whether the request rules out a token (``p`` [V] of its node): no rule may accept it."""
    return not scores.sampler.context_free and float(p[token]) <= 0.0


def longest_run(
    tree: TokenTree, distribution: Callable[[int], Tensor], accepts: Callable[[int, Tensor, int], bool]
) -> tuple[int, ...]:
    """Nodes of the longest path whose every token is accepted; a tie goes to the larger sum of log-probabilities.

    ``accepts(parent, distribution of the parent [V], token)`` judges one token; ``distribution`` is called once per
    reached node.
    """
    best, best_key = 0, (0, 0.0)
    open_nodes = [(0, 0, 0.0)]  # node, depth, log-probability of its path
    while open_nodes:
        node, depth, score = open_nodes.pop()
        if (depth, score) > best_key:
            best, best_key = node, (depth, score)
        if not tree.children[node]:
            continue
        p = distribution(node)
        for child in reversed(tree.children[node]):  # the stack reverses the order: earlier siblings come first
            token = tree.tokens[child]
            if accepts(node, p, token):
                open_nodes.append((child, depth + 1, score + log(float(p[token]))))
    return tuple(tree.path(best)[1:])


def log(weight: float) -> float:
    """Natural logarithm, -inf for zero."""
    return math.log(weight) if weight > 0.0 else -math.inf


def close(tree: TokenTree, scores: Scores, coins: Coins, path: tuple[int, ...], sample_next: bool) -> Verdict:
    """The verdict for an accepted path: its next token is the target's argmax, or a draw from its distribution."""
    last = path[-1] if path else 0
    return verdict_at(tree, path, coins.draw(scores.p(last)) if sample_next else scores.argmax(last))
