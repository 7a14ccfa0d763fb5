"""Block drafters that score candidates by the previous token: trees and chains over those scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.core.largest import largest
from foretoken.core.sampling import Sampler
from foretoken.methods.drafters.blocks import BlockDrafter
from foretoken.methods.drafters.nets.pairs import PairConfig, PairNet
from foretoken.methods.drafters.parallel import BestTable, PositionScores, Predictions
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.native_net import BlockRows


class PairPredictions(Predictions):
    """The candidates of a position are its tokens of largest logits; the previous token ranks them.

    Tokens are drawn from the recorded distribution over the candidates, so any restriction is exact.
    """

    def __init__(
        self, context: Context, block: BlockRows, guessing: range, head: DraftHead, ranker: Sampler | None, net: PairNet
    ) -> None:
        super().__init__(context, block.logits, head, ranker)
        self.net, self.states = net, block.taps["state"][guessing.start : guessing.stop].float()  # [k, D]
        best = largest(self.logits, min(net.config.top, self.logits.shape[-1])) if block.best is None else block.best
        self.values, self.ids = best  # [k, K]
        self.targets = head.mapped(self.ids)
        self.by_path = net.has_memory
        self._numbers: list[dict[int, int]] = []  # per position, from a token to its candidate number

    @torch.no_grad()
    def row(self, path: Sequence[int], state: Any) -> tuple[PositionScores, Any]:
        """The position's candidates, scored after the last token of the path."""
        position, before = len(path), self.before(path)
        query, state = self.net.query(before, self.states[position], state)
        scores = self.net.corrected(self.values[position], self.ids[position], self.targets[position], query[None])[0]
        return PositionScores(scores, self.ids[position]), state

    @torch.no_grad()
    def _table(self, width: int) -> BestTable:
        """The best candidates of all pairs of adjacent positions, in row ``place * K + candidate`` of the earlier
        one."""
        count, targets = self.targets.shape[1], self.targets.tolist()
        self._numbers = [{token: number for number, token in enumerate(row)} for row in targets]
        roots = self.targets.new_full((1, count), self.context.root)
        before = torch.cat([roots, self.targets[:-1]])  # [k, K]
        queries, _ = self.net.query(before, self.states[:, None], None)  # [k, K, r]
        scores = self.net.corrected(self.values, self.ids, self.targets, queries)  # [k, K, K]
        scores = self._raced(scores, self.targets) if self.races else scores.float()
        beliefs = scores.flatten(0, 1).log_softmax(-1)
        values, best = beliefs.topk(min(width, count))
        tokens = self.targets.repeat_interleave(count, 0).gather(1, best)
        return BestTable(tokens.tolist(), values.tolist(), lambda: beliefs)

    def _row_of(self, path: Sequence[int]) -> int:
        return len(path) * self.ids.shape[1] + (self._numbers[len(path) - 1][path[-1]] if path else 0)

    def before(self, path: Sequence[int]) -> Tensor:
        """The token before the position after a path, a scalar."""
        return torch.tensor(path[-1] if path else self.context.root, device=self.states.device)


class PairDrafter(BlockDrafter):
    net_config: ClassVar[type[PairConfig]]
    net_class: ClassVar[type[PairNet]]
    net: PairNet

    @property
    def _candidates(self) -> int:
        return self.net.config.top

    def _ranker(self, context: Context) -> Sampler | None:
        """The sampler of requests that race on their noise; the rules of others are ignored.

        Applying them after every path would take longer than the few rounds that it saves, because a position's
        candidates were chosen without them.
        """
        chosen = super()._ranker(context)
        return None if chosen is None or chosen.noise is None else chosen

    def predictions(self, context: Context, block: BlockRows, guessing: range) -> Predictions:
        return PairPredictions(context, block, guessing, self.head, self._ranker(context), self.net)
