"""The vocabulary projection as drafters use it: over all of the target's tokens, or only over its frequent ones.

Most of what a small head costs is the projection to a large vocabulary, and nearly all text is made of few tokens:
FR-Spec, Zhao et al. 2025 (arXiv 2502.14856), as EAGLE-3's draft vocabulary.  Verification stays exact: what a drafter
cannot guess, the target says itself.
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
    """Logits of draft states, float32, in packed bfloat16 where that is the fastest way.

    Args:
        ids: int64 [V_d], the target's ids that can be guessed; ``None``: all.
        weight: [V_d, D] of a projection of the drafter's own; the target's rows by default.
        quantised: whether it multiplies by rows in 8 bits; ``None``: where the target does.

    Attributes:
        weight_bytes: of the rows that it reads, about, as it keeps them.
        replaced_bytes: of the target's own projection.
        product: what multiplies its rows; ``None`` where that is the target's own.
    """

    def __init__(
        self, parts: TargetParts, ids: Tensor | None = None, weight: Tensor | None = None, quantised: bool | None = None
    ) -> None:
        if ids is not None and (not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= parts.vocab_size):
            raise ValueError(
                f"the draft vocabulary names tokens outside the target's {parts.vocab_size}: copy the drafter again"
            )
        self.vocab_size = parts.vocab_size
        self.ids = None if ids is None else ids.to(parts.device)
        self.replaced_bytes = weight_bytes(parts.head)
        self.weight_bytes = self.replaced_bytes * self.size // self.vocab_size
        self.product: Callable[[Tensor], Tensor] | None = None
        self._parts, self._weight = parts, weight
        self._native: NativeProduct | None = None
        self._project: Callable[[Tensor], Tensor] | None = None
        self.behind: Callable[[Tensor], Tensor] = parts.behind if weight is None else (lambda x: x)
        self.scale: float | None = parts.scale if weight is None else 1.0
        """What logits are multiplied with behind the product; ``None`` where that is not all that is done to them."""
        if quantised is None:
            quantised = weight is None and self.ids is not None and isinstance(parts.head, QuantisedLinear)
        if quantised and parts.device.type == "cpu":
            self.product = self._in_8_bits(*self._rows())

    def _projection(self) -> Callable[[Tensor], Tensor]:
        """What makes logits of states, made when it is asked for: a head that our library runs has no use for it."""
        if self._weight is None and self.ids is None and self.product is None:
            return self._parts.draft_logits
        if self.product is None:
            self.product = draft_projection(*self._rows())
        multiplied, behind = self.product, self.behind
        return lambda states: behind(multiplied(states).float())

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """The weights [V_d, D] and biases [V_d] of the tokens that can be guessed."""
        if self._weight is not None:
            return self._weight, None
        head, rows = self._parts.head, slice(None) if self.ids is None else self.ids
        return head.weight.detach()[rows], None if head.bias is None else head.bias.detach()[rows]

    def native(self) -> NativeProduct:
        """The projection as our library multiplies by it, in 8 bits where the target has it in more."""
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
            with torch.inference_mode(False):  # what outlives this call must serve training, too
                self._project = self._projection()
        return self._project(states)

    @property
    def size(self) -> int:
        """V_d: how many tokens can be guessed."""
        return self.vocab_size if self.ids is None else len(self.ids)

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of places in the logits, any shape."""
        return tokens if self.ids is None else self.ids[tokens]

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids: what cannot be guessed is impossible."""
        if self.ids is None:
            return logits
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        wide[:, self.ids] = logits
        return wide

    def narrowed(self, rows: Tensor) -> Tensor:
        """Of rows [n, V] over the target's ids what is about tokens that can be guessed, [n, V_d]."""
        return rows if self.ids is None else rows[:, self.ids]
