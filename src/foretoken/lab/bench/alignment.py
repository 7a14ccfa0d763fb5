"""Alignment of a draft model with a target: acceptance through the engine, and its expected value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.lab.acceptance import MeasuredAcceptance, drafted
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.learning.divergences import log_distribution
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.pard import PardDrafter, mask_token
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.training.written import write_continuations

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 48, 48
"""Number and length of held-out prompts, and tokens generated for each."""


class Alignment:
    """Measures draft models of one target on the same held-out prompts, int64 [n, m], by ``alignment(network)``."""

    def __init__(self, target: LanguageModel, prompts: Tensor, seed: int = 0) -> None:
        self.target, self.prompts, self.seed = target, prompts, seed
        self.new_tokens = min(NEW_TOKENS, target.context_length - prompts.shape[1])
        # Text written by the target is what a draft model sees when it drafts.
        self.text = write_continuations(target, prompts, self.new_tokens, 1.0, seed)

    def __call__(self, network: Any) -> dict[str, Any]:
        """``greedy`` and ``sampled`` (see :meth:`lengths`), ``expected_acceptance``, ``argmax_agreement``."""
        drafter = self.drafter(network)
        return {"greedy": self.lengths(drafter, 0.0), "sampled": self.lengths(drafter, 1.0), **self.expected(network)}

    def drafter(self, network: Any, k: int = 4) -> Drafter:
        """A drafter of chains of ``k`` tokens, in one forward pass if the network was trained with mask tokens."""
        model = wrap(network, exact="approximate")
        if mask_token(model) is None:
            return ModelDrafter(model, k, target=self.target)
        return PardDrafter(model, k, nodes=k, width=1, target=self.target)

    def together(self, networks: Sequence[Any]) -> dict[str, Any]:
        """``greedy`` and ``sampled`` lengths of several networks as one ensemble."""
        drafters = [self.drafter(network) for network in networks]
        drafter = drafters[0] if len(drafters) == 1 else EnsembleDrafter(drafters)
        return {"greedy": self.lengths(drafter, 0.0), "sampled": self.lengths(drafter, 1.0)}

    def lengths(self, drafter: Drafter, temperature: float) -> dict[str, Any]:
        """Mean acceptance length and the share of rounds that reach each position, through the engine."""
        options: dict[str, Any] = {
            "temperature": temperature,
            "seed": list(range(self.seed, self.seed + len(self.prompts))),
        }
        stats = drafted(self.target, drafter, self.prompts.tolist(), self.new_tokens, **options)
        acceptance = MeasuredAcceptance.of(stats, drafter.max_depth)
        return {"mean_acceptance_length": acceptance.tokens_a_round, "per_position": list(acceptance.by_position)}

    @torch.no_grad()
    def expected(self, network: Any) -> dict[str, float]:
        """1 - TVD, the probability that a draft token drawn at T=1 is accepted, and the rate of equal argmaxes."""
        start = self.prompts.shape[1] - 1
        target = self.target.model
        p, q = (
            log_distribution(
                model(input_ids=self.text[:, :-1].to(model.device), use_cache=False).logits[:, start:]
            ).cpu()
            for model in (target, network)
        )
        width = min(p.shape[-1], q.shape[-1])
        p, q = p[..., :width], q[..., :width]
        return {
            "expected_acceptance": float(torch.minimum(p.exp(), q.exp()).sum(-1).mean()),
            "argmax_agreement": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
        }


def describe(measured: Mapping[str, Any]) -> str:
    """One-line summary of a measurement."""
    parts = []
    for mode, words in (("greedy", "greedy"), ("sampled", "T=1")):
        lengths = measured[mode]
        shares = " ".join(f"{share:.0%}" for share in lengths["per_position"])
        parts.append(f"{words} {lengths['mean_acceptance_length']:.2f} ({shares})")
    return (
        f"mean acceptance length on held-out text: {', '.join(parts)}; expected acceptance "
        f"{measured['expected_acceptance']:.3f}, equal argmax {measured['argmax_agreement']:.3f}"
    )
