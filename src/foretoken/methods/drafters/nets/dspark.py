"""DSpark: a block whose logits are corrected by the previous token, and a head that predicts a draft's survival.

Arxiv 2607.05147.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.nets.pairs import PairConfig, PairNet


@dataclass(frozen=True)
class DsparkConfig(PairConfig):
    """Shape of the network.

    Attributes:
        head: input of the correction: the previous token (``vanilla``), also the position's state (``gated``), or all
            previous tokens (``rnn``).
        confidence: input of the confidence head: empty (no head), the position's ``state``, or ``both`` it and the
            previous token.
    """

    from_anchor: bool = True
    top: int = 64
    head: str = "vanilla"
    confidence: str = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head not in ("vanilla", "gated", "rnn") or self.confidence not in ("", "state", "both"):
            raise ValueError(
                "dspark needs head=vanilla or head=gated or head=rnn and confidence=state, both or neither, "
                f"not {self.head!r} and {self.confidence!r}"
            )


class MarkovHead(nn.Module):
    """``W2 f(W1[x])``: one row of W1 per token of the target, one of W2 per token of the draft vocabulary."""

    def __init__(self, config: DsparkConfig) -> None:
        super().__init__()
        rank, size = config.rank, config.hidden_size
        self.kind = config.head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_ids, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)
        self.gate_proj = nn.Linear(size + rank, rank) if self.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if self.kind == "rnn" else None

    def forward(self, before: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Input of W2, [..., r], and the memory for the next position."""
        embedding: Tensor = self.markov_w1(before)
        states = states.expand(*embedding.shape[:-1], -1)
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([states, embedding], -1))) * embedding, None
        if self.joint_proj is None:
            return embedding, None
        memory = torch.zeros_like(embedding) if memory is None else memory
        gate, new, out = self.joint_proj(torch.cat([memory, embedding, states], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * memory + (1 - gate) * torch.tanh(new)


class ConfidenceHead(nn.Module):
    """One linear map to the log-odds that a position's draft token is accepted if those before it are."""

    def __init__(self, config: DsparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + (config.rank if config.confidence == "both" else 0), 1)


class DsparkNet(PairNet):
    config: DsparkConfig

    def __init__(self, config: DsparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def query(self, before: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.markov_head(before, states, memory)

    @property
    def successors(self) -> Tensor:
        """W2."""
        return self.markov_head.markov_w2.weight

    @property
    def has_memory(self) -> bool:
        return self.config.head == "rnn"

    @property
    def by_draft_id(self) -> bool:
        return bool(self.config.draft_vocab)

    def confidences(self, before: Tensor, states: Tensor) -> Tensor | None:
        """Log-odds [...] that a position's draft token is accepted, before it is drawn; ``None`` without the head.

        Args:
            before: [...] target ids of the tokens before the positions.
            states: [..., D].
        """
        if self.confidence_head is None:
            return None
        if self.config.confidence == "both":
            states = torch.cat([states, self.markov_head.markov_w1(before).to(states.dtype)], -1)
        return self.confidence_head.proj(states)[..., 0]
