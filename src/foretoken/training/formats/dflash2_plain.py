"""DFlash2 as z-lab writes it: DFlash's layout, with convolutions in the layers and the candidate selector."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.training.formats.dflash_plain import DflashPlain, DflashSpeculators
from foretoken.training.formats.values import whole

CODEBOOK = "candidate_selector.predecessor_codebook"


class Dflash2Plain(DflashPlain):
    """Sizes that ``config.json`` leaves out are those of the tensors."""

    method = "dflash2"
    net_config: ClassVar[type[Any]] = Dflash2Config
    net_class: ClassVar[type[Any]] = Dflash2Net
    architecture = "DFlash2DraftModel"

    def extras(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Convolutions and selector.

        Raises:
            ValueError: one of both is missing.
        """
        kernel = tensors.get("layers.0.attention_conv.base_kernel")
        for name, found in ((CODEBOOK, tensors.get(CODEBOOK)), ("layers.0.attention_conv.base_kernel", kernel)):
            if found is None:
                raise ValueError(f"the checkpoint lacks the tensor {name}: it is incomplete")
        return {
            **super().extras(config, tensors),
            "conv": whole(config, "conv_kernel_size", default=kernel.shape[1] if kernel is not None else 2),
            "group": whole(config, "conv_group_size", default=16),
            "rank": whole(config, "selector_rank", default=tensors[CODEBOOK].shape[-1]),
            "top": whole(config, "selector_top_k", default=16),
        }

    def inner_keys(self, shape: Any) -> dict[str, Any]:
        """Further keys of ``dflash_config``."""
        return {
            "conv_kernel_size": shape.conv,
            "conv_group_size": shape.group,
            "selector_rank": shape.rank,
            "selector_top_k": shape.top,
        }


class Dflash2Speculators(DflashSpeculators, Dflash2Plain):
    """The same as vllm-project/speculators keeps it."""

    method = "dflash2"
    architecture = "DFlash2Speculator"
