"""Block networks whose guess of a place also depends on the token before it, by a score of low rank for every pair."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet


@dataclass(frozen=True)
class PairConfig(BlockConfig):
    """Shape of such a network.

    Attributes:
        rank: r of the score.
        top: a place's candidates, those of largest logits; only these are scored, and guessed.
    """

    rank: int = 64
    top: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1 or self.top < 1:
            raise ValueError(f"a score of pairs needs rank >= 1 and top >= 1, not {self.rank} and {self.top}")


class PairNet(BlockNet):
    """The score of candidate c behind token p at a place with state h is ``logit(c) + query(p, h) . successors[c]``."""

    config: PairConfig

    @abstractmethod
    def query(self, before: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Queries [..., r] of places behind tokens, and what the next places are asked with.

        Args:
            before: [...] target ids of the tokens before.
            states: [..., D] of the network at the places, one for each token or for several.
            memory: what was handed on by the place before; ``None`` at the first one.
        """

    @property
    @abstractmethod
    def successors(self) -> Tensor:
        """[V, r] by the target's ids; [V_d, r] by draft ids where :attr:`by_draft_id`."""

    @property
    def has_memory(self) -> bool:
        """Whether a query depends on more of a path than its last token."""
        return False

    @property
    def by_draft_id(self) -> bool:
        """Whether rows of :attr:`successors` are those of a draft vocabulary."""
        return False

    def corrected(self, logits: Tensor, ids: Tensor, targets: Tensor, queries: Tensor) -> Tensor:
        """Scores [..., Q, K] of candidates behind each of Q tokens.

        Args:
            logits: [..., K] of the candidates.
            ids: [..., K] their draft ids.
            targets: [..., K] the target's ids of them.
            queries: [..., Q, r].
        """
        rows = self.successors[ids if self.by_draft_id else targets].to(queries.dtype)
        return logits[..., None, :] + (queries @ rows.mT).to(logits.dtype)
