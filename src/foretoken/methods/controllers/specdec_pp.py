"""Stop rule by a trained head on the draft model's hidden states, which predicts rejected draft tokens.

SpecDec++, Huang et al. 2024 (arXiv 2405.19715).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.core import Budget, Context, Limits, PathStop, check_least
from foretoken.methods.controllers.base import Controller


class _StopHeads(Protocol):
    """Source of trained stop heads."""

    def stop_head(self, path: str | None) -> tuple[nn.Module, Any]:
        """The head in a folder, or the built-in draft model's, and the fingerprint of its draft model."""


class HeadStop(PathStop):
    """Ends a path when the head predicts a rejected token on it.

    Args:
        net: log-odds [n] of acceptance, from the draft model's states [n, D] at the tokens.
        threshold: drafting ends when the probability of a rejection on the path is above this.
    """

    tap = "last"

    def __init__(self, net: nn.Module, threshold: float) -> None:
        self.net, self.threshold = net, threshold
        self._device: torch.device | None = None

    @torch.no_grad()
    def follow(self, above: Sequence[float], hidden: Tensor) -> list[float]:
        if self._device != hidden.device:
            self.net.to(hidden.device)
            self._device = hidden.device
        probabilities: list[float] = torch.sigmoid(self.net(hidden.float())).tolist()
        return [before * probability for before, probability in zip(above, probabilities, strict=True)]

    def ends(self, likelihood: float) -> bool:
        return 1.0 - likelihood > self.threshold


class SpecdecPpController(Controller):
    """Stops drafting when a trained head predicts that a token of the draft will be rejected.

    Args:
        net: the head (:class:`foretoken.methods.drafters.nets.specdec_pp.StopHead`).
        draft: fingerprint of the draft model that it reads; ``None`` is not checked.
        threshold: drafting ends when the probability of a rejection is above this; 1 never ends a draft.
        k: longest draft; the drafter's own by default.
    """

    name = "specdec_pp"

    def __init__(self, net: nn.Module, draft: Any = None, threshold: float = 0.7, k: int | None = None) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"specdec_pp needs a threshold in [0, 1], not {threshold}")
        check_least(self.name, 1, k=k)
        self.draft, self.k = draft, k
        self.stop = HeadStop(net, threshold)
        self._budget = Budget(k or 5, 64, stop=self.stop)

    @classmethod
    def build(cls, path: str | None, context: _StopHeads, **options: Any) -> SpecdecPpController:
        """Build from a spec ``specdec_pp[:FOLDER]``; without a folder, with the head of the built-in draft model."""
        net, draft = context.stop_head(path)
        return cls(net, draft, **options)

    def attach(self, limits: Limits) -> None:
        """Check that every draft model is the head's; take a length that was not set from the drafter.

        Raises:
            ValueError: the drafter has no draft model with hidden states, or another one than the head was trained for.
        """
        models = [part.states for part in (limits, *limits.members) if part.states is not None]
        if not models:
            raise ValueError(
                f"controller 'specdec_pp' reads the hidden states of a draft model, and drafter {limits.name!r} has "
                "none: use drafter model:PATH, or another controller, for example svip"
            )
        for model in models if self.draft is not None else ():
            difference = self.draft.difference(model)
            if difference:
                raise ValueError(
                    f"this stop head was trained for another draft model ({difference}): train one with "
                    "`foretoken train specdec_pp --draft PATH --out FOLDER` and use specdec_pp:FOLDER"
                )
            doubt = self.draft.doubt(model)
            if doubt:
                warnings.warn(f"this stop head was trained for this draft model, but {doubt}", stacklevel=3)
        self._budget = Budget(self.k or limits.max_depth, limits.max_nodes, stop=self.stop)

    def budget(self, context: Context, batch_size: int) -> Budget:
        return self._budget
