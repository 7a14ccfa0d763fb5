"""Block networks whose prediction also depends on the previous token, by a low-rank score for every pair."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet


@dataclass(frozen=True)
class PairConfig(BlockConfig):
    """Shape of such a network.

    Attributes:
        rank: rank r of the score (published networks: 256).
        top: candidates per position, those of largest logits; only these are scored and drafted.
    """

    rank: int = 64
    top: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1 or self.top < 1:
            raise ValueError(f"a score of pairs needs rank >= 1 and top >= 1, not {self.rank} and {self.top}")


class PairNet(BlockNet):
    """The score of candidate c after token p at a position with state h is ``logit(c) + query(p, h) .
    successors[c]``."""

    config: PairConfig

    @abstractmethod
    def query(self, before: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Queries [..., r] of positions after tokens, and the memory for the next positions.

        Args:
            before: [...] target ids of the tokens before.
            states: [..., D] of the network at the positions, one for each token or for several.
            memory: from the position before; ``None`` at the first one.
        """

    @property
    @abstractmethod
    def successors(self) -> Tensor:
        """[V, r] by the target's ids; [V_d, r] by draft ids if :attr:`by_draft_id`."""

    @property
    def has_memory(self) -> bool:
        """Whether a query depends on more of a path than its last token."""
        return False

    @property
    def by_draft_id(self) -> bool:
        """Whether rows of :attr:`successors` are those of a draft vocabulary."""
        return False

    def corrected(self, logits: Tensor, ids: Tensor, targets: Tensor, queries: Tensor) -> Tensor:
        """Scores [..., Q, K] of candidates after each of Q tokens.

        Args:
            logits: [..., K] of the candidates.
            ids: [..., K] their draft ids.
            targets: [..., K] their target ids.
            queries: [..., Q, r].
        """
        rows = self.successors[ids if self.by_draft_id else targets].to(queries.dtype)
        return logits[..., None, :] + (queries @ rows.mT).to(logits.dtype)
