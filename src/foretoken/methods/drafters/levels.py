"""One level of drafts on a device: a single transfer for the children of all trees' nodes.

Each tree gets the same tokens as it would alone, with the same uniforms in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core import NON_FINITE, NonFiniteLogitsError
from foretoken.core.noise import send_together
from foretoken.core.race import race
from foretoken.core.sampling import checks_later, last_possible, running_sums
from foretoken.core.transfers import read_together
from foretoken.methods.drafters.drawing import draw_iid, draw_without_replacement, log_beliefs
from foretoken.methods.drafters.dynamic import WIDTH
from foretoken.methods.drafters.growing import Growing

WidthOf = Callable[[Growing, int], int]
"""Number of children of a tree's node, as far as the nodes before it leave room."""


@dataclass
class _Rows:
    """One tree's part in a level.

    Attributes:
        logits: [n, V] of its frontier's nodes.
        widths: maximum number of children of each.
        ranking: scores from which children are drawn or the best taken (:func:`_rank`).
    """

    tree: Growing
    logits: Tensor
    widths: list[int]
    ranking: Tensor = field(init=False)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens before the children of each node."""
        return [self.tree.length(node) for node in self.tree.frontier]

    @property
    def width(self) -> int:
        """Maximum number of children of any node."""
        return WIDTH if self.tree.candidates is not None else max(self.widths)


def choose_together(trees: Sequence[Growing], logits: Sequence[Tensor], width_of: WidthOf, iid: bool) -> None:
    """Set the children of the frontiers' nodes in the trees (``ready``; ``ranked`` for trees that grow by confidence),
    for requests whose sampling and stop rule depend on neither the prefix nor single probabilities.

    Args:
        logits: of the frontiers, [n, V] each, on a device.
        width_of: number of children of a node.
        iid: whether siblings are drawn independently.

    Raises:
        NonFiniteLogitsError: NaN logits.
    """
    level = [
        _Rows(tree, rows, [] if tree.candidates is not None else [width_of(tree, node) for node in tree.frontier])
        for tree, rows in zip(trees, logits, strict=True)
        if tree.sampler.context_free and not tree.budget.asks_for_confidence
    ]
    level = [part for part in level if part.tree.candidates is not None or any(part.widths)]
    noises = [
        (part.tree.sampler.noise, [length - part.tree.sampler.prompt_length for length in sorted(set(part.lengths))])
        for part in level
        if part.tree.races and part.tree.sampler.noise is not None
    ]
    if noises:
        send_together(noises, level[0].logits)
    drawn = [part for part in level if part.tree.draws]
    chosen = [part for part in level if not part.tree.draws]
    with checks_later() as best:
        for group in _alike(level):
            _rank(group)
    at_once = all(width <= 1 for part in drawn for width in part.widths)
    tops = _tops(chosen)
    points = _drawn_there(drawn) if at_once else [part.ranking for part in drawn]
    got = iter(read_together([*best, *(tensor for pair in tops for tensor in pair), *points]))
    if any(bool((largest.isnan() | (largest == torch.inf)).any()) for largest in [next(got) for _ in best]):
        raise NonFiniteLogitsError(NON_FINITE)
    for part in chosen:
        _leave_best(part, next(got), next(got))
    if at_once:
        _leave_drawn(drawn, got)
    else:
        for part in drawn:
            _draw_here(part, next(got), width_of, iid)


def _alike(level: Sequence[_Rows]) -> list[list[_Rows]]:
    """Groups of parts whose rows one call can rank."""
    groups: dict[Hashable, list[_Rows]] = {}
    for part in level:
        tree = part.tree
        groups.setdefault(
            (tree.draws, tree.races, tree.candidates is None, tree.sampler.greedy, tree.sampler.recipe), []
        ).append(part)
    return list(groups.values())


def _rank(group: Sequence[_Rows]) -> None:
    """Set the rankings: distributions where tokens are drawn, else scores whose largest entries are the best tokens."""
    first, logits = group[0].tree, [part.logits for part in group]
    if first.races:
        rows = race([part.tree.sampler for part in group], logits, [part.lengths for part in group])
    elif first.sampler.greedy or first.candidates is not None:
        rows = torch.cat(logits)
        rows = rows if rows.dtype == torch.float64 and first.sampler.greedy else rows.float()
    else:
        rows = first.sampler.distributions(torch.cat(logits), None)
    for part, ranking in zip(group, rows.split([*map(len, logits)]), strict=True):
        part.ranking = log_beliefs(ranking) if first.candidates is not None else ranking


# -- the best ones -----------------------------------------------------------------------------------------------------


def _tops(level: Sequence[_Rows]) -> list[tuple[Tensor, Tensor]]:
    """Values and tokens [n, w] of the largest entries of every part's rows."""
    tops = []
    for part in level:
        rows = part.ranking
        if part.width == 1:
            values, tokens = rows.max(-1, keepdim=True)
        else:
            values, tokens = rows.topk(min(part.width, rows.shape[-1]), -1)
        tops.append((values, tokens))
    return tops


def _leave_best(part: _Rows, values: Tensor, tokens: Tensor) -> None:
    """Store the best tokens in the tree, without impossible ones."""
    if bool(values.isnan().any()):
        raise NonFiniteLogitsError(NON_FINITE)
    if part.tree.candidates is not None:
        part.tree.ranked = (part.ranking, tokens.tolist(), values.tolist())
        return
    for node, best, log_probs in zip(part.tree.frontier, tokens.tolist(), values.tolist(), strict=True):
        chosen = [token for token, log_prob in zip(best, log_probs, strict=True) if log_prob > -torch.inf]
        part.tree.ready[node] = (None, chosen)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _drawn_there(level: Sequence[_Rows]) -> list[Tensor]:
    """One token for every node with a child, drawn on the device, and its weight: two tensors [n] over all parts."""
    if not level:
        return []
    rows = torch.cat([part.ranking[: _count(part)] for part in level])
    uniforms = [part.tree.context.rng.uniform() for part in level for _ in range(_count(part))]
    cdf = running_sums(rows)
    points = torch.tensor(uniforms, dtype=cdf.dtype, device=cdf.device)[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, points, right=True).clamp_(max=rows.shape[-1] - 1)
    return [tokens[:, 0], rows.gather(-1, tokens)[:, 0]]


def _count(part: _Rows) -> int:
    """Number of nodes with a child, the first of the frontier because the budget's nodes are used in order."""
    room = part.tree.budget.max_nodes - (len(part.tree.tokens) - 1)
    return max(0, min(sum(map(bool, part.widths)), room))


def _leave_drawn(level: Sequence[_Rows], got: Iterator[Tensor]) -> None:
    if not level:
        return
    drawn = iter(zip(next(got).tolist(), next(got).tolist(), strict=True))
    for part in level:
        for node, row in zip(part.tree.frontier[: _count(part)], part.ranking, strict=False):
            token, weight = next(drawn)
            if not weight > 0:  # rounding put the draw on a token of zero probability
                token = last_possible(row)
            part.tree.ready[node] = (row, [token])


def _draw_here(part: _Rows, rows: Tensor, width_of: WidthOf, iid: bool) -> None:
    """Draw the children of all nodes on the host from distributions [n, V]; the tree keeps those on the device."""
    tree, added = part.tree, 0
    room = tree.budget.max_nodes - (len(tree.tokens) - 1)
    for node, row, kept_row in zip(tree.frontier, rows, part.ranking, strict=True):
        width = max(0, min(tree.counts(tree.choices[node]), room - added, width_of(tree, node)))
        if not width:
            continue
        draw = draw_iid if iid or width == 1 else draw_without_replacement
        chosen = draw(row, width, tree.context)
        tree.ready[node] = (kept_row, chosen)
        added += len(chosen)
