"""Learned tokens behind the vocabulary: ids V, V + 1, ... that only a model's token embedding knows.

A drafter feeds them as probes (:class:`foretoken.core.TokenTree`): they stand at places of which the text says nothing
yet, and what the target predicts there is a guess.  They are never text, and the vocabulary projection does not know
them.  While one is embedded the network sees token 0 in its place, and its row is put in behind the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.base import CapabilityError
from foretoken.models.cache.masks import RowPlan, additive_masks
from foretoken.models.cache.rectangle import growing_cache
from foretoken.models.network.alone import only_here, switched_attention
from foretoken.models.network.taps import recording

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network
    from foretoken.models.huggingface import HuggingFaceModel


def check_rows(network: Any, rows: Tensor) -> None:
    """Refuse rows that the network's token embedding cannot be extended by.

    Raises:
        CapabilityError: it has no plain token embedding.
        ValueError: rows of another width.
    """
    find = getattr(network, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    if not isinstance(embedding, nn.Embedding):
        raise CapabilityError(f"{type(network).__name__} has no token embedding that rows could be added to")
    size = embedding.embedding_dim
    if rows.dim() != 2 or rows.shape[1] != size:
        raise ValueError(f"extra embeddings must be [k, {size}], not {list(rows.shape)}")


def known_ids(ids: Tensor, first: int) -> Tensor:
    """``ids`` with token 0 in place of the extra ones, which begin at ``first``."""
    return ids.masked_fill(ids >= first, 0)


def put_in(embedded: Tensor, ids: Tensor, rows: Tensor, first: int) -> Tensor:
    """``embedded`` [b, n, D] with the rows [k, D] of extra ids in their places; ids [b, n]."""
    extra = F.embedding((ids - first).clamp_min(0), rows.to(embedded.dtype))
    return torch.where((ids >= first)[..., None], extra, embedded)


@contextmanager
def embedding_rows(network: Any, ids: Tensor, rows: Tensor, first: int) -> Iterator[Tensor]:
    """Inside the block the network embeds extra ids by ``rows`` [k, D]; yields the ids [b, n] that it may be given."""

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return put_in(output, ids, rows, first)

    handle = network.get_input_embeddings().register_forward_hook(only_here(after))
    try:
        yield known_ids(ids, first)
    finally:
        handle.remove()


def branch_states(model: HuggingFaceModel, tokens: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Hidden states [b, g, k, D] behind the final norm of k extra tokens in a chain below g places of every text;
    gradients flow to ``rows`` alone.

    Args:
        model, tokens, columns: as for :func:`chain_states`.
        rows: [k, D] what the extra tokens are embedded as.
    """
    ids = (model.vocab_size + torch.arange(len(rows), device=tokens.device)).expand(len(tokens), columns.shape[1], -1)
    return chain_states(
        model, tokens, columns, ids, lambda given: embedding_rows(model.model, given, rows, model.vocab_size)
    )


def chain_states(
    model: HuggingFaceModel,
    tokens: Tensor,
    columns: Tensor,
    ids: Tensor,
    within: Callable[[Tensor], AbstractContextManager[Tensor]],
) -> Tensor:
    """Hidden states [b, g, k, D] behind the final norm of chains of k tokens below g places of every text.

    The same network, masks and positions as when they are nodes below those places.  The text is read once without
    gradient, then all chains together over its keys and values.

    Args:
        model: the target, whose weights must be frozen already (``requires_grad_(False)``).
        tokens: texts [b, n].
        columns: places [b, g]: chain j sees the text up to and including this column.
        ids: [b, g, k] the tokens of the chains.
        within: what holds while the chains are run, given their ids [b, g k]; yields what the network is fed.

    Returns:
        in the target's dtype; a float32 target runs under the caller's autocast, another one as it is.
    """
    (b, n), (groups, k) = tokens.shape, ids.shape[1:]
    text = RowPlan(0, range(-1, n - 1), range(n), n)
    plans = [with_chains(text, row, k) for row in columns.tolist()]
    cache = growing_cache()
    network = model.forwards
    as_is = nullcontext() if model.dtype == torch.float32 else torch.autocast(model.device.type, enabled=False)
    with as_is, switched_attention(network), recording(model.model, ("last",)) as states:
        with torch.no_grad():
            run_nodes(network, tokens, [text] * b, cache)
        with within(ids.flatten(1)) as known:
            run_nodes(network, known, plans, cache)
    return states["last"].view(b, groups, k, -1)


def with_chains(text: RowPlan, columns: Sequence[int], k: int) -> RowPlan:
    """The text as nodes of a tree, and below the places ``columns`` chains of ``k`` new ones."""
    parents, depths = list(text.parents), list(text.depths)
    for column in columns:
        parents += [column, *range(len(parents), len(parents) + k - 1)]
        depths += range(column + 1, column + 1 + k)
    return RowPlan(0, parents, depths, k * len(columns))


def run_nodes(network: Network, ids: Tensor, plans: Sequence[RowPlan], cache: Any) -> None:
    """One public forward of nodes [b, n] over a growing cache; what it makes of them is recorded by the caller."""
    width, used = ids.shape[1], len(plans[0].parents)
    masks: Any = additive_masks(plans, network.layer_masks, width, used, network.dtype, network.device)
    network.model(
        input_ids=ids,
        position_ids=torch.tensor([list(plan.depths)[used - width :] for plan in plans], device=ids.device),
        attention_mask=masks[""] if network.single_mask else masks,
        use_cache=True,
        logits_to_keep=1,
        **{network.cache_argument: cache},
    )
