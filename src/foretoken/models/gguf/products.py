"""Products with GGUF matrices, and the GGUF embedding."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.gguf.grouped import GroupedWeight, StoredWeight, dequantised, widened_together
from foretoken.models.linear.quantised_products import QuantisedProduct


class WidenedProduct(QuantisedProduct):
    """The plain product: some rows at a time are dequantised to float32 and multiplied in float32."""

    name, has_wide, stored = "GGUF weights, widened", False, True

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        super().__init__(weight.shape, bias)
        self.weight = weight
        self.bits = weight.bits if isinstance(weight, GroupedWeight) else 8 * weight.numbers.element_size()

    def product(self, x: Tensor) -> Tensor:
        return torch.cat(
            [F.linear(x.float(), self.weight.dequantised(rows)) for rows in widened_together(self.shape)], 1
        )

    def dense(self) -> Tensor:
        return self.weight.dequantised()

    def some(self, rows: slice) -> Tensor:
        return self.weight.dequantised(rows)

    def by_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return by_slabs(self, x.to(dtype))

    @property
    def mark(self) -> str:
        """Hash that distinguishes matrices of the same shape."""
        return mark_of(self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def by_slabs(product: QuantisedProduct, x: Tensor) -> Tensor:
    """x [..., in] -> x W^T (+ bias) [..., out] in the dtype of ``x``, with a product's dequantised weight.

    The weight is dequantised in slabs, never as a whole."""
    out = torch.cat([F.linear(x, product.some(rows).to(x.dtype)) for rows in widened_together(product.shape)], -1)
    return out if product.bias is None else out + product.bias.to(x.dtype)


def mark_of(weight: StoredWeight, num_rows: int = 8) -> str:
    """Hash over some rows of a matrix."""
    step = max(1, weight.shape[0] // num_rows)
    rows = weight.dequantised(slice(None, None, step))[:num_rows].contiguous()
    return hashlib.blake2b(rows.numpy().tobytes(), digest_size=8).hexdigest()


class StoredEmbedding(nn.Embedding):
    """An embedding that reads and dequantises only the selected rows of a file.

    Args:
        stored: rows [V, bytes], memory-mapped.
        dtype: dtype of the output.
        scale: factor of the output, as in Gemma; ``None``: none.
    """

    embed_scale: Tensor

    def __init__(self, stored: Tensor, kind: str, width: int, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        nn.Module.__init__(self)  # nn.Embedding's would allocate the table
        self.num_embeddings, self.embedding_dim, self.padding_idx = len(stored), width, None
        self.stored, self.kind, self.dtype = stored, kind, dtype
        if scale is not None:
            self.register_buffer("embed_scale", scale, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[V, D] all rows in ``dtype``, computed on every access."""
        return self.rows(torch.arange(self.num_embeddings))

    def sampled(self, count: int) -> Tensor:
        """``count`` rows [n, D], evenly spaced."""
        step = max(1, self.num_embeddings // count)
        return self.rows(torch.arange(0, self.num_embeddings, step)[:count])

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in the file."""
        return self.stored.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """[..., D] of ids [...], without the scale."""
        rows = dequantised(self.stored[ids.reshape(-1)], self.kind).to(self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D] of ids [...]."""
        rows = self.rows(ids)
        scale: Any = self._buffers.get("embed_scale")
        return rows if scale is None else rows * scale.to(self.dtype)
