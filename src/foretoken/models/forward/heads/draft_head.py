"""The vocabulary projection as drafters use it: over all of the target's tokens, or only over its frequent ones.

Most of what a small head costs is the projection to a large vocabulary, and nearly all text is made of few tokens:
FR-Spec, Zhao et al. 2025 (arXiv 2502.14856), as EAGLE-3's draft vocabulary.  Verification stays exact: what a drafter
cannot guess, the target says itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.models.forward.parts import TargetParts
from foretoken.models.linear.packing import Projection, pays_packed, weight_bytes
from foretoken.models.linear.quantised import fastest_draft_product, make_product
from foretoken.models.linear.quantised_linear import GROUP, QuantisedLinear


class DraftHead:
    """Logits of draft states, float32, in packed bfloat16 where that is the fastest way.

    Args:
        parts: the target.
        ids: int64 [V_d], the target's ids that can be guessed; ``None``: all.
        weight: [V_d, D] of a projection of the drafter's own; the target's rows by default.
        quantised: whether it multiplies by rows in 8 bits; ``None``: where the target does.

    Attributes:
        weight_bytes: of the rows that it reads, about, as it keeps them.
        replaced_bytes: of the target's own projection.
        product: what multiplies its rows; ``None`` where that is the target's own.

    Raises:
        ValueError: ids outside the target's vocabulary, or none.
    """

    def __init__(
        self,
        parts: TargetParts,
        ids: Tensor | None = None,
        weight: Tensor | None = None,
        quantised: bool | None = None,
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
        self._project = self._projection(parts, weight, quantised)

    def _projection(
        self, parts: TargetParts, weight: Tensor | None, quantised: bool | None
    ) -> Callable[[Tensor], Tensor]:
        if weight is None and self.ids is None and not quantised:
            return parts.draft_logits
        bias: Any = None
        behind: Callable[[Tensor], Tensor] = _same
        if quantised is None:
            quantised = weight is None and isinstance(parts.head, QuantisedLinear)
        if weight is None:
            rows: Any = slice(None) if self.ids is None else self.ids
            weight, bias, behind = parts.head.weight.detach()[rows], parts.head.bias, parts.behind
            bias = None if bias is None else bias.detach()[rows]
        product = self._in_8_bits(weight, bias) if quantised and weight.device.type == "cpu" else None
        if product is None:
            half = weight.to(torch.bfloat16)
            product = Projection(half if pays_packed(half) else weight, bias)
        self.product = multiplied = product
        return lambda states: behind(multiplied(states).float())

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


def _same(logits: Tensor) -> Tensor:
    return logits
