"""Blockwise parallel decoding: each step trains one randomly drawn head (arXiv 1811.03115, section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.bpd import BpdDrafter
from foretoken.methods.drafters.nets.bpd import BpdConfig, BpdHeads
from foretoken.training.recipes.base import Batch, Recipe, check_labels, check_rank, cross_entropy, soft_cross_entropy


@dataclass(frozen=True)
class BpdSettings(BpdConfig):
    """The heads' shape and training settings.

    Attributes:
        labels: labels of heads 2 to k: ``"target"`` (the target's distribution, which they must predict) or ``"text"``
            (the paper's labels).
        mode: ``"frozen"`` (only the heads) or ``"finetune"`` (the target too, whose own loss is that of head 1).
        rank: in the mode ``"finetune"``, 0 trains all weights of the target, a positive rank only a low-rank update of
            its linear layers.
    """

    labels: str = "target"
    mode: str = "frozen"
    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels)
        if self.mode not in ("frozen", "finetune"):
            raise ValueError(f"mode must be frozen or finetune, not {self.mode!r}")
        check_rank(self.rank, self.mode == "finetune")


class BpdRecipe(Recipe):
    """Head i learns the token i positions after the one whose state it reads.

    The mean loss over heads would need the logits of all of them at once.  The loss of one uniformly drawn head is an
    unbiased estimate.
    """

    drafter_class = BpdDrafter
    config_class: ClassVar[type[Any]] = BpdSettings
    net: BpdHeads
    config: BpdSettings

    @property
    def trains_target(self) -> bool:
        return self.config.mode == "finetune"

    @property
    def ahead(self) -> int:
        return self.config.k - 1

    def from_target(self) -> dict[str, Any]:
        return {"hidden_size": self.parts.hidden_size}

    def build(self) -> nn.Module:
        """New heads, whose norms start at the typical size of the target's states."""
        # Tokens spread over the vocabulary, to measure the typical size of the target's states
        ids = torch.linspace(0, self.parts.vocab_size - 1, 64, device=self.parts.device).long()
        with torch.no_grad():
            states = self.parts.features(ids[None], ("last",))["last"].float()
        return BpdHeads(self.config, size=float(states.square().mean().sqrt()))

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The loss of one head; head 1 is drawn only if it is trained."""
        first = 1 if self.trains_target else 2
        return self.head_loss(batch, int(torch.randint(first, self.config.k + 1, (1,), generator=generator)))

    def head_loss(self, batch: Batch, head: int) -> Tensor:
        """Mean cross-entropy of one head (1 to k) at all positions followed by at least ``head`` tokens; there must be
        one."""
        length = batch.length - head + 1
        if length < 1:
            raise ValueError(f"blocks of {batch.length} tokens are too short: use a larger --context")
        states = batch.taps["last"][:, :length].flatten(0, 1).float()
        logits = self.parts.logits(states if head == 1 else self.net(states, [head])[0])
        counted = None if batch.learned is None else batch.learned[:, head:].flatten().float()
        if head == 1 or self.config.labels == "text":
            return cross_entropy(logits, batch.tokens[:, head:].flatten(), counted)
        blocks = torch.arange(len(batch.tokens), device=states.device).repeat_interleave(length)
        columns = torch.arange(head - 1, batch.length, device=states.device).repeat(len(batch.tokens))
        return soft_cross_entropy(logits, batch.teacher(blocks, columns), counted)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return BpdDrafter(self.net, self.parts)
