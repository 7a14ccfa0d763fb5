"""Selection of the fastest product for 8-bit or 4-bit weights (:mod:`foretoken.models.linear.quantised_products`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from foretoken.models.linear.quantised_products import (
    WIDE,
    Int4Product,
    Int8Product,
    IntegerProduct,
    NativeInt4ByteProduct,
    NativeInt4Product,
    NativeInt8ByteProduct,
    NativeInt8Product,
    NativeProduct,
    QuantisedProduct,
)
from foretoken.models.linear.quantised_weights import ROWS4, Int4Weight, Int8Weight, block4, fits_int4
from foretoken.models.machine import timed
from foretoken.models.native import integers

MEASURED = 2048 * 4096
"""Maximum size of a timed weight: larger than a cache, but fast enough for a few milliseconds."""
NEVER = 2**62
"""More rows than any call has."""
COPIES = 10
"""Number of weight copies multiplied in turn: those of a large weight exceed the cache, as in a model."""
TRIES = 2
"""Timed passes through the copies of a product, after one warm-up."""
WITHOUT_BYTES = "this machine has no kernel for activations of 8 bits"


@cache
def available() -> dict[str, type[QuantisedProduct]]:
    """Products of this PyTorch build by name, each tested on a small weight."""
    products: dict[str, type[QuantisedProduct]] = {}
    weight, x = torch.linspace(-1, 1, 16 * 32).view(16, 32), torch.ones(1, 32)
    makers: tuple[tuple[type[QuantisedProduct], Callable[[], Any]], ...] = (
        (NativeInt8Product, lambda: Int8Weight.of(weight)),
        (NativeInt4Product, lambda: Int4Weight.of(weight, 32)),
        (NativeInt8ByteProduct, lambda: Int8Weight.of(weight)),
        (NativeInt4ByteProduct, lambda: Int4Weight.of(weight, 32)),
        (IntegerProduct, lambda: Int8Weight.of(weight)),
        (Int8Product, lambda: Int8Weight.of(weight)),
        (Int4Product, lambda: Int4Weight.of(weight, 32)),
    )
    for product, quantised in makers:
        try:
            product(quantised(), None)(x)
        except (RuntimeError, NotImplementedError, AttributeError):  # another platform, or a build without FBGEMM
            continue
        products[product.name] = product
    return products


@cache
def fastest_draft_product(
    out: int, width: int, group: int, bits: str = "auto", activations: str = "auto"
) -> type[QuantisedProduct] | None:
    """The fastest product for draft steps with weights [out, width], by a short measurement with one input row.

    The timed weights have this width but exceed the cache: copies of a small layer alone would stay in it, while a
    draft step reads the whole network in between.

    Args:
        out, width: shape of the weight.
        group: group size of int4.
        bits: ``"8"``, ``"4"`` or ``"auto"``, which chooses int4 if it is 1.25 times as fast.
        activations: bits of the input, ``"8"``, ``"15"`` or ``"auto"``: 8 if this machine has such kernels.

    Returns:
        the product; ``None`` if none is available or none supports the shape.
    """
    fitting = _fitting(out, width, group, bits, activations)
    if activations == "auto":  # on par with 15 bits alone, but 18 ms, not 49, in a draft of 135M
        fitting = [product for product in fitting if product.activations == 8] or fitting
    return _fastest(fitting, lambda: _draft_times(tuple(fitting), width, group), 1.25)


@cache
def _draft_times(
    fitting: tuple[type[QuantisedProduct], ...], width: int, group: int
) -> dict[type[QuantisedProduct], float]:
    # at most 2^17 rows: a layer of width ten would otherwise have a million
    return measured(fitting, min(MEASURED // width, 2**17), width, group, (1,))


@cache
def fastest_target_product(
    out: int, width: int, group: int, bits: str, activations: str = "15"
) -> type[QuantisedProduct] | None:
    """The fastest product for a target, which decodes plainly (one row) and verifies (eight); otherwise as for drafts.

    Kernels whose rows do not depend on each other take precedence: bitwise equality must not depend on a measurement
    under load.
    """
    fitting = _fitting(out, width, group, bits, activations)
    fitting = [product for product in fitting if issubclass(product, NativeProduct)] or fitting
    return _fastest(fitting, lambda: measured(fitting, out, width, group, (1, 8)))


def _fastest(
    fitting: Sequence[type[QuantisedProduct]],
    measure: Callable[[], dict[type[QuantisedProduct], float]],
    margin4: float = 1,
) -> type[QuantisedProduct] | None:
    """The fastest product, if there are several; times of 4-bit products count ``margin4`` times."""
    if len(fitting) < 2:
        return next(iter(fitting), None)
    times = measure()
    return min(fitting, key=lambda product: times[product] * (margin4 if product.bits == 4 else 1))


def multiplies_bytes() -> bool:
    """Whether this machine has our kernels with 8-bit activations."""
    return any(product.activations == 8 for product in available().values())


def _fitting(out: int, width: int, group: int, bits: str, activations: str) -> list[type[QuantisedProduct]]:
    """Available products that support this shape.  If no product with 8-bit activations does, those with more bits are
    used."""
    fitting = [
        product
        for product in available().values()
        if bits in ("auto", str(product.bits))
        and (product.bits == 8 or fits_int4((out, width), group))
        and (not issubclass(product, NativeProduct) or integers.fits(width))
    ]
    short = [product for product in fitting if product.activations == 8]
    if activations == "15" or (activations == "8" and not short):
        return [product for product in fitting if product not in short]
    return short if activations == "8" else fitting


def measured_rows(out: int, width: int) -> int:
    """Number of rows of the smaller weight that is timed instead of [out, width]."""
    return max(ROWS4, min(out, MEASURED // width) // ROWS4 * ROWS4)


@torch.inference_mode()
def measured(
    products: Sequence[type[QuantisedProduct]],
    out: int,
    width: int,
    group: int,
    rows: Sequence[int],
    num_copies: int = COPIES,
) -> dict[type[QuantisedProduct], float]:
    """Seconds per product with a random weight, summed over the numbers of ``rows``: the fastest quartile of calls that
    read one copy of the weight after another, like a decoding step.  Large weights are cut to a few million numbers.

    (Calls with a cache filled by other work take twice as long here, especially for products made of many small calls.)
    """
    out = measured_rows(out, width)
    draws = torch.Generator().manual_seed(0)  # not torch's global one: a caller's seed must not depend on timings
    weight = torch.randn(out, width, generator=draws)
    bits = {product.bits for product in products}
    stored: dict[int, Any] = {b: Int4Weight.of(weight, group) if b == 4 else Int8Weight.of(weight) for b in bits}
    seconds = dict.fromkeys(products, 0.0)
    for product in products:
        first = product(stored[product.bits], None)
        copies = [first, *(first.copied() for _ in range(num_copies - 1))]
        for x in (torch.randn(count, width, generator=draws) for count in rows):
            seconds[product] += reading_s(copies, x)
    return seconds


def reading_s(copies: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Seconds of a product with x [n, in] that reads one copy of its weight after another: the fastest quartile."""
    return timed({"": [partial(run, x) for run in copies]}, TRIES)[""]


@cache
@torch.inference_mode()
def wide_rows(product: type[QuantisedProduct], out: int, width: int, group: int) -> int:
    """Number of rows from which the dequantised weight is measured a tenth faster; :data:`NEVER` if it is not."""
    tried = make_product(product, torch.ones(out, width), None, group)
    if not product.has_wide or (product.bits == 4 and block4(out) == 0):
        return NEVER
    for rows in (WIDE, 2 * WIDE, 4 * WIDE):
        x = torch.ones(rows, width)
        seconds = timed({"product": [partial(tried.product, x)], "dense": [partial(tried.by_dense, x)]}, TRIES)
        if 1.1 * seconds["dense"] < seconds["product"]:
            return rows
    return NEVER


def make_product(
    product: type[QuantisedProduct], weight: Tensor, bias: Tensor | None, group: int, power: Tensor | None = None
) -> QuantisedProduct:
    """Quantise a weight [out, in] for a product; in 4 bits for inputs of mean squares ``power`` [in], if given."""
    quantised = Int4Weight.of(weight, group, power) if product.bits == 4 else Int8Weight.of(weight)
    return product(quantised, bias)  # type: ignore[arg-type]
