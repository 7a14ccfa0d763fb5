"""Drafting with a target's network and other weights, over the target's own sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows, SequenceState
from foretoken.models.forward.native_chain import Pick
from foretoken.models.forward.network import SecondWeights
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import LayerPlan


class OwnSequencesModel(LanguageModel):
    """Reads the target's keys and values and appends provisional scratch nodes, which the target's next forward scores
    again.  So there is no second cache and no prefill.

    Args:
        weights: name of the second weights to run; empty for the target's own.

    Attributes:
        role: name of the draft in messages.

    Raises:
        CapabilityError: the target is not a network of layers.
    """

    reads = False
    role: ClassVar[str]
    target: HuggingFaceModel

    def __init__(self, target: LanguageModel, weights: str = "") -> None:
        offered = target.capabilities
        if not isinstance(target, HuggingFaceModel) or not offered.layer_windows:
            reason = offered.missing.get("layer_windows", offered.missing.get("tree_mask", "it has no layers"))
            raise CapabilityError(f"{self.role} needs a target that is a network of layers: {reason}")
        self.target, self.capabilities = target, offered
        self.vocab_size, self.context_length = target.vocab_size, target.context_length
        self.eos_token_ids, self.device, self.dtype = target.eos_token_ids, target.device, target.dtype
        self.plan = LayerPlan(weights=weights)

    @property
    def weights(self) -> SecondWeights:
        """The second weights, made from the target's present ones."""
        return self.target.forwards.second(self.plan.weights)

    def open(self) -> SequenceState:
        raise CapabilityError(f"{self.role} grows on the target's own cache: it cannot work inside another drafter")

    def open_beside(self, source: SequenceState | None) -> SequenceState:
        """The target's sequence itself."""
        return self.open() if source is None else source

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> dict[str, Tensor]:
        """Does nothing: the target has the text."""
        return {}

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        return self.target.forward_part(feeds, self.plan, taps)

    def chains(self, feeds: Sequence[Feed], counts: Sequence[int], pick: Pick | None = None) -> list[list[int]] | None:
        return self.target.chains(feeds, counts, pick, self.plan)

    def catch_up(self, sequence: SequenceState, tokens: Sequence[int]) -> Sequence[int]:
        """Drop the drafts; the target has committed all but the last token."""
        sequence.clear_scratch()
        return tokens[len(sequence.tokens) :]

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        if len(path):
            raise ValueError(f"nodes of {self.role} cannot be committed: run the target on them")
        sequence.clear_scratch()

    def release(self, sequence: SequenceState) -> None:
        """Only drop the scratch: the sequence belongs to the engine."""
        sequence.clear_scratch()
