"""Texts with chains of tokens below some of their places, read in one pass, as drafts are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.rectangle import growing_cache
from foretoken.models.network.alone import switched_attention
from foretoken.models.network.extra import run_nodes, with_chains
from foretoken.models.network.taps import recording

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel


def chain_states(
    model: HuggingFaceModel, tokens: Tensor, columns: Tensor, chains: Tensor, grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Hidden states behind the final norm of texts [b, n, D] and of chains below their places [b, g, k, D].

    The masks and positions are those of drafts: a chain sees the text up to its column, and itself.

    Args:
        model: a network, whose weights get the gradients.
        tokens: texts [b, n].
        columns: places [b, g].
        chains: token ids [b, g, k].
        grad: whether there are any.

    Returns:
        in the model's dtype; a float32 model runs under the caller's autocast, another one as it is.
    """
    (b, n), k = tokens.shape, chains.shape[2]
    text = RowPlan(0, range(-1, n - 1), range(n), n)
    ids = torch.cat([tokens, chains.flatten(1)], 1)
    network, width = model.forwards, ids.shape[1]
    plans = [with_chains(text, row, k) for row in columns.tolist()]
    plans = [RowPlan(0, plan.parents, plan.depths, width) for plan in plans]  # all of it is new
    as_is = nullcontext() if model.dtype == torch.float32 else torch.autocast(model.device.type, enabled=False)
    with torch.set_grad_enabled(grad), as_is, switched_attention(network), recording(model.model, ("last",)) as states:
        run_nodes(network, ids, plans, growing_cache())
    last = states["last"]
    return last[:, :n], last[:, n:].view(b, -1, k, last.shape[-1])
