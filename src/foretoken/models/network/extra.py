"""Learned tokens after the vocabulary: ids V, V + 1, ... that exist only in a model's token embedding.

A drafter feeds them as probes (:class:`foretoken.core.TokenTree`): they are at positions that the text has not reached,
and the target's predictions there are drafts.  They are never output, and the vocabulary projection does not have them.
The network embeds token 0 instead, and their rows are inserted after the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.base import CapabilityError
from foretoken.models.network.alone import only_here


class ExtraRows:
    """Rows [k, D] after the vocabulary, and who uses them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._users: WeakSet[Any] | None = WeakSet()

    def add(self, user: object) -> None:
        """Add a user; ``None`` keeps the rows for ever."""
        if user is None:
            self._users = None
        elif self._users is not None:
            self._users.add(user)

    @property
    def is_used(self) -> bool:
        return self._users is None or len(self._users) > 0


def check_rows(network: Any, rows: Tensor) -> None:
    """Raise an error if the rows cannot extend the network's token embedding."""
    find = getattr(network, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    if not isinstance(embedding, nn.Embedding):
        raise CapabilityError(f"{type(network).__name__} has no token embedding that rows could be added to")
    size = embedding.embedding_dim
    if rows.dim() != 2 or rows.shape[1] != size:
        raise ValueError(f"extra embeddings must be [k, {size}], not {list(rows.shape)}")


def known_ids(ids: Tensor, first: int) -> Tensor:
    """``ids`` with token 0 for extra ids, which begin at ``first``."""
    return ids.masked_fill(ids >= first, 0)


def put_in(embedded: Tensor, ids: Tensor, rows: Tensor, first: int) -> Tensor:
    """``embedded`` [b, n, D] with the rows [k, D] of extra ids inserted; ids [b, n]."""
    extra = F.embedding((ids - first).clamp_min(0), rows.to(embedded.dtype))
    return torch.where((ids >= first)[..., None], extra, embedded)


@contextmanager
def embedding_rows(network: Any, ids: Tensor, rows: Tensor, first: int) -> Iterator[Tensor]:
    """Inside the block, the network embeds extra ids as ``rows`` [k, D]; yields the ids [b, n] to feed it."""

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return put_in(output, ids, rows, first)

    handle = network.get_input_embeddings().register_forward_hook(only_here(after))
    try:
        yield known_ids(ids, first)
    finally:
        handle.remove()
