"""The target drafts for itself over a small part of its cache: for long contexts, where reading keys and values
dominates a step.

TriForce, Sun et al. 2024 (https://arxiv.org/abs/2404.11912).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.staged import sped_up
from foretoken.models.base import LanguageModel
from foretoken.models.variants.sparse import SparseModel


class SparseKvDrafter(ModelDrafter):
    """Drafts with the target's weights over chosen chunks of its keys and values.

    Args:
        budget: slots per layer and key head; 0: a quarter of the context, but 256 to 4096.
        chunk: consecutive tokens that are chosen together.
        select: ``"retrieval"`` (the chunks that the last query fits best) or ``"recent"`` (the first 16 tokens and the
            last ones).
        rebuild: tokens after which the subset is chosen again, which costs 1.5 to 2.8 target steps.
        local: share of the budget that ``retrieval`` gives to the latest chunks, whatever the query (the paper: 0).
        offload: keep the target's keys and values in host memory, and only those that drafts read on its device.
    """

    name = "sparse_kv"
    traits = replace(ModelDrafter.traits, rewinds=False)  # the subset belongs to the committed tokens

    def __init__(
        self,
        target: LanguageModel,
        k: int = 4,
        tree: str = "",
        draw: str = "",
        budget: int = 0,
        chunk: int = 8,
        select: str = "retrieval",
        rebuild: int = 64,
        local: float = 0.5,
        offload: bool = False,
    ) -> None:
        super().__init__(SparseModel(target, budget, chunk, select, rebuild, local, offload), k, tree, draw, target)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, inner: str = "", **options: Any) -> Any:
        """Build from a spec ``sparse_kv[,inner=SPEC]``.

        With ``inner`` another drafter accelerates the drafts: a
        :class:`~foretoken.methods.drafters.cascade.CascadeDrafter` whose draft model is the sparse target (TriForce's
        hierarchy).

        Args:
            inner: drafter for these drafts, as TriForce's small model: ``(model:PATH,k=4,window=240,sink=16)``.  With
                it ``k`` is 8 by default.
        """
        if path is not None:
            raise ValueError("drafter 'sparse_kv' takes no path: it drafts with the target's own weights")
        if not inner:
            return cls(context.target, **options)
        return sped_up(cls.name, context, inner, options, partial(SparseModel, context.target))
