"""The types of GGUF: our numbers are those of ``gguf.dequantize`` to the last bit, and our kernel multiplies by them on
every instruction set that this CPU has."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from torch import Tensor

from foretoken.models.gguf.grouped import GroupedWeight, PlainWeight, dequantised, weight_of
from foretoken.models.gguf.kernel import GroupedProduct, product_of
from foretoken.models.gguf.products import StoredEmbedding, WidenedProduct
from foretoken.models.gguf.types import KINDS, PLAIN
from foretoken.models.native import integers8, why_not
from gguf_writer import SCALES, random_bytes

HALF_STEP = 2.0**-8
"""Of a bfloat16 number."""
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
WIDTH = 512
needs_it = pytest.mark.skipif(why_not() is not None, reason=f"no native kernels: {why_not()}")


def sample(kind: str, out: int = 70, width: int = WIDTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes [out, k], and the numbers [out, width] float32 that the ``gguf`` package says they are."""
    raw = random_bytes(kind, out, width, seed)
    return torch.from_numpy(raw), torch.from_numpy(gguf.dequantize(raw, Quant[kind]).copy())


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Also tells 0 from -0."""
    return first.dtype == second.dtype and torch.equal(first.view(torch.int32), second.view(torch.int32))


def activations(rows: int, width: int = WIDTH) -> Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(3)).bfloat16()
    return x * torch.logspace(-2, 2, rows, dtype=torch.bfloat16)[:, None]


def test_all_types_are_tried() -> None:
    assert set(TYPES) == set(KINDS) and set(PLAIN) == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_the_files(kind: str) -> None:
    raw, expected = sample(kind)
    assert same_bits(dequantised(raw, kind), expected)
    weight = GroupedWeight.of(raw, kind)
    assert weight.shape == (70, WIDTH)
    assert same_bits(weight.dequantised(), expected)
    assert same_bits(weight.dequantised(slice(3, 66, 7)), expected[3:66:7])


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_are_taken_apart_in_slabs(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("foretoken.models.gguf.grouped.AT_ONCE", 9 * WIDTH)  # nine rows together
    raw, expected = sample(kind)
    assert same_bits(GroupedWeight.of(raw, kind).dequantised(), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_one_block(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Alone, as the last of a matrix read in slabs, and looked up in an embedding."""
    width = gguf.GGML_QUANT_SIZES[Quant[kind]][0]
    monkeypatch.setattr("foretoken.models.gguf.grouped.AT_ONCE", 4 * width)
    raw, expected = sample(kind, 9, width)
    assert same_bits(dequantised(raw[8:], kind), expected[8:])
    assert same_bits(GroupedWeight.of(raw[8:], kind).dequantised(), expected[8:])
    assert same_bits(GroupedWeight.of(raw, kind).dequantised(), expected)
    assert same_bits(StoredEmbedding(raw, kind, width, torch.float32)(torch.tensor([5])), expected[5:6])


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_plain_numbers_are_the_files(kind: str) -> None:
    exact = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    raw = gguf.quantize(exact, Quant[kind])
    weight = weight_of(torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8)), kind)
    assert isinstance(weight, PlainWeight) and weight.numbers.dtype == PLAIN[kind]
    assert same_bits(weight.dequantised(), torch.from_numpy(gguf.dequantize(raw, Quant[kind]).copy()))


@pytest.mark.parametrize("kind", [*TYPES, "BF16"])
def test_rows_of_the_embedding(kind: str) -> None:
    if kind in PLAIN:
        numbers = np.random.default_rng(0).normal(size=(70, WIDTH)).astype(np.float32)
        raw = torch.from_numpy(gguf.quantize(numbers, Quant[kind]).view(np.uint8).copy())
        expected = torch.from_numpy(gguf.dequantize(raw.numpy(), Quant[kind]).copy())
    else:
        raw, expected = sample(kind)
    table = StoredEmbedding(raw, kind, WIDTH, torch.float32)
    ids = torch.tensor([[69, 0], [3, 3]])
    assert same_bits(table(ids), expected[ids])
    assert same_bits(table.weight, expected) and table.num_bytes == raw.nbytes


@needs_it
@pytest.mark.parametrize("kind", TYPES)
def test_the_kernel_holds_the_files_numbers(kind: str) -> None:
    raw, expected = sample(kind)
    product = GroupedProduct(GroupedWeight.of(raw, kind), None)
    assert same_bits(product.dense(), expected)
    for rows in (slice(3, 66, 7), slice(5, 9), slice(31, 65), slice(0, 70, 33), slice(69, None), slice(4, 4)):
        assert same_bits(product.some(rows), expected[rows])


@needs_it
def test_rows_of_a_tall_matrix_come_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.gguf.kernel.AT_ONCE", 64 * WIDTH)
    raw, expected = sample("Q6_K", 300)
    product = GroupedProduct(GroupedWeight.of(raw, "Q6_K"), None)
    for rows in (slice(None), slice(30, 290), slice(7, None, 40), slice(0, 300, 150)):
        assert same_bits(product.some(rows), expected[rows])


@needs_it
@pytest.mark.parametrize("kind", TYPES)
def test_products_are_those_of_rounded_activations(level: str, kind: str) -> None:
    raw, weight = sample(kind)
    bias = torch.linspace(-1, 1, 70)
    product = GroupedProduct(GroupedWeight.of(raw, kind), bias)
    x = activations(11)
    expected = integers8.rounded(x) @ weight.double().T + bias.double()
    # Sums are in float32; a weight with a zero is the difference of two larger numbers.
    room = WIDTH * 2.0**-22 * x.double().abs().sum(1, keepdim=True) * 4 * weight.double().abs().amax(1)
    output = product(x)
    assert output.dtype == torch.bfloat16
    assert ((output.double() - expected).abs() <= HALF_STEP * expected.abs() + room).all()


@needs_it
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_in_any_company(level: str, kind: str) -> None:
    product = GroupedProduct(GroupedWeight.of(sample(kind)[0], kind), None)
    x = activations(37)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (2, 3, 5, 8, 11, 16, 37):
        assert torch.equal(product(x[:rows]), alone[:rows])


@needs_it
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q6_K", "Q4_0", "Q3_K", "Q2_K", "Q4_K"])
@pytest.mark.parametrize("filled", [0, 128, 255])
def test_the_largest_integers_do_not_overflow(level: str, kind: str, filled: int) -> None:
    """Q8_0 may hold -128, and no sum of two products of bytes may be cut off at 16 bits."""
    raw = np.full_like(random_bytes(kind, 32, WIDTH), filled)
    scales = random_bytes(kind, 32, WIDTH, seed=5)
    block = gguf.GGML_QUANT_SIZES[Quant[kind]][1]
    for place in SCALES[kind]:
        raw.reshape(-1, block)[:, place : place + 2] = scales.reshape(-1, block)[:, place : place + 2]
    weight = torch.from_numpy(gguf.dequantize(raw, Quant[kind]).copy())
    product = GroupedProduct(GroupedWeight.of(torch.from_numpy(raw), kind), None)
    for sign in (1, -1):
        x = sign * torch.ones(5, WIDTH).bfloat16()
        expected = integers8.rounded(x) @ weight.double().T
        room = WIDTH * 2.0**-22 * WIDTH * 4 * weight.double().abs().amax(1)
        assert ((product(x).double() - expected).abs() <= HALF_STEP * expected.abs() + room).all()


@needs_it
def test_equal_layouts_are_fused() -> None:
    weights = [GroupedWeight.of(sample("Q4_K", out, seed=out)[0], "Q4_K") for out in (64, 32, 40)]
    parts = [GroupedProduct(weight, None) for weight in weights]
    whole = GroupedProduct.fused(parts)
    x = activations(7)
    assert whole is not None and torch.equal(whole(x), torch.cat([part(x) for part in parts], 1))
    other = GroupedProduct(GroupedWeight.of(sample("Q6_K", 32)[0], "Q6_K"), None)
    assert GroupedProduct.fused([parts[0], other]) is None and GroupedProduct.fused(parts[::-1]) is None


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_without_kernels(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """Activations are not rounded there."""
    monkeypatch.setattr("foretoken.models.gguf.kernel.why_not", lambda: "no compiler")
    raw, weight = sample(kind)
    bias = torch.linspace(-1, 1, 70)
    product = product_of(GroupedWeight.of(raw, kind), bias, dtype)
    assert isinstance(product, WidenedProduct) and same_bits(product.dense(), weight)
    x = activations(5).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    rounding = HALF_STEP if dtype == torch.bfloat16 else 0
    room = WIDTH * 2.0**-23 * x.double().abs() @ weight.double().abs().T + 1e-6
    assert ((product(x).double() - expected).abs() <= rounding * expected.abs() + room).all()


@needs_it
@pytest.mark.parametrize("kind", TYPES)
def test_wide_activations_are_never_rounded(kind: str) -> None:
    assert isinstance(product_of(GroupedWeight.of(sample(kind)[0], kind), None, torch.float32), WidenedProduct)
    assert isinstance(product_of(GroupedWeight.of(sample(kind)[0], kind), None, torch.bfloat16), GroupedProduct)
