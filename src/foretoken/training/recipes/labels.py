"""The target's predictions at positions of a batch, the labels of a drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.training.recipes.base import Batch, cross_entropy, mean_of, soft_cross_entropy


class Labels:
    """The target's distributions after tokens of a batch, over the draft vocabulary.

    With a small draft vocabulary they are computed once for all positions: steps and heads share most of them, and the
    target's projection costs more than all the rest.  A position does not count if the target's most likely token is
    outside of the draft vocabulary.

    Args:
        mask: bool [b, n], the positions that will be requested; only with ``ids``.
        ids: int64 [V_d], the draft vocabulary; ``None``: all tokens.
        masses: whether :meth:`mass_of` will be called.
    """

    @torch.no_grad()
    def __init__(
        self, batch: Batch, mask: Tensor | None = None, ids: Tensor | None = None, masses: bool = False
    ) -> None:
        self.batch, self.ids = batch, ids
        if ids is None or mask is None:
            return
        if batch.learned is not None:
            mask = mask & batch.learned[:, 1:]
        self.distributions = torch.zeros(*mask.shape, len(ids), device=mask.device)
        self.counted = torch.zeros(mask.shape, device=mask.device)
        self.masses = torch.zeros(mask.shape, device=mask.device)
        # Logits over the whole vocabulary of 512 positions at a time
        for rows, columns in zip(*(part.split(512) for part in mask.nonzero(as_tuple=True)), strict=True):
            logits = batch.parts.logits(batch.taps["last"][rows, columns])
            some = logits[:, ids]
            # The largest logit, not its index: on a CPU argmax of bfloat16 costs more than the projection.
            self.counted[rows, columns] = (some.amax(-1) == logits.amax(-1)).float()
            self.distributions[rows, columns] = torch.softmax(some.float(), -1)
            if masses:
                self.masses[rows, columns] = (some.float().logsumexp(-1) - logits.float().logsumexp(-1)).exp()
        if any(weight.requires_grad for weight in batch.parts.head.parameters()):
            torch.clear_autocast_cache()  # PyTorch 2.9 and 2.10 keep casts made without gradients

    def of(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """The distributions [m, V_d] after the tokens at the positions (texts, columns), both [m], and which of them
        count (``None``: all)."""
        if self.ids is None:
            return self.batch.teacher(rows, columns), self.batch.counted(rows, columns)
        return self.distributions[rows, columns], self.counted[rows, columns]

    def mass_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[m, 1] the probability that the target gives to the draft vocabulary after the tokens at the positions
        (texts, columns), both [m]; :meth:`of` divides by it."""
        mass = torch.ones(rows.shape, device=rows.device) if self.ids is None else self.masses[rows, columns]
        return mass[:, None]

    def distance(self, logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Mean cross-entropy of draft logits [m, V_d] with the target's distributions after the tokens at the positions
        (texts, columns), both [m]."""
        return soft_cross_entropy(logits, *self.of(rows, columns))

    def top_distance(self, logits: Tensor, rows: Tensor, columns: Tensor, count: int) -> Tensor:
        """The same over the target's ``count`` most likely tokens, whose probabilities are not renormalised (top-k
        distillation, arXiv 2408.15766)."""
        distributions, counted = self.of(rows, columns)
        top = distributions.topk(min(count, distributions.shape[-1]), -1)
        log_drafts = torch.log_softmax(logits.float(), -1).gather(-1, top.indices)
        return mean_of(-(top.values * log_drafts).sum(-1), counted)

    def loss(self, logits: Tensor, rows: Tensor, columns: Tensor, labels: str) -> Tensor:
        """:meth:`distance` for ``labels`` of ``"target"``; for ``"text"`` the mean cross-entropy with the text's next
        tokens over the whole vocabulary."""
        if labels == "target":
            return self.distance(logits, rows, columns)
        return cross_entropy(logits, self.batch.tokens[rows, columns + 1], self.batch.counted(rows, columns))


def mask_of(batch: Batch, rows: Tensor, columns: Tensor) -> Tensor:
    """Bool [b, n]: true at the positions (texts, columns), both [m]."""
    mask = torch.zeros(len(batch.tokens), batch.length, dtype=torch.bool, device=batch.tokens.device)
    mask[rows, columns] = True
    return mask
