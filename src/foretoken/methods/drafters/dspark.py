"""A block whose predictions depend on the previous token through a low-rank head, and a head that decides where to
stop.

DSpark 2026 (arXiv 2607.05147).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foretoken.core import Context, TokenTree
from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.methods.drafters.pairs import PairDrafter, PairPredictions
from foretoken.methods.drafters.parallel import PositionScores, Predictions
from foretoken.models.cache.window import USUAL
from foretoken.models.forward.heads.native_net import BlockRows


class SparkPredictions(PairPredictions):
    """Scores, and the probability by the confidence head that a path survives so far.

    A position's confidence depends only on the tokens before it, so that stopping there is exact for drawn chains.
    """

    net: DsparkNet
    stop: float = 0.0
    temperatures: Sequence[float] = ()

    def row(self, path: Sequence[int], state: Any) -> tuple[PositionScores, Any]:
        """The position's candidates; none if its path is not likely enough to get there and be right."""
        memory, survival = state or (None, 1.0)
        if self.stop > 0:
            with torch.no_grad():
                odds = self.net.confidences(self.before(path), self.states[len(path)])
            survival *= 1.0 if odds is None else float(torch.sigmoid(odds.float() / self.temperatures[len(path)]))
            if survival < self.stop:
                return PositionScores(self.values[len(path)], self.ids[len(path)], ends=True), None
        row, memory = super().row(path, memory)
        return row, (memory, survival)

    @torch.no_grad()
    def survival(self, tree: TokenTree, chances: Sequence[float] | None) -> Sequence[float]:
        """The product of the calibrated confidences down to a node, of a chain or of point proposals.

        A confidence depends on the tokens before its position only, so it may be computed when all are drawn. Beside
        the likeliest candidate of a position, which has the confidence, others share the rest as the draft likes them.
        """
        parents, depths = tree.parents[1:], [depth - 1 for depth in tree.depths[1:]]
        if not parents or (chances is None and not tree.is_chain):
            return ()
        before = torch.tensor([tree.tokens[parent] for parent in parents], device=self.states.device)
        odds = self.net.confidences(before, self.states[depths])
        if odds is None:
            return super().survival(tree, chances)
        temperatures = odds.new_tensor([self.temperatures[depth] for depth in depths])
        survival = [1.0]
        for node, confidence in enumerate(torch.sigmoid(odds / temperatures).tolist(), 1):
            parent = tree.parents[node]
            first = tree.children[parent][0]
            if chances is not None and node != first:
                others = max(chances[parent] - chances[first], 1e-30)
                confidence = (1.0 - confidence) * min(chances[node] / others, 1.0)
            survival.append(survival[parent] * confidence)
        return survival


class DsparkDrafter(PairDrafter):
    """Trees and chains over corrected scores.

    Args:
        model: the network over the target's hidden states.
        stop: the draft ends before a position that is reached, and right, with a lower probability than this, by the
            confidence head; 0 does not use the head.
    """

    name = "dspark"
    net_config = DsparkConfig
    net_class = DsparkNet

    def __init__(
        self,
        model: BlockModel,
        nodes: int = 16,
        depth: int = 0,
        width: int = 8,
        draw: str = "iid",
        stop: float = 0.0,
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        super().__init__(model, nodes, depth, width, draw, window, sink, tree)
        if not 0 <= stop < 1:
            raise ValueError(f"dspark needs stop from 0 to below 1, not {stop}")
        if stop and not self.net.config.confidence:  # type: ignore[attr-defined]
            raise ValueError("this dspark has no confidence head to stop by: leave stop out")
        self.stop = stop
        self.temperatures: Sequence[float] = [1.0] * self.net.config.drafts

    def start_from(self, measured: Mapping[str, Any]) -> None:
        """Take over the temperatures of the confidence head; without them, its own probabilities hold."""
        drafts = self.net.config.drafts
        temperatures = measured.get("confidence_temperatures", [1.0] * drafts)
        valid = isinstance(temperatures, Sequence) and len(temperatures) == drafts
        if not valid or not all(isinstance(t, int | float) and 0 < t < math.inf for t in temperatures):
            raise ValueError(f"confidence_temperatures must be {drafts} numbers above 0, not {temperatures!r}")
        self.temperatures = temperatures

    def predictions(self, context: Context, block: BlockRows, guessing: range) -> Predictions:
        predictions = SparkPredictions(context, block, guessing, self.head, self._ranker(context), self.net)
        predictions.stop, predictions.by_path = self.stop, predictions.by_path or self.stop > 0
        predictions.temperatures = self.temperatures
        return predictions
