"""Training of a draft model that reads the target's states beside its tokens (PARD-2, arXiv 2605.08632).

Every row reads the projected state of the token before it, a mask row that of its anchor's row.  Some texts are read
without states, so that the same weights also draft without a target.  A row is weighted by the target's probability of
the tokens that its masks stand for, because draft tokens after a wrong one are never accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.methods.drafters.target_states import LAYERS, NAME, SCALE, taps_of
from foretoken.models.forward.parts import TargetParts

OWN_SHARE = 0.1
"""Weight of the cross entropy of the text's own tokens, relative to the target's distribution."""


def layers_of(taps: str) -> tuple[int, ...]:
    """The hidden states of an option ``taps``: numbers joined by ``+``, or ``usual``; empty for none.  Raises
    ``ValueError`` for anything else."""
    if not taps:
        return ()
    if taps == "usual":
        return LAYERS
    try:
        return tuple(int(part) for part in taps.split("+"))
    except ValueError:
        raise ValueError(f"taps must be usual, or hidden states such as -1+-8+-16, not {taps!r}") from None


class StateRows:
    """The projection of one student, a causal LM; a module of it during training.  ``layers`` are the target's hidden
    states to read, in Transformers' numbering."""

    def __init__(self, student: Any, parts: TargetParts, layers: Sequence[int]) -> None:
        self.student, self.parts = student, parts
        self.taps = taps_of(layers, parts.num_layers)
        size, hidden = parts.hidden_size * len(layers), int(student.config.get_text_config().hidden_size)
        if getattr(student, NAME, None) is None:
            projection = nn.Linear(size, hidden, bias=False)
            nn.init.normal_(projection.weight, std=size**-0.5, generator=torch.Generator().manual_seed(0))
            setattr(student, NAME, projection.to(student.device))
        keys = {"pard2": True, "spd_type": "pard2", "pard2_scale": SCALE, "pard2_proj_bias": False}
        keys |= {"pard2_target_dim": size, "pard2_target_layers": list(layers)}
        for key, value in keys.items():
            setattr(student.config, key, value)

    def embedded(
        self, ids: Tensor, states: Mapping[str, Tensor], anchors: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Inputs [b, m, D] of the student for ids [b, m] of rows with ``anchors`` [m], from the target's states [b, n,
        D_target] of the text, by tap."""
        projection: nn.Linear = getattr(self.student, NAME)
        beside = projection(torch.cat([states[tap].float() for tap in self.taps], -1)) * SCALE
        before = F.pad(beside, (0, 0, 1, 0))[:, anchors]  # position t of the padded states belongs to token t - 1
        keep = torch.rand(len(ids), generator=generator) >= 0.1  # a tenth of the texts is read without states
        embedded: Tensor = self.student.get_input_embeddings()(ids)
        return embedded + before * keep.to(before.device)[:, None, None]

    @staticmethod
    def weights(logits: Tensor, tokens: Tensor, anchors: Tensor, depths: Tensor) -> Tensor:
        """[b, m]: the target's probability of the tokens after every row's anchor up to its position, from logits [b,
        n, V] of texts [b, n + 1]."""
        log_chances = [torch.log_softmax(row[:-1].float(), -1) for row in logits]  # one text at a time: memory
        token_chances = torch.stack(
            [row.gather(-1, row_tokens[1:-1, None])[:, 0] for row, row_tokens in zip(log_chances, tokens, strict=True)]
        )
        sums = F.pad(token_chances.cumsum(-1), (1, 0))  # over the tokens up to each position
        return (sums[:, anchors + depths] - sums[:, anchors]).exp()


def stored_apart(student: Any) -> dict[str, Tensor]:
    """The projection in the layout of its own file.  It is removed from the student, which is then an ordinary
    model."""
    projection = getattr(student, NAME)
    delattr(student, NAME)
    return {f"{NAME}.{name}": value.detach().to(torch.bfloat16).cpu() for name, value in projection.named_parameters()}
