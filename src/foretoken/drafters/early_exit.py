"""The target's first layers draft: their keys, values and hidden states are reused when it verifies.

LayerSkip, Elhoushi et al. 2024 (arXiv 2404.16710).
"""

from __future__ import annotations

from foretoken.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.models.base import LanguageModel
from foretoken.models.layers import LayerPlan


class EarlyExitDrafter(OwnLayersDrafter):
    """Drafts with the first ``layer`` layers, the final norm and the head.

    A round of k drafts runs ``layer`` layers k times while drafting, once more for the last draft, and the other
    layers once for all nodes: the verification goes on from the hidden states that drafting has made.

    Args:
        target: the model that drafts for itself.
        layer: the exit layer E, from 1 to one below the number of layers; 0 means a quarter of them.
        k: chain length, when no tree is asked for.
        tree: children per level, as for the drafter ``model``.
        draw: how siblings are drawn, as for the drafter ``model``.

    Raises:
        ValueError: an option outside its range.
        CapabilityError: the target's layers cannot be run one by one.
    """

    name = "early_exit"

    def __init__(self, target: LanguageModel, layer: int = 0, k: int = 4, tree: str = "", draw: str = "") -> None:
        layers = num_layers_of(target)
        layer = layer if layer != 0 else max(1, layers // 4)
        if not 1 <= layer < layers:
            raise ValueError(f"early_exit needs an exit layer from 1 to {layers - 1}, not {layer}")
        super().__init__(target, LayerPlan(stop=layer), k, tree, draw)
        self.layer = layer
