"""Draft tokens from a law: independent draws, and distinct ones in sampling order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.types import Context


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
