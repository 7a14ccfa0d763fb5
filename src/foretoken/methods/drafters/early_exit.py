"""The target's first layers draft: their keys, values and hidden states are reused when it verifies.

LayerSkip, Elhoushi et al. 2024 (arXiv 2404.16710): one exit for all tokens.  CALM, Schuster et al. 2022 (arXiv
2207.07061): every token has its own exit, where its hidden state or its best two tokens show that more layers would
change nothing.  CALM applies this to the output, here it applies to drafts, so that a wrong exit costs only time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.narrowed import projected
from foretoken.methods.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.network.layers import LayerPlan

THRESHOLDS = {"margin": 0.5, "hidden": 0.99}
"""Saturation tests with their default thresholds: the difference in probability between the best two tokens, and the
cosine of the hidden states before and after the last layer that ran."""


@dataclass(frozen=True)
class Saturation:
    """Condition for a token's exit.

    Attributes:
        test: ``"margin"`` or ``"hidden"``.
        threshold: minimum value for saturation.
        step: layers between two tests.
        most: the layer after which it exits in any case.
    """

    test: str
    threshold: float
    step: int
    most: int

    def holds(self, row: Rows, layer: int) -> bool:
        """Whether all nodes with logits are saturated after ``layer``."""
        if self.test == "margin":
            if row.logits.shape[-1] == 1:  # a draft vocabulary of one token
                return True
            best = torch.softmax(row.logits.float(), -1).topk(2, -1).values
            return bool((best[:, 0] - best[:, 1] >= self.threshold).all())
        count = len(row.logits)
        after, before = (row.taps[f"layer:{i}"][-count:].float() for i in (layer, layer - 1))
        return bool((functional.cosine_similarity(after, before, dim=-1) >= self.threshold).all())

    def taps(self, layer: int) -> tuple[str, ...]:
        """The hidden states that a pass up to ``layer`` must return, to continue from and for the test."""
        return (f"layer:{layer}", f"layer:{layer - 1}") if self.test == "hidden" else (f"layer:{layer}",)


class EarlyExitDrafter(OwnLayersDrafter):
    """Drafts with the first ``layer`` layers, the final norm and the head.

    A round of k draft tokens runs ``layer`` layers k times while drafting, once more for the last token, and the other
    layers once for all nodes: the verification continues from the hidden states of drafting.

    With ``until`` every token runs ``layer`` layers and then ``step`` more at a time until it is saturated.  The later
    layers need keys and values of the earlier draft tokens, which run along if they exited earlier.

    Args:
        layer: the exit layer E, from 1 to one below the number of layers; 0 means a quarter of them.  With ``until``
            the first one.
        until: lets every token exit once saturated, by the difference in probability between its best two tokens
            (``"margin"``) or by the cosine of its hidden states around the last layer (``"hidden"``).
        threshold: with ``until``, minimum value for saturation; 0 means .5 for ``margin`` and .99 for ``hidden``.
        step: with ``until``, layers between two tests; 0 means an eighth of them.
        most: with ``until``, the layer after which a token exits in any case; 0 means three quarters of them.
    """

    name = "early_exit"

    def __init__(
        self,
        target: LanguageModel,
        layer: int = 0,
        k: int = 4,
        tree: str = "",
        draw: str = "",
        until: str = "",
        threshold: float = 0.0,
        step: int = 0,
        most: int = 0,
    ) -> None:
        layers = num_layers_of(target)
        layer = layer if layer != 0 else max(1, layers // 4)
        if not 1 <= layer < layers:
            raise ValueError(f"early_exit needs an exit layer from 1 to {layers - 1}, not {layer}")
        self.saturation = saturation_of(until, threshold, step, most, layer, layers)
        super().__init__(target, LayerPlan(stop=layer), k, tree, draw)
        self.layer = layer

    def _score(self, feeds: Sequence[Feed], trees: Sequence[Growing]) -> list[Rows]:
        """Run the first layers for all, and further ones for unsaturated tokens."""
        if self.saturation is None:
            return super()._score(feeds, trees)
        rule, layer = self.saturation, self.layer
        rows = projected(self.head, self._some_layers, feeds, rule.taps(layer))
        states = {i: torch.stack(list(feed.sequence.exit_states)) for i, feed in enumerate(feeds)}
        waiting = [i for i, row in enumerate(rows) if not rule.holds(row, layer)]
        while waiting and layer < rule.most:
            further = min(layer + rule.step, rule.most)
            window = [self._all_nodes(feeds[i], len(rows[i].logits), states[i]) for i in waiting]
            deeper = projected(self.head, self._on(layer, further), window, rule.taps(further))
            layer = further
            for i, row in zip(waiting, deeper, strict=True):
                rows[i], states[i] = row, row.taps[f"layer:{layer}"]
            waiting = [i for i in waiting if not rule.holds(rows[i], layer)]
        return rows

    def _on(self, layer: int, further: int) -> Callable[[Sequence[Feed], Sequence[str]], list[Rows]]:
        model: Any = self.model
        plan = LayerPlan(start=layer, stop=further)
        return lambda feeds, taps: model.forward_on(feeds, plan, taps)

    def _all_nodes(self, feed: Feed, num_logits: int, states: Tensor) -> Feed:
        """A feed of every draft node of a sequence, with states [n, D] at the layer from which they continue."""
        sequence = feed.sequence
        return replace(
            feed, tokens=sequence.scratch_tokens, parents=sequence.scratch_parents, wanted=num_logits, states=states
        )


def saturation_of(until: str, threshold: float, step: int, most: int, layer: int, layers: int) -> Saturation | None:
    """The saturation test of the options; ``None`` for one exit for all tokens.

    Raises:
        ValueError: no such test, or a value outside its range.
    """
    if not until:
        if threshold or step or most:
            raise ValueError("early_exit takes threshold, step and most with until=margin or until=hidden only")
        return None
    if until not in THRESHOLDS:
        raise ValueError(f"until must be one of {', '.join(THRESHOLDS)}, not {until!r}")
    threshold = threshold or THRESHOLDS[until]
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"early_exit needs a threshold in [0, 1], not {threshold}")
    if step < 0:
        raise ValueError(f"early_exit needs step >= 0, not {step}")
    most = most or max(layer, 3 * layers // 4)
    if not layer <= most < layers:
        raise ValueError(f"early_exit needs most from layer={layer} to {layers - 1}, not {most}")
    return Saturation(until, threshold, step or max(1, layers // 8), most)
