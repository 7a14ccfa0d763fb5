"""What the target says at places of a batch, which is what a drafter learns."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.training.recipes.base import Batch, cross_entropy, soft_cross_entropy

CHUNK = 512
"""Places whose logits over the target's whole vocabulary are made at once."""


class Labels:
    """The target's distributions after tokens of a batch, over the tokens that can be guessed.

    With a small draft vocabulary they are made once for all places: steps and heads share most of them, and the
    target's projection costs more than all else.  A place does not count where the target's likeliest token cannot be
    guessed.

    Args:
        places: bool [b, n], those that will be asked for; with ``ids`` only.
        ids: int64 [V_d], the tokens that can be guessed; ``None``: all.
    """

    @torch.no_grad()
    def __init__(self, batch: Batch, places: Tensor | None = None, ids: Tensor | None = None) -> None:
        self.batch, self.ids = batch, ids
        if ids is None or places is None:
            return
        if batch.learned is not None:
            places = places & batch.learned[:, 1:]
        self.distributions = torch.zeros(*places.shape, len(ids), device=places.device)
        self.counted = torch.zeros(places.shape, device=places.device)
        for texts, columns in zip(*(part.split(CHUNK) for part in places.nonzero(as_tuple=True)), strict=True):
            logits = batch.parts.logits(batch.taps["last"][texts, columns])
            some = logits[:, ids]
            # The largest logit, not its place: on a CPU argmax of bfloat16 costs more than the projection.
            self.counted[texts, columns] = (some.amax(-1) == logits.amax(-1)).float()
            self.distributions[texts, columns] = torch.softmax(some.float(), -1)

    def of(self, texts: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """The distributions [m, V_d] after the tokens at the places (texts, columns), both [m], and which of them count
        (``None``: all)."""
        if self.ids is None:
            return self.batch.teacher(texts, columns), self.batch.counted(texts, columns)
        return self.distributions[texts, columns], self.counted[texts, columns]

    def distance(self, logits: Tensor, texts: Tensor, columns: Tensor) -> Tensor:
        """Mean cross-entropy of draft logits [m, V_d] with the target's distributions after the tokens at the places
        (texts, columns), both [m]."""
        return soft_cross_entropy(logits, *self.of(texts, columns))

    def loss(self, logits: Tensor, texts: Tensor, columns: Tensor, labels: str) -> Tensor:
        """The same for ``labels`` of ``"target"``; for ``"text"`` the mean cross-entropy with the text's next tokens,
        of which all can be guessed."""
        if labels == "target":
            return self.distance(logits, texts, columns)
        return cross_entropy(logits, self.batch.tokens[texts, columns + 1], self.batch.counted(texts, columns))


def places_of(batch: Batch, texts: Tensor, columns: Tensor) -> Tensor:
    """Bool [b, n]: the places (texts, columns), both [m]."""
    places = torch.zeros(len(batch.tokens), batch.length, dtype=torch.bool, device=batch.tokens.device)
    places[texts, columns] = True
    return places
