"""Vocabulary projection of drafters: over all of the target's tokens, or only over its frequent ones.

Most of a small head's cost is the projection to a large vocabulary, and nearly all text uses few tokens: FR-Spec, Zhao
et al. 2025 (arXiv 2502.14856), like EAGLE-3's draft vocabulary.  Verification stays exact: tokens outside the draft
vocabulary come from the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.models.forward.parts import TargetParts
from foretoken.models.linear.draft_packing import packed_rows
from foretoken.models.linear.packing import draft_projection, weight_bytes
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.linear.quantised import fastest_draft_product, make_product
from foretoken.models.linear.quantised_products import NativeProduct
from foretoken.models.linear.quantised_weights import GROUP


class DraftHead:
    """Float32 logits of draft states, computed in packed bfloat16 if that is fastest.

    Args:
        ids: int64 [V_d], the target's ids in the draft vocabulary; ``None``: all.
        weight: [V_d, D] of the drafter's own projection; the target's rows by default.
        quantised: whether to use 8-bit rows; ``None``: as the target does.

    Attributes:
        weight_bytes: approximate bytes of the rows that it reads, as stored.
        replaced_bytes: bytes of the target's own projection.
        product: the product that multiplies its rows; ``None`` for the target's own.
    """

    def __init__(
        self, parts: TargetParts, ids: Tensor | None = None, weight: Tensor | None = None, quantised: bool | None = None
    ) -> None:
        if ids is not None and (not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= parts.vocab_size):
            raise ValueError(
                f"the draft vocabulary names tokens outside the target's vocabulary of {parts.vocab_size}: copy the "
                "drafter again"
            )
        self.vocab_size = parts.vocab_size
        self.ids = None if ids is None else ids.to(parts.device)
        self.replaced_bytes = weight_bytes(parts.head)
        self.weight_bytes = self.replaced_bytes * self.size // self.vocab_size
        self.product: Callable[[Tensor], Tensor] | None = None
        self._parts, self._weight = parts, weight
        self._native: NativeProduct | None = None
        self._project: Callable[[Tensor], Tensor] | None = None
        self.transform_logits: Callable[[Tensor], Tensor] = parts.transform_logits if weight is None else (lambda x: x)
        self.scale: float | None = parts.scale if weight is None else 1.0
        """Factor applied to the logits after the product; ``None`` if there are other operations."""
        if quantised is None:
            quantised = weight is None and self.ids is not None and isinstance(parts.head, QuantisedLinear)
        if quantised and parts.device.type == "cpu":
            self.product = self._in_8_bits(*self._rows())

    def _projection(self) -> Callable[[Tensor], Tensor]:
        """The function from states to logits, built on demand: a head that our library runs does not need it."""
        if self._weight is None and self.ids is None and self.product is None:
            return self._parts.draft_logits
        if self.product is None:
            self.product = draft_projection(*self._rows())
        multiplied, after = self.product, self.transform_logits
        return lambda states: after(multiplied(states).float())

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """Weights [V_d, D] and biases [V_d] of the draft vocabulary."""
        if self._weight is not None:
            return self._weight, None
        head, rows = self._parts.head, slice(None) if self.ids is None else self.ids
        return head.weight.detach()[rows], None if head.bias is None else head.bias.detach()[rows]

    def native(self) -> NativeProduct:
        """The projection as a product of our library, in 8 bits if the target has more."""
        if self._native is None:
            head = self._parts.head
            product = self.product
            if self._weight is None and self.ids is None and isinstance(head, QuantisedLinear):
                product = head.product
            self._native = product if isinstance(product, NativeProduct) else packed_rows(*self._rows())
            self.weight_bytes = self._native.nbytes
        return self._native

    def _in_8_bits(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """The product that is fastest here; never 4 bits, because its errors are errors of logits."""
        kind = fastest_draft_product(len(weight), weight.shape[1], GROUP, "8")
        if kind is None:
            return None
        product = make_product(kind, weight, bias, GROUP)
        self.weight_bytes = product.nbytes
        return product

    def __call__(self, states: Tensor) -> Tensor:
        """[n, V_d] of states [n, D]."""
        if self._project is None:
            with torch.inference_mode(False):  # the result outlives this call and must serve training, too
                self._project = self._projection()
        return self._project(states)

    @property
    def size(self) -> int:
        """V_d, the size of the draft vocabulary."""
        return self.vocab_size if self.ids is None else len(self.ids)

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of draft vocabulary indices, any shape."""
        return tokens if self.ids is None else self.ids[tokens]

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids, -inf outside the draft vocabulary."""
        if self.ids is None:
            return logits
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        wide[:, self.ids] = logits
        return wide

    def narrowed(self, rows: Tensor) -> Tensor:
        """The columns of rows [n, V] in the draft vocabulary, [n, V_d]."""
        return rows if self.ids is None else rows[:, self.ids]
