"""A language model that is a PyTorch network of this process."""

from __future__ import annotations

from typing import Any

import torch

from foretoken.models.base import LanguageModel
from foretoken.models.linear.packing import unpack_linears, weight_bytes
from foretoken.models.network.alone import lock_of
from foretoken.models.network.watch import Watch


class ModuleModel(LanguageModel):
    """Knows what its network weighs, and notices when somebody changes it.

    Attributes:
        model: the network.
    """

    model: Any
    _watch: Watch | None = None

    @property
    def threads(self) -> int:  # type: ignore[override]
        """Threads of PyTorch."""
        return torch.get_num_threads()

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return weight_bytes(self.model)

    def unpack(self) -> None:
        """Give packed linear layers their plain form back, with the same weights."""
        unpack_linears(self.model)

    def follow(self) -> None:
        """Run the network as it is now, if it was changed from outside."""
        if self._watch is not None:
            with lock_of(self._watch.network):
                if self._watch.has_changed():
                    self._renew()
                    self.weights_version += 1

    def _renew(self) -> None:
        """Take the network as it is now."""
        if self._watch is not None:
            self._watch = Watch(self._watch.network)
