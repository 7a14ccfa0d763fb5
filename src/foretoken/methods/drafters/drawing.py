"""Choose draft tokens: independent draws from a distribution, distinct ones in sampling order, or the winners of a
race.

The race chooses tokens for a request with noise (:mod:`foretoken.core.noise`): the candidates of a position are the
tokens of largest ``log q + noise``.  The target takes the token of largest ``log p + noise``, so they are more likely
right the nearer q is to p.  Given the noise they are fixed, like the best tokens of a greedy request, and are proposed,
ranked, pruned and stopped like these.

How the candidates of a position are chosen, by the request and a drafter's option ``draw``:

    temperature 0                        the best tokens                            POINT, without q
    with noise                           the first of the race                      POINT, without q
    with noise, draw=greedy              the likeliest tokens                       POINT, without q
    without noise, draw=iid              independent draws                          IID, with q
    without noise, without_replacement   draws without the earlier siblings         WITHOUT_REPLACEMENT, with q
    without noise, draw=greedy           the likeliest tokens                       POINT, without q
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Budget, Context, NonFiniteLogitsError
from foretoken.core.largest import largest
from foretoken.core.sampling import Sampler, draw, draws
from foretoken.models.forward.heads.draft_head import DraftHead


def ranked(
    sampler: Sampler, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None
) -> Tensor:
    """:meth:`Sampler.ranking` of draft logits [n, V]; all -inf in a row in which the request allows no token.

    Raises:
        NonFiniteLogitsError: NaN logits.
    """
    try:
        return sampler.ranking(logits, lengths, prefixes)
    except NonFiniteLogitsError:
        if bool(logits.isnan().any()):
            raise
        if len(logits) == 1:
            return torch.full_like(logits, -torch.inf)
    each = zip(logits, lengths, prefixes or [()] * len(logits), strict=True)
    rows = [ranked(sampler, row[None], [length], [prefix]) for row, length, prefix in each]
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    return torch.cat([row.to(wide) for row in rows])


def ranker(sampler: Sampler, likeliest: bool = False) -> Sampler | None:
    """The sampler by which :func:`ranked` chooses the candidates; ``None`` where the draft's logits alone do, or where
    tokens are drawn.

    Requests with noise get the winners of the race.  Greedy requests whose rules exclude tokens get allowed ones,
    because no others are ever accepted.  Penalties alone are no reason: a draft is flatter than the target, so they
    change far more of its ranks.

    Args:
        likeliest: whether requests that sample get the likeliest tokens instead (``draw=greedy``), as greedy ones do.
    """
    if likeliest or sampler.noise is None:
        return sampler.noiseless if sampler.restricts and (likeliest or sampler.greedy) else None
    return sampler


def distribution_of(sampler: Sampler, logits: Tensor, prefix: Sequence[int]) -> Tensor | None:
    """:meth:`Sampler.distribution` of draft logits [V]; ``None`` if the request allows no token.

    Raises:
        NonFiniteLogitsError: NaN logits.
    """
    try:
        return sampler.distribution(logits, prefix)
    except NonFiniteLogitsError:
        if bool(logits.isnan().any()):
            raise
        return None


def probabilities_of(sampler: Sampler, logits: Tensor, prefix: Sequence[int], length: int) -> Tensor | None:
    """Distribution [V] of the token after ``length`` tokens, by draft logits [V]: with noise by its race, for a greedy
    request with rules among the allowed tokens, else by its sampler; ``None`` if the request allows no token."""
    if ranker(sampler) is None:
        return distribution_of(sampler, logits, prefix)
    ranking = ranked(sampler, logits[None], [length], [prefix])[0]
    return torch.softmax(ranking, -1) if bool(ranking.max() > -torch.inf) else None


def log_beliefs(rows: Tensor) -> Tensor:
    """Log-probabilities [n, V] from unnormalised ones; a row of -inf stays so."""
    return rows - rows.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)


def best(ranking: Tensor, count: int) -> list[int]:
    """The tokens of the ``count`` largest entries of a ranking [V], best first, without impossible ones."""
    values, tokens = largest(ranking, min(count, len(ranking)))
    return [t for v, t in zip(values.tolist(), tokens.tolist(), strict=True) if v > -torch.inf]


def raced_ahead(
    logits: Tensor, contexts: Sequence[Context], ahead: Sequence[int], head: DraftHead | None = None
) -> tuple[Tensor, DraftHead | None]:
    """Draft logits [n, V], for requests with noise as ranked by the race, and the head that they belong to.

    Args:
        logits: row i predicts the token after the tokens of ``contexts[i]`` and ``ahead[i]`` more.
        ahead: draft tokens before the predicted one.
        head: the head of the logits, if they are not over the target's vocabulary, which a race requires.
    """
    rows_of: dict[int, list[int]] = {}
    pipelines: dict[int, Sampler] = {}
    for row, (context, count) in enumerate(zip(contexts, ahead, strict=True)):
        # A grammar is not applied further ahead: it allows other tokens there than right after the committed ones.
        knows_text = not count or context.constraint is None
        sampler = context.sampler if knows_text else context.sampler.unprocessed
        if ranker(sampler) is not None:
            pipelines[id(sampler)] = sampler
            rows_of.setdefault(id(sampler), []).append(row)
    if rows_of:
        logits, head = (logits if head is None else head.widened(logits)), None
        logits = logits.to(torch.float32, copy=True)  # near-ties of draft tokens do not matter
    for key, rows in rows_of.items():
        # The draft tokens in between are not all known, so penalties are only nearly right.
        tokens = contexts[rows[0]].tokens
        lengths = [len(tokens) + ahead[row] for row in rows]
        logits[rows] = ranked(pipelines[key], logits[rows], lengths, [tokens] * len(rows)).to(logits)
    return logits, head


def best_ahead(logits: Tensor, contexts: Sequence[Context], ahead: Sequence[int], count: int) -> list[list[int]]:
    """The ``count`` best tokens of every row of draft logits [n, V] (with impossible ones, if necessary); arguments as
    for :func:`raced_ahead`."""
    return best_tokens(raced_ahead(logits, contexts, ahead)[0], count)


def best_tokens(logits: Tensor, count: int, head: DraftHead | None = None) -> list[list[int]]:
    """The tokens of the ``count`` largest entries of every row of a head's logits [n, V], largest first; by default the
    head is the target's."""
    tokens = largest(logits, min(count, logits.shape[-1]))[1]
    return (tokens if head is None else head.mapped(tokens)).tolist()


def ends_draft(budget: Budget, logits: Tensor, token: int) -> bool:
    """Whether a stop rule ends a draft after a token, by the softmax of its logits [V]."""
    if not budget.asks_for_confidence:
        return False
    distribution = torch.softmax(logits.float(), -1)
    return budget.stops_after(distribution, float(distribution[token]))


def draw_iid(distribution: Tensor, count: int, context: Context) -> list[int]:
    return drawn_at(distribution, context.rng.uniforms(count))


def drawn_at(distribution: Tensor, uniforms: Sequence[float]) -> list[int]:
    """The draws from ``distribution`` [V] for the given uniforms."""
    return draws(distribution[None], [uniforms])[0]


def draw_each(distributions: Tensor, contexts: Sequence[Context]) -> list[int]:
    """A draw from each of the distributions [n, V] by its request's random numbers, as by :func:`draw_iid` but in one
    call."""
    return [token for (token,) in draws(distributions, [[context.rng.uniform()] for context in contexts])]


def draw_without_replacement(distribution: Tensor, count: int, context: Context) -> list[int]:
    """``count`` distinct tokens drawn one after another from ``distribution`` [V], in sampling order.

    If fewer tokens have positive probability, all of those are returned.
    """
    weights = distribution.clone()
    chosen: list[int] = []
    while len(chosen) < count and float(weights.sum()) > torch.finfo(distribution.dtype).tiny:
        token = draw(weights, context.rng.uniform())
        chosen.append(token)
        weights[token] = 0.0
    return chosen
