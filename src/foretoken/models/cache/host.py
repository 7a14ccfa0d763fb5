"""Keys and values in host memory, for texts that are longer than what a device has room for.

A forward brings those of one layer at a time to its device, which is what TriForce (Sun et al. 2024,
https://arxiv.org/abs/2404.11912) does with the cache that it verifies on: the drafts in between read a small part that
stays on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.models.cache.rectangle import TreeCache

HOST = torch.device("cpu")


class HostCache(TreeCache):
    """A :class:`TreeCache` whose buffers are in host memory, whatever device writes and reads them."""

    def fresh(self) -> TreeCache:
        """An empty cache for the same layers, in host memory too."""
        return HostCache(self.num_layers, self.max_slots)

    def _write(self, store: list[Tensor | None], new: Tensor, layer: int) -> Tensor:
        return super()._write(store, new.to(HOST), layer).to(new.device)

    def _buffer(self, store: list[Tensor | None], like: Tensor, layer: int) -> Tensor:
        return super()._buffer(store, like.to(HOST), layer)
