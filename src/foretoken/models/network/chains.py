"""Texts with chains of tokens below some of their places, read in one pass, as drafts are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.models.cache.masks import RowPlan, additive_masks
from foretoken.models.network.alone import switched_attention
from foretoken.models.network.taps import recording

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel


def with_chains(text: RowPlan, columns: Sequence[int], k: int) -> RowPlan:
    """The text as nodes of a tree, and below the places ``columns`` chains of ``k`` new ones."""
    parents, depths = list(text.parents), list(text.depths)
    for column in columns:
        parents += [column, *range(len(parents), len(parents) + k - 1)]
        depths += range(column + 1, column + 1 + k)
    return RowPlan(0, parents, depths, k * len(columns))


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
    found = [with_chains(text, row, k) for row in columns.tolist()]
    ids = torch.cat([tokens, chains.flatten(1)], 1)
    width, network = ids.shape[1], model.forwards
    plans = [RowPlan(0, plan.parents, plan.depths, width) for plan in found]
    masks: Any = additive_masks(plans, network.layer_masks, width, width, network.dtype, network.device)
    as_is = nullcontext() if model.dtype == torch.float32 else torch.autocast(model.device.type, enabled=False)
    with torch.set_grad_enabled(grad), as_is, switched_attention(network), recording(model.model, ("last",)) as states:
        network.model(
            input_ids=ids,
            position_ids=torch.tensor([list(plan.depths) for plan in plans], device=ids.device),
            attention_mask=masks[""] if network.single_mask else masks,
            use_cache=False,
            logits_to_keep=1,
        )
    last = states["last"]
    return last[:, :n], last[:, n:].view(b, -1, k, last.shape[-1])
