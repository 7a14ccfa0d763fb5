"""Which product of weights in 8 or 4 bits (:mod:`foretoken.models.linear.quantised_products`) is the fastest here."""

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
"""Most weights that a product is timed on: more than a cache holds, little enough for some milliseconds."""
MOST_ROWS = 2**17
"""Of such a weight: a layer that is ten wide would have a million."""
NEVER = 2**62
"""So many rows no call has."""
COPIES = 10
"""Copies of a weight that are multiplied in turn: those of a large one do not fit into a cache, as in a model."""
TRIES = 2
"""Timed turns through the copies of a product, after one that warms up."""
WITHOUT_BYTES = "this machine has no kernel for activations of 8 bits"


@cache
def available() -> dict[str, type[QuantisedProduct]]:
    """The products that this build of PyTorch has, by name, tried out on a small weight."""
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
        except (RuntimeError, NotImplementedError, AttributeError):  # another platform, a build without FBGEMM
            continue
        products[product.name] = product
    return products


@cache
def fastest_draft_product(
    out: int, width: int, group: int, bits: str = "auto", activations: str = "auto"
) -> type[QuantisedProduct] | None:
    """The product for draft steps with weights [out, width], by a short measurement with one row of input.

    Weights of this width are timed that no cache holds: copies of a small layer alone would be read from one, and in a
    draft step the whole network's weights come between.

    Args:
        out, width: shape of the weight.
        group: of int4.
        bits: ``"8"``, ``"4"`` or ``"auto"``; int4 is taken for ``auto`` where it is 1.25 times as fast.
        activations: bits of the input, ``"8"``, ``"15"`` or ``"auto"``: 8 where this machine has kernels for them.

    Returns:
        ``None`` where no product takes this shape or nothing is available.
    """
    fitting = _fitting(out, width, group, bits, activations)
    if activations == "auto":  # timed alone level with 15 bits, in a whole draft of 135M parameters 18 ms, not 49
        fitting = [product for product in fitting if product.activations == 8] or fitting
    return _fastest(fitting, lambda: _draft_times(tuple(fitting), width, group), 1.25)


@cache
def _draft_times(
    fitting: tuple[type[QuantisedProduct], ...], width: int, group: int
) -> dict[type[QuantisedProduct], float]:
    return measured(fitting, min(MEASURED // width, MOST_ROWS), width, group, (1,))


@cache
def fastest_target_product(
    out: int, width: int, group: int, bits: str, activations: str = "15"
) -> type[QuantisedProduct] | None:
    """The product for a target, which decodes plainly (one row) and verifies (eight); else as for drafts.

    Kernels in which a row's bits do not depend on the others come first where this machine has them: whether text is
    equal to the last bit must not hang on a measurement beside other work.
    """
    fitting = _fitting(out, width, group, bits, activations)
    fitting = [product for product in fitting if issubclass(product, NativeProduct)] or fitting
    return _fastest(fitting, lambda: measured(fitting, out, width, group, (1, 8)))


def _fastest(
    fitting: Sequence[type[QuantisedProduct]],
    measure: Callable[[], dict[type[QuantisedProduct], float]],
    margin4: float = 1,
) -> type[QuantisedProduct] | None:
    """The one that takes the least time, if there are several; 4 bits count ``margin4`` times theirs."""
    if len(fitting) < 2:
        return next(iter(fitting), None)
    times = measure()
    return min(fitting, key=lambda product: times[product] * (margin4 if product.bits == 4 else 1))


def multiplies_bytes() -> bool:
    """Whether this machine has our kernels with activations of 8 bits."""
    return any(product.activations == 8 for product in available().values())


def _fitting(out: int, width: int, group: int, bits: str, activations: str) -> list[type[QuantisedProduct]]:
    """The products that are there and take this shape.  Weights that no product with activations of 8 bits takes are
    multiplied with more."""
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
    """Rows of a weight [out, width] that is timed in its place."""
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
    """Seconds of each product with a random weight, summed over calls of so many ``rows``: of calls that read copy
    after copy of the weight, as a decoding step does, what the quickest quarter takes at most.  Large weights are cut
    to a few million numbers.

    (Calls with caches that something else has filled in between take twice as long here, most of all those of the
    products that are many small calls.)
    """
    out = measured_rows(out, width)
    draws = torch.Generator().manual_seed(0)  # never torch's own: a caller's seed must not depend on what is timed
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
    """Seconds of a product with x [n, in], read from copy after copy of its weight: what the quickest quarter of the
    calls takes at most."""
    return timed({"": [partial(run, x) for run in copies]}, TRIES)[""]


@cache
@torch.inference_mode()
def wide_rows(product: type[QuantisedProduct], out: int, width: int, group: int) -> int:
    """From how many rows on the dequantised weight is faster by a tenth, measured; a large number where it never is."""
    tried = make_product(product, torch.ones(out, width), None, group)
    if not product.has_wide or (product.bits == 4 and block4(out) == 0):
        return NEVER
    for rows in (WIDE, 2 * WIDE, 4 * WIDE):
        x = torch.ones(rows, width)
        seconds = timed({"product": [partial(tried.product, x)], "dense": [partial(tried.by_dense, x)]}, TRIES)
        if 1.1 * seconds["dense"] < seconds["product"]:
            return rows
    return NEVER


def make_product(product: type[QuantisedProduct], weight: Tensor, bias: Tensor | None, group: int) -> QuantisedProduct:
    """Quantise a weight [out, in] for a product."""
    quantised = Int4Weight.of(weight, group) if product.bits == 4 else Int8Weight.of(weight)
    return product(quantised, bias)  # type: ignore[arg-type]
