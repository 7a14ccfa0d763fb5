"""Base of drafters that use a part of the target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from foretoken.core import Budget, Context, TokenTree
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.narrowed import projected, reduced_head
from foretoken.models.base import Capabilities, CapabilityError, Feed, LanguageModel, Rows
from foretoken.models.network.layers import LayerPlan


def num_layers_of(target: LanguageModel) -> int:
    """Number of the target's decoder layers.

    Raises:
        CapabilityError: its layers cannot be run one by one.
    """
    offered: Capabilities = target.capabilities
    layers: Any = getattr(target, "num_layers", 0)
    if not offered.layer_windows or not layers:
        reason = offered.missing.get("layer_windows", offered.missing.get("tree_mask", "it has no layers"))
        raise CapabilityError(f"self-speculation needs a target whose layers can be run one by one: {reason}")
    return int(layers)


class OwnLayersDrafter(ModelDrafter):
    """Grows a chain or a tree on the target's own sequence, with the layers of ``plan``.

    There is no second cache and no prefill: draft nodes are provisional scratch nodes of the target, whose full forward
    then recomputes them.
    """

    traits = replace(ModelDrafter.traits, runs_target=True)
    chains_in_one_call = False  # such a call runs the whole network, whatever the plan

    def __init__(self, target: LanguageModel, plan: LayerPlan, k: int, tree: str, draw: str) -> None:
        plan.check(num_layers_of(target))
        self.plan = plan  # its cost is the share of the layers that runs
        super().__init__(target, k, tree, draw, target)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> OwnLayersDrafter:
        """Build from a spec, which needs only the target."""
        if path is not None:
            raise ValueError(f"drafter {cls.name!r} takes no path: it drafts with the target's own layers")
        built = cls(context.target, **options)
        return built.narrowed(vocab, context)

    def narrowed(self, vocab: str, context: BuildContext) -> Self:
        """Restrict this drafter to the draft vocabulary of an option ``vocab``."""
        self.head = reduced_head(vocab, context.target, context)
        return self

    def cost_beside(self, target_bytes: int) -> float:
        layers = num_layers_of(self.model)
        return self.plan.count(layers) / layers

    @property
    def states(self) -> Any:
        """``None``: states of a part of the layers are no hidden states of a draft model."""
        return None

    def start(self, context: Context) -> None:
        """Use the engine's sequence of the target, where drafts grow."""
        context.state[self] = context.sequence

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Grow all trees; an empty draft leaves no scratch, so that another drafter can use the target's sequence."""
        trees: list[TokenTree] = []
        try:
            trees = super().propose_batch(contexts, budgets)
        finally:
            for i, context in enumerate(contexts):
                if not trees or not trees[i].num_drafts:
                    context.sequence.clear_scratch()
        return trees

    def _level(self, contexts: Sequence[Context], sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Always true: the target has read the tokens."""
        return [True] * len(contexts)

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        return projected(self.head, self._some_layers, feeds)

    def _some_layers(self, feeds: Sequence[Feed], taps: Sequence[str]) -> list[Rows]:
        return self.model.forward_part(feeds, self.plan, taps)

    def _unread(self, tree: Growing) -> Sequence[int]:
        return (tree.context.root,)
