"""Draft tokens from a law: independent draws, distinct ones in sampling order, and the first of a race on noise.

The race is how drafters choose for a request with noise (:mod:`foretoken.noise`): the candidates of a place are the
tokens of largest ``log q + noise``, and since the target takes the token of largest ``log p + noise``, they are the
likelier to be right the nearer q is to p.  They are no draws any more: with the noise they are fixed, like the best
tokens of a greedy request, and are proposed, ranked, pruned and stopped just as these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.types import Context, LawMaker, NonFiniteLogitsError


def ranked(maker: LawMaker, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None) -> Tensor:
    """:meth:`LawMaker.ranking` of draft logits [n, V]: a row in which the request allows nothing is -inf throughout.

    Raises:
        NonFiniteLogitsError: NaN logits.
    """
    try:
        return maker.ranking(logits, lengths, prefixes)
    except NonFiniteLogitsError:
        if bool(logits.isnan().any()):
            raise
        if len(logits) == 1:
            return torch.full_like(logits, -torch.inf)
    each = zip(logits, lengths, prefixes or [()] * len(logits), strict=True)
    rows = [ranked(maker, row[None], [length], [prefix]) for row, length, prefix in each]
    return torch.cat([row.to(torch.float64) for row in rows])


def best(ranking: Tensor, count: int) -> list[int]:
    """The tokens of the ``count`` largest entries of a ranking [V], best first; impossible ones are left out."""
    values, tokens = ranking.topk(min(count, len(ranking)))
    return [t for v, t in zip(values.tolist(), tokens.tolist(), strict=True) if v > -torch.inf]


def best_ahead(logits: Tensor, contexts: Sequence[Context], ahead: Sequence[int], count: int) -> list[list[int]]:
    """Per row of draft logits [n, V] its ``count`` best tokens (impossible ones too, if nothing else is left).

    Args:
        logits: row i is about the token behind the text of ``contexts[i]`` and ``ahead[i]`` more.
        contexts: the request of each row.  One without noise gets the largest logits.
        ahead: draft tokens before the one that is guessed.
        count: tokens per row.
    """
    rows_of: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        if context.maker.noise is not None:
            rows_of.setdefault(id(context), []).append(row)
    if rows_of:
        logits = logits.to(torch.float32, copy=True)  # near-ties of guesses do not matter
    for rows in rows_of.values():
        context = contexts[rows[0]]
        text = context.tokens  # without the drafts before, which are not all known: penalties are nearly right
        lengths = [len(text) + ahead[row] for row in rows]
        logits[rows] = ranked(context.maker, logits[rows], lengths, [text] * len(rows)).to(logits)
    found: list[list[int]] = logits.topk(min(count, logits.shape[-1]), -1).indices.tolist()
    return found


def draw_iid(law: Tensor, count: int, context: Context) -> list[int]:
    """``count`` independent draws from ``law`` [V]."""
    cdf = law.cumsum(0)
    points = torch.tensor(context.rng.uniforms(count), dtype=law.dtype, device=law.device) * cdf[-1]
    drawn = torch.searchsorted(cdf, points, right=True).clamp_(max=len(law) - 1)
    found: list[int] = _positive(law, drawn).tolist()
    return found


def draw_each(laws: Tensor, contexts: Sequence[Context]) -> list[int]:
    """A draw from each of the laws [n, V], by the requests' own randomness: what :func:`draw_iid` draws, n at once."""
    cdf = laws.cumsum(-1)
    points = torch.tensor([context.rng.uniform() for context in contexts], dtype=laws.dtype, device=laws.device)
    drawn = torch.searchsorted(cdf, points[:, None] * cdf[:, -1:], right=True).clamp_(max=laws.shape[-1] - 1)
    found: list[int] = drawn[:, 0].tolist()
    for index, weight in enumerate(laws.gather(-1, drawn)[:, 0].tolist()):
        if not weight > 0:
            found[index] = int(_positive(laws[index], drawn[index]))
    return found


def _positive(law: Tensor, drawn: Tensor) -> Tensor:
    """Replace draws that rounding put on a token of zero probability by the last possible token."""
    if bool((law[drawn] > 0).all()):
        return drawn
    last = law.nonzero()[-1, 0]
    return torch.where(law[drawn] > 0, drawn, last)


def draw_without_replacement(law: Tensor, count: int, context: Context) -> list[int]:
    """``count`` distinct tokens drawn one after another from ``law`` [V], in sampling order.

    When fewer tokens have positive probability, all of those are returned and no more.
    """
    rest = law.clone()
    chosen: list[int] = []
    for _ in range(count):
        cdf = rest.cumsum(0)
        total = cdf[-1]
        if float(total) <= torch.finfo(law.dtype).tiny:
            break
        point = (total * context.rng.uniform())[None]
        token = min(int(torch.searchsorted(cdf, point, right=True)), len(law) - 1)
        if float(rest[token]) <= 0:
            positive = rest.nonzero()
            if not len(positive):
                break
            token = int(positive[-1, 0])
        chosen.append(token)
        rest[token] = 0.0
    return chosen
