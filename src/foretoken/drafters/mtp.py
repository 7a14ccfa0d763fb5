"""A multi-token prediction module, fed its own output again and again.

DeepSeek-V3 (arXiv 2412.19437); one module used recursively as in FastMTP.
"""

from __future__ import annotations

from typing import Any

from foretoken.drafters.features import FeatureDrafter, load_net
from foretoken.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.models.base import LanguageModel
from foretoken.models.features import FeatureModel


class MtpDrafter(FeatureDrafter):
    """A chain of the module's best guesses; a tree with ``width`` above 1."""

    name = "mtp"

    def __init__(
        self,
        model: FeatureModel,
        nodes: int = 4,
        depth: int = 4,
        width: int = 1,
        grow: str = "eagle2",
        draw: str = "iid",
    ) -> None:
        super().__init__(model, nodes, depth, width, grow, draw)

    @classmethod
    def build(
        cls, path: str | None, *, target: LanguageModel, target_source: Any, tokenizer: Any, device: Any, **options: Any
    ) -> MtpDrafter:
        """From a spec ``mtp[:FOLDER]``.

        Raises:
            ValueError: no folder, one trained for another target, or damaged files.
        """
        net, parts = load_net(cls.name, path, target, target_source, MtpConfig, MtpNet)
        return cls(FeatureModel(net, parts, target), **options)
