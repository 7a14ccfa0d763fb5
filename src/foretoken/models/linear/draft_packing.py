"""Weights of trained heads for our kernels: in 8 bits, whatever their storage.

A head runs one to about ten rows at a time, so its time is that of reading its weights, and its distribution is free.
The products are those of quantised draft models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.models.linear.packing import is_plain, joined_bias
from foretoken.models.linear.quantised import multiplies_bytes
from foretoken.models.linear.quantised_products import NativeInt8ByteProduct, NativeInt8Product, NativeProduct
from foretoken.models.linear.quantised_weights import Int8Weight
from foretoken.models.native import integers, why_not
from foretoken.models.native.library import NotCoveredError


def packed(*linears: Any) -> NativeProduct:
    """Plain linear layers with a common input as one product with concatenated outputs."""
    if not all(is_plain(linear) for linear in linears):
        raise NotCoveredError("its linear layers are not plain nn.Linear")
    weights = [linear.weight.detach() for linear in linears]
    return packed_rows(weights[0] if len(weights) == 1 else torch.cat(weights), joined_bias(linears))


def packed_rows(weight: Tensor, bias: Tensor | None) -> NativeProduct:
    """Product of a weight [out, in] with biases [out].

    Raises:
        NotCoveredError: the kernels do not support the shape or dtype.
    """
    reason = why_not()
    if reason is not None:
        raise NotCoveredError(reason)
    # float64 is left out, because it is chosen for its precision
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotCoveredError(f"its weights are {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    if not integers.fits(weight.shape[1]):
        raise NotCoveredError(f"the number of inputs must be a multiple of 8, not {weight.shape[1]}")
    kind = NativeInt8ByteProduct if multiplies_bytes() else NativeInt8Product
    return kind(Int8Weight.of(weight), bias)
