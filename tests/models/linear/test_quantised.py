"""Quantised weights and their products: against the dequantised twin, row by row, and what may not slip through."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.linear import quantised, quantised_weights
from foretoken.models.linear.quantised import available, fastest_draft_product, fastest_target_product, make_product
from foretoken.models.linear.quantised_products import (
    Int4Product,
    Int8Product,
    IntegerProduct,
    NativeInt4ByteProduct,
    NativeInt4Product,
    NativeInt8ByteProduct,
    NativeInt8Product,
    QuantisedProduct,
)
from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight, Quantised, block4
from foretoken.models.native import why_not

OURS: list[type[QuantisedProduct]] = [NativeInt8Product, NativeInt4Product] if why_not() is None else []
BYTES: list[type[QuantisedProduct]] = [NativeInt8ByteProduct, NativeInt4ByteProduct] if why_not() is None else []
PRODUCTS: list[type[QuantisedProduct]] = [IntegerProduct, Int8Product, Int4Product, *OURS, *BYTES]
TOLERANCE: dict[type[QuantisedProduct], float] = {
    IntegerProduct: 5e-4,
    Int8Product: 6e-3,
    Int4Product: 6e-3,
    NativeInt8Product: 6e-3,
    NativeInt4Product: 6e-3,
    NativeInt8ByteProduct: 2e-2,
    NativeInt4ByteProduct: 2e-2,
}
"""14 bits of input, 8 bits of it and of the result, or integers of 8 bits, in standard deviations of the output."""


class Dequantised(QuantisedProduct):
    """The readable twin: an ordinary product with the weights that the numbers stand for."""

    name = "dequantised"

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        self.bits = 8 if isinstance(weight, Int8Weight) else 4
        self.weight = weight.dequantised()

    def product(self, x: Tensor) -> Tensor:
        """In float32."""
        return F.linear(x.float(), self.weight)

    @property
    def nbytes(self) -> int:
        """Of float32."""
        return self.weight.nbytes


def weight(out: int = 48, width: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(out, width, generator=generator)
    return rows * torch.rand(out, 1, generator=generator).mul(3).add(0.1)


def inputs(rows: int, width: int = 64) -> Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    x[rows // 2] = 0
    return x


def test_int8_is_within_half_a_step() -> None:
    w = weight()
    stored = Int8Weight.of(w)
    assert stored.values.dtype == torch.int8 and int(stored.values.abs().max()) == 127
    step = stored.scale.float()[:, None]
    assert bool(((stored.dequantised() - w).abs() <= step * 0.51 + (w.abs() - 127 * step).clamp_min(0)).all())


@pytest.mark.parametrize("group", [32, 64])
def test_int4_is_within_half_a_step(group: int) -> None:
    w = weight()
    stored = Int4Weight.of(w, group)
    assert (int(stored.values.min()), int(stored.values.max())) == (0, 15)
    step = stored.scale.float().repeat_interleave(group, 1)
    # Scale and zero are rounded to 8 bits: at the ends of the range that adds up to 15 steps / 256.
    assert bool(((stored.dequantised() - w).abs() <= 0.6 * step + 0.004 * w.abs().max()).all())
    assert float((stored.dequantised() - w).abs().mean() / step.mean()) < 0.3


@pytest.mark.parametrize("group", [32, 64])
def test_int4_is_fitted_to_the_error_of_the_outputs(group: int) -> None:
    w, power = weight(), torch.logspace(-2, 2, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(2))]
    plain, fitted = (Int4Weight.of(w, group, given) for given in (None, power))
    assert (int(fitted.values.min()), int(fitted.values.max())) == (0, 15)
    errors = [((stored.dequantised() - w).square() * power).sum(-1) for stored in (plain, fitted)]
    assert bool((errors[1] <= 1.02 * errors[0]).all()) and errors[1].sum() < 0.85 * errors[0].sum()
    even = Int4Weight.of(w, group, torch.ones(64))
    assert (even.dequantised() - w).square().sum() <= (plain.dequantised() - w).square().sum()


def test_groups_of_one_value_are_fitted_too() -> None:
    w = weight()
    w[3], w[5, :32] = 0, 0.25
    stored = Int4Weight.of(w, 32, torch.rand(64, generator=torch.Generator().manual_seed(1)).add(0.1))
    assert not stored.dequantised()[3].any() and bool((stored.dequantised()[5, :32] == 0.25).all())
    assert bool(torch.isfinite(stored.scale).all())


def test_a_wide_weight_is_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, whole4 = Int8Weight.of(weight()), Int4Weight.of(weight(), 32)
    monkeypatch.setattr(quantised_weights, "AT_ONCE", 7 * 64)
    parts, parts4 = Int8Weight.of(weight()), Int4Weight.of(weight(), 32)
    assert torch.equal(whole.values, parts.values) and torch.equal(whole.scale, parts.scale)
    assert torch.equal(whole4.values, parts4.values)
    assert torch.equal(whole4.scale, parts4.scale) and torch.equal(whole4.zero, parts4.zero)


def test_a_row_of_zeros_stays_zero() -> None:
    w = weight()
    w[3] = 0
    for product in PRODUCTS:
        out = make_product(product, w, None, 32)(inputs(4))
        assert bool(torch.isfinite(out).all()) and not out[:, 3].any()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_equals_its_twin(product: type[QuantisedProduct], dtype: torch.dtype, bias: bool) -> None:
    added = torch.linspace(-1, 1, 48) if bias else None
    x = inputs(5).to(dtype)
    kernel = make_product(product, weight(), added, 32)
    stored = Int4Weight.of(weight(), 32) if kernel.bits == 4 else Int8Weight.of(weight())
    expected = Dequantised(stored, added)(x)
    out = kernel(x)
    assert out.dtype == expected.dtype == dtype and out.shape == (5, 48)
    rounding = TOLERANCE[product] + (0 if dtype in (torch.float32, torch.float64) else 6e-3)
    size = expected.double().norm(dim=1) + (1 if bias else 0)
    assert bool(((out - expected).double().norm(dim=1) <= rounding * size + 1e-12).all())
    torch.testing.assert_close(kernel.plus(x, out), out + out, rtol=0, atol=0)


def test_the_twin_tells_a_wrong_scale_apart() -> None:
    stored = Int8Weight.of(weight())
    wrong = Int8Weight(stored.values, stored.scale.flip(0))
    x, good = inputs(5), Int8Product(stored, None)(inputs(5))
    assert float((Dequantised(wrong, None)(x) - good).norm() / good.norm()) > 0.1


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_row_has_the_same_bits_in_any_company(product: type[QuantisedProduct]) -> None:
    kernel = make_product(product, weight(), None, 32)
    x = inputs(17)
    together = kernel(x)
    for i in (0, 8, 16):
        assert torch.equal(kernel(x[i : i + 1])[0], together[i])
        assert torch.equal(kernel(x[i : i + 2])[0], together[i])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_alone(product: type[QuantisedProduct], value: float) -> None:
    kernel = make_product(product, weight(), None, 32)
    x = inputs(9)
    sound = kernel(x)
    x[4, 5] = value
    out = kernel(x)
    assert not out[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(out[others], sound[others])
    assert not kernel(x[4:5]).isfinite().any()


def test_pytorchs_own_scale_depends_on_the_company() -> None:
    """Why the integer product brings its own scale: the operator by itself fails the test above."""
    kernel = IntegerProduct(Int8Weight.of(weight()), None)
    x = inputs(17)
    together = torch.ops.quantized.linear_dynamic(x, kernel.packed, True)
    assert not torch.equal(torch.ops.quantized.linear_dynamic(x[:1], kernel.packed, True)[0], together[0])


@pytest.mark.parametrize(
    ("product", "name"), [(Int8Product, "_weight_int8pack_mm"), (Int4Product, "_weight_int4pack_mm_for_cpu")]
)
def test_weight_only_products_get_bfloat16(
    product: type[QuantisedProduct], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With float32 input they would fall to a scalar path, 9 to 70 times slower."""
    seen = []
    real = getattr(torch, name)

    def spy(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.dtype)
        output: Tensor = real(x, *rest)
        return output

    monkeypatch.setattr(torch, name, spy)
    kernel = make_product(product, weight(), None, 32)
    kernel(inputs(2))
    kernel(inputs(2).double())
    assert seen == [torch.bfloat16] * 2


def test_shapes_that_do_not_fit_int4_are_left_alone() -> None:
    assert fastest_draft_product(24, 64, 32, "4") is None  # 24 is no multiple of 16
    assert fastest_draft_product(32, 48, 32, "4") is None  # 48 is no multiple of 32
    assert fastest_draft_product(32, 64, 32, "4") in (Int4Product, NativeInt4Product, NativeInt4ByteProduct)
    with pytest.raises(ValueError, match="int4 needs"):
        Int4Weight.of(weight(24), 32)


@pytest.fixture(autouse=True)
def measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that a test makes up are nobody else's."""
    monkeypatch.setattr(quantised, "_draft_times", quantised._draft_times.__wrapped__)


def test_the_fastest_is_taken_and_int4_only_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {IntegerProduct: 1.0, Int8Product: 2.0, Int4Product: 0.9} | dict.fromkeys([*OURS, *BYTES], 3.0)
    monkeypatch.setattr(quantised, "measured", lambda products, *_: {product: times[product] for product in products})
    choose = partial(fastest_draft_product.__wrapped__, activations="15")
    assert choose(32, 64, 32) is IntegerProduct
    times[Int4Product] = 0.7
    assert choose(32, 64, 32) is Int4Product
    assert choose(32, 64, 32, "8") is IntegerProduct
    times[Int8Product] = 0.5
    assert choose(32, 64, 32, "8") is Int8Product


@pytest.mark.skipif(not BYTES, reason=f"no native kernels: {why_not()}")
def test_activations_of_8_bits_are_for_who_asks_and_for_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = dict.fromkeys([IntegerProduct, Int8Product, Int4Product, *OURS], 1.0) | dict.fromkeys(BYTES, 0.9)
    monkeypatch.setattr(quantised, "measured", lambda products, *_: {product: times[product] for product in products})
    draft, target = fastest_draft_product.__wrapped__, fastest_target_product.__wrapped__
    for bits, short in (("8", NativeInt8ByteProduct), ("4", NativeInt4ByteProduct)):
        assert draft(32, 64, 32, bits, "8") is target(32, 64, 32, bits, "8") is draft(32, 64, 32, bits) is short
        for chosen in (draft(32, 64, 32, bits, "15"), target(32, 64, 32, bits)):
            assert chosen is not None and chosen.activations == 15
    odd = draft(32, 12, 32, "8", "8")  # inputs come in eights
    assert odd is not None and odd.activations == 15
    times |= dict.fromkeys(BYTES, 1.1)  # alone: a whole draft with 15 bits was seen to take 2.7 times as long
    assert all(draft(32, 64, 32, bits) in BYTES for bits in ("8", "4", "auto"))


def test_products_that_this_build_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack NoQEngine")

    monkeypatch.setattr(IntegerProduct, "__init__", missing)
    assert set(available.__wrapped__().values()) == {Int8Product, Int4Product, *OURS, *BYTES}
    monkeypatch.setattr(quantised, "available", dict)
    assert fastest_draft_product.__wrapped__(32, 64, 32) is None


def test_the_measurement_is_made_and_says_something() -> None:
    times = quantised.measured((Int8Product, IntegerProduct), 64, 64, 32, (1, 8))
    assert set(times) == {Int8Product, IntegerProduct} and min(times.values()) > 0
    assert fastest_draft_product(64, 64, 32, "8") in (
        IntegerProduct,
        Int8Product,
        NativeInt8Product,
        NativeInt8ByteProduct,
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_weight_can_be_read_back(product: type[QuantisedProduct]) -> None:
    stored = Int4Weight.of(weight(), 32) if product.bits == 4 else Int8Weight.of(weight())
    dense = make_product(product, weight(), None, 32).dense()
    torch.testing.assert_close(dense, stored.dequantised(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("product", [Int8Product, Int4Product])
@pytest.mark.parametrize("out", [48, 64, 96, 128])
def test_many_rows_use_the_same_weights(
    product: type[QuantisedProduct], out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = make_product(product, weight(out), torch.ones(out), 32), inputs(70)
    narrow = kernel(x)
    seen = []
    real = product.by_dense

    def spy(self: QuantisedProduct, x: Tensor) -> Tensor:
        seen.append(len(x))
        return real(self, x)

    monkeypatch.setattr(product, "by_dense", spy)
    assert torch.equal(kernel(x), narrow) and not seen  # not unless it is allowed
    kernel.wide = lambda *_: 65
    output = kernel(x)
    # Some kernels round to bfloat16 what a weight is made of: the product with the scale, the zero and their sum.
    size = kernel.dense().abs()
    if isinstance(kernel, Int4Product):
        zero = kernel.scales[..., 1].t().float().repeat_interleave(kernel.group, 1)
        size = size + zero.abs() + (kernel.dense() - zero).abs()
    rounding = 2**-8 * (x.abs().float() @ size.t() + 2 * narrow.abs().float())
    assert ((output - narrow).abs() <= rounding).all()
    assert (rounding < 0.1 * narrow.std()).float().mean() > 0.3  # most of it is small beside what a wrong weight does
    assert torch.equal(kernel(x[:64]), narrow[:64]) and seen == [70]
    shift = Dequantised(Int4Weight.of(weight(out), 32) if product.bits == 4 else Int8Weight.of(weight(out)), None)
    torch.testing.assert_close(
        kernel.dense(), shift.weight, rtol=0 if product.bits == 8 or block4(out) else 8e-3, atol=1e-6
    )


def test_from_when_on_is_measured() -> None:
    assert quantised.wide_rows(IntegerProduct, 64, 64, 32) == quantised.NEVER
    assert quantised.wide_rows(Int8Product, 64, 64, 32) in (64, 128, 256, quantised.NEVER)


def test_no_warning_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_product(IntegerProduct, weight(), None, 32)(inputs(2))


@pytest.mark.parametrize("width", [8, 24, 40, 100])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_widths_that_are_no_whole_vectors(width: int, rows: int) -> None:
    """PyTorch's operator reads behind them: wrong numbers or a crash, which only a check of many calls shows."""
    kernel = make_product(Int8Product, torch.randn(48, width), None, 32)
    x = torch.randn(rows, width)
    expected = x.to(torch.bfloat16).float() @ kernel.dense().t()
    for _ in range(20):
        torch.testing.assert_close(kernel(x), expected, rtol=1.6e-2, atol=2e-2 * float(expected.std()))


def test_a_small_layer_of_a_draft_is_timed_by_weights_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the layer itself would be read from one, where 4 bits save nothing."""
    sizes: list[tuple[int, int]] = []

    def times(products: Any, out: int, width: int, *_: Any) -> dict[Any, float]:
        sizes.append((out, width))
        return dict.fromkeys(products, 1.0)

    monkeypatch.setattr(quantised, "measured", times)
    fastest_draft_product.__wrapped__(64, 64, 32, "auto", "15")
    fastest_target_product.__wrapped__(64, 64, 32, "8")
    ((out, width), *others) = sizes
    assert width == 64 and out * width >= 8_000_000 and all(shape == (64, 64) for shape in others)
