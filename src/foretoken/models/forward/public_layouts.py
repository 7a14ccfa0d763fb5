"""The public forward with faster kernels: packed and quantised weights, where those pass the check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.models.checks.fast_paths import Checks
from foretoken.models.checks.judging import Run
from foretoken.models.linear.packing import pack_linears, unpack_linears
from foretoken.models.linear.product import has_quantised
from foretoken.models.linear.quantised_linear import multiply_dequantised

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network


def lay_out(network: Network, checks: Checks) -> None:
    """Use the fastest kernels under the public forward; what fails the check is noted in ``network.refused``."""
    if has_quantised(network.model):
        reason = checks.fault(f"quantised kernels {network.way}", lambda: (network.run_public, network.dtype, True))
        if reason is not None:
            multiply_dequantised(network.model)
            network.refuse("quantised kernels", reason, "layers are dequantised in every call, several times as slow")
    elif network.packing.home is not None and network.exact != "bitwise":
        reason = checks.fault(f"packed weights {network.way}", lambda: _packed(network))
        if reason is None:
            _packed(network)
        else:
            unpack_linears(network.model)
            network.refuse("packed weights", reason, "products of a few rows take up to three times as long")


def _packed(network: Network) -> tuple[Run, torch.dtype, bool]:
    pack_linears(network.model, network.packing)
    return network.run_public, network.dtype, network.packing.layout == "half"
