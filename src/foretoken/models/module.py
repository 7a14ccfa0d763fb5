"""Language models that are PyTorch networks in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, SequenceState
from foretoken.models.linear.packing import unpack_linears, weight_bytes
from foretoken.models.network.alone import lock_of
from foretoken.models.network.capabilities import detect
from foretoken.models.network.placement import device_of
from foretoken.models.network.rotary import context_of
from foretoken.models.network.taps import decoder_layers
from foretoken.models.network.traits import cache_name, context_length_of, eos_ids
from foretoken.models.network.watch import Watch
from foretoken.models.vocabulary import check_vocabulary


class ModuleModel(LanguageModel):
    """Knows the size of its network's weights, and detects changes of the network."""

    model: Any
    _watch: Watch | None = None

    @property
    def threads(self) -> int:  # type: ignore[override]
        return torch.get_num_threads()

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    def unpack(self) -> None:
        unpack_linears(self.model)

    def _joined(self, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}

    def follow(self) -> None:
        if self._watch is not None:
            with lock_of(self._watch.network):
                if self._watch.has_changed():
                    check_vocabulary(self)
                    self._renew()
                    self.weights_version += 1

    def _renew(self) -> None:
        """Use the network in its present state."""
        if self._watch is not None:
            self._watch = Watch(self._watch.network)


class OneByOneModel(ModuleModel):
    """Runs every sequence alone, through the network's own forward and a separate Transformers cache."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.capabilities = detect(model)
        self.vocab_size = int(self.config.vocab_size)
        self.context_length, self.context_why = context_of(model, context_length_of(self.config))
        self.eos_token_ids = eos_ids(model)
        self._place()
        self._num_layers = len(decoder_layers(model))
        self._cache_name = cache_name(model)
        self._opened = 0

    def _place(self) -> None:
        self.device: torch.device = device_of(self.model)
        self.dtype: torch.dtype = self.model.dtype

    def _renew(self) -> None:
        self._place()
        super()._renew()

    def open(self) -> SequenceState:
        self.follow()
        self._opened += 1
        return SequenceState(row=self._opened)

    def _check(self, feed: Feed) -> None:
        if not feed.is_chain:
            raise CapabilityError(f"only chains can be scored: {self.capabilities.missing['tree_mask']}")

    def _keep(self, sequence: SequenceState, path: Sequence[int]) -> int:
        """Commit a prefix of the scratch chain; return the number of dropped nodes."""
        if list(path) != list(range(len(path))):
            raise CapabilityError(self.capabilities.missing["keep_path"])
        surplus = len(sequence.scratch_tokens) - len(path)
        sequence.tokens.extend(sequence.scratch_tokens[: len(path)])
        sequence.clear_scratch()
        return surplus
