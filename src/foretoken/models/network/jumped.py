"""Training of drafts that begin above the first layer: windows of layers below places all over a text, with gradients.

The same network, masks and positions as when a :class:`~foretoken.models.runner.TreeRunner` drafts so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.rectangle import growing_cache
from foretoken.models.network.alone import switched_attention
from foretoken.models.network.extra import run_nodes
from foretoken.models.network.layers import LayerPlan, running
from foretoken.models.network.taps import recording

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel


class Windows:
    """Chains of drafted nodes below places of texts.

    Args:
        model: the target, whose weights must be frozen already (``requires_grad_(False)``).
        tokens: texts [b, n].
        columns: places [b, R]: chain j sees the text before this column, and begins with the token in it.
        plan: the layers that draft.
        cache: keys and values of the text in the layers of the window.
    """

    def __init__(self, model: HuggingFaceModel, tokens: Tensor, columns: Tensor, plan: LayerPlan, cache: Any) -> None:
        self.model, self.tokens, self.columns, self.plan, self.cache = model, tokens, columns, plan, cache
        self.steps = 0

    def step(self, states: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Hidden states [b, R, D] by tap of one more node of every chain, from its state at ``plan.start``.

        Args:
            states: [b, R, D]; gradients flow to them, and on to those of the steps before.
            taps: ``"layer:i"`` inside the window.
        """
        n, count = self.tokens.shape[1], self.columns.shape[1]
        plans = [_chains(n, row, self.steps + 1) for row in self.columns.tolist()]
        ids = self.tokens.new_zeros(self.columns.shape)  # what is embedded is not read
        network, wide = self.model.forwards, states.to(self.model.dtype)
        with running(self.model.model, self.plan, wide), recording(self.model.model, taps) as recorded:
            run_nodes(network, ids, plans, self.cache)
        self.steps += 1
        return {name: rows[:, -count:] for name, rows in recorded.items()}


def _chains(length: int, columns: Sequence[int], steps: int) -> RowPlan:
    """A text as nodes of a tree, and below the places before ``columns`` chains that have ``steps`` nodes now."""
    count = len(columns)
    parents, depths = list(range(-1, length - 1)), list(range(length))
    for step in range(steps):
        before = len(parents) - count
        parents += [column - 1 if step == 0 else before + i for i, column in enumerate(columns)]
        depths += [column + step for column in columns]
    return RowPlan(0, parents, depths, count)


@contextmanager
def windows(
    model: HuggingFaceModel, tokens: Tensor, states: Tensor, columns: Tensor, plan: LayerPlan
) -> Iterator[Windows]:
    """Let the window read texts [b, n], from their states [b, n, D] at ``plan.start`` and without gradient, and draft
    below ``columns`` [b, R] inside the block.

    A float32 target runs under the caller's autocast, another one as it is.
    """
    cache = growing_cache()
    n = tokens.shape[1]
    text = RowPlan(0, range(-1, n - 1), range(n), n)
    as_is = nullcontext() if model.dtype == torch.float32 else torch.autocast(model.device.type, enabled=False)
    with as_is, switched_attention(model.forwards):
        with torch.no_grad(), running(model.model, plan, states.to(model.dtype)):
            run_nodes(model.forwards, tokens, [text] * len(tokens), cache)
        yield Windows(model, tokens, columns, plan, cache)
