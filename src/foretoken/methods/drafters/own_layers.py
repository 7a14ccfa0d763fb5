"""What all drafters share that draft with a part of the target's own layers."""

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
    """How many decoder layers the target has.

    Raises:
        CapabilityError: it has none that can be run one by one.
    """
    offered: Capabilities = target.capabilities
    layers: Any = getattr(target, "num_layers", 0)
    if not offered.layer_windows or not layers:
        reason = offered.missing.get("layer_windows", offered.missing.get("tree_mask", "it has no layers"))
        raise CapabilityError(f"self-speculation needs a target whose layers can be run one by one: {reason}")
    return int(layers)


class OwnLayersDrafter(ModelDrafter):
    """Grows a chain or a tree on the target's own sequence, with the layers that ``plan`` names.

    There is no second cache and nothing to prefill: draft nodes are provisional scratch nodes of the target, which
    its whole forward then states anew.
    """

    traits = replace(ModelDrafter.traits, runs_target=True)
    chains_in_one_call = False  # such a call runs the whole network, whatever the plan

    def __init__(self, target: LanguageModel, plan: LayerPlan, k: int, tree: str, draw: str) -> None:
        plan.check(num_layers_of(target))
        self.plan = plan  # what it costs is the share of the layers that runs
        super().__init__(target, k, tree, draw, target)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> OwnLayersDrafter:
        """From a spec: the target itself is all that is needed; ``vocab=N|FILE`` are the tokens that can be guessed."""
        if path is not None:
            raise ValueError(f"drafter {cls.name!r} takes no path: it drafts with the target's own layers")
        built = cls(context.target, **options)
        return built.narrowed(vocab, context)

    def narrowed(self, vocab: str, context: BuildContext) -> Self:
        """This drafter, which guesses only the tokens of an option ``vocab`` from now on."""
        self.head = reduced_head(vocab, context.target, context)
        return self

    def cost_beside(self, target_bytes: int) -> float:
        layers = num_layers_of(self.model)
        return self.plan.count(layers) / layers

    @property
    def states(self) -> Any:
        """None: what a part of the layers makes of a token is no hidden state of a draft model."""
        return None

    def start(self, context: Context) -> None:
        """The request's sequence of the target is where drafts grow; it stays the engine's."""
        context.state[self] = context.sequence

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Grow all trees; where nothing was guessed nothing is left in the target's sequence, on which another drafter
        may be asked."""
        trees: list[TokenTree] = []
        try:
            trees = super().propose_batch(contexts, budgets)
        finally:
            for i, context in enumerate(contexts):
                if not trees or not trees[i].num_drafts:
                    context.sequence.clear_scratch()
        return trees

    def _level(self, contexts: Sequence[Context], texts: Sequence[Sequence[int]]) -> list[bool]:
        """The target has read them."""
        return [True] * len(contexts)

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        return projected(self.head, self._some_layers, feeds)

    def _some_layers(self, feeds: Sequence[Feed], taps: Sequence[str]) -> list[Rows]:
        """The layers of the plan."""
        return self.model.forward_part(feeds, self.plan, taps)

    def _unread(self, tree: Growing) -> Sequence[int]:
        return (tree.context.root,)
