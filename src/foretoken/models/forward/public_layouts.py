"""The public forward with faster kernels: packed and quantised weights, where those pass the check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.models.checks.fast_paths import Checks
from foretoken.models.checks.judging import Run
from foretoken.models.linear.packing import pack_linears, unpack_linears
from foretoken.models.linear.quantised_linear import multiply_dequantised

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel


def lay_out(owner: HuggingFaceModel, checks: Checks) -> None:
    """Use the fastest kernels under the public forward; what fails the check is noted in ``owner.refused``."""
    if any(hasattr(module, "joined") for module in owner.model.modules()):
        reason = checks.fault(f"quantised kernels {owner.way}", lambda: (owner._run_public, owner.dtype, True))
        if reason is not None:
            multiply_dequantised(owner.model)
            owner.refuse("quantised kernels", reason, "layers are dequantised in every call, several times as slow")
    elif owner.packing.home is not None and owner.exact != "bitwise":
        reason = checks.fault(f"packed weights {owner.way}", lambda: _packed(owner))
        if reason is None:
            _packed(owner)
        else:
            unpack_linears(owner.model)
            owner.refuse("packed weights", reason, "products of a few rows take up to three times as long")


def _packed(owner: HuggingFaceModel) -> tuple[Run, torch.dtype, bool]:
    pack_linears(owner.model, owner.packing)
    return owner._run_public, owner.dtype, owner.packing.layout == "half"
