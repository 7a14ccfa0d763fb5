"""The same numbers on every instruction set that this CPU has: which results have the same bits, and which are rounded
otherwise (``docs/packing.md``).  Results are rounded to bfloat16, so that it takes many to see a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from checkpoints import prompt_of
from families import model_of
from torch import Tensor

from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear import layouts, quantised
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.linear.quantised_products import (
    NativeInt4ByteProduct,
    NativeInt4Product,
    NativeInt8ByteProduct,
    NativeInt8Product,
)
from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight
from foretoken.models.native import bfloat16, library, linear
from foretoken.models.native.attention import attention
from foretoken.models.native.library import address

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no native kernels: {library.why_not()}")
EIGHTS, SIXTEENS = ("portable", "avx2", "avx2-vnni"), ("avx512", "avx512-vnni")
"""Numbers of a vector; what multiplies bfloat16 numbers (``avx512-bf16``) rounds their products in its own way."""
Run = Callable[[], Tensor]
OnEach = Callable[[tuple[str, ...], Run], list[Tensor]]


@pytest.fixture
def on_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnEach]:
    """The results of a function on each of several instruction sets, where this CPU has them."""
    caches = (library._loaded, library.function, layouts.has_layout, quantised.available)
    monkeypatch.delenv(library.SWITCH, raising=False)

    def run_on(names: tuple[str, ...], run: Run) -> list[Tensor]:
        results = []
        for name in names:
            if library._cpu_level((name,)) is None:
                continue
            monkeypatch.setitem(library.ALLOWED, "native", (name,))
            for function in caches:
                function.cache_clear()
            assert library.described().startswith(f"{name}, ")
            results.append(run())
        return results

    yield run_on
    for function in caches:
        function.cache_clear()


def multiplied(x: Tensor, packed: Tensor, out: int, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """The product of a weight that was laid out."""
    offset = None if bias is None else bias.float()
    described = linear.Linear(linear.BFLOAT16, 2 * packed.shape[1], out, 0, address(packed), None, address(offset))
    return linear.product(x, described, residual)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def are_equal(results: list[Tensor]) -> bool:
    assert results and all(result.isfinite().all() for result in results)
    return all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", [NativeInt4Product, NativeInt8Product, NativeInt4ByteProduct, NativeInt8ByteProduct])
def test_integer_products_have_the_same_bits_on_all(on_each: OnEach, kind: type) -> None:
    weight = numbers(80, 256).float() * torch.linspace(0.1, 3, 80)[:, None]
    x = numbers(11, 256, seed=1)
    stored = Int8Weight.of(weight) if kind in (NativeInt8Product, NativeInt8ByteProduct) else Int4Weight.of(weight, 32)
    assert are_equal(on_each((*EIGHTS, *SIXTEENS, "avx512-bf16", "amx"), lambda: kind(stored, None).product(x)))


def test_bfloat16_products_have_the_same_bits_where_they_are_made_in_float32(on_each: OnEach) -> None:
    weight, x, bias = numbers(500, 512), numbers(100, 512, seed=1), numbers(500, seed=2)

    def product() -> Tensor:
        return multiplied(x, bfloat16.laid_out(weight), 500, bias)

    same, other = on_each((*EIGHTS, *SIXTEENS), product), on_each(("avx512-bf16", "amx"), product)
    assert are_equal(same)
    assert not any(torch.equal(same[0], result) for result in other)  # the control


def test_attention_has_the_same_bits_on_vectors_of_one_length(on_each: OnEach) -> None:
    query, keys, values = (numbers(2, h, n, 64, seed=i) for i, (h, n) in enumerate(((6, 100), (2, 301), (2, 301))))

    def run() -> Tensor:
        return attention(query, keys, values, None, 0.125)

    eights, sixteens = on_each(EIGHTS, run), on_each(SIXTEENS, run)
    assert are_equal(eights)
    assert not sixteens or (are_equal(sixteens) and not torch.equal(eights[0], sixteens[0]))


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_so_have_logits(on_each: OnEach, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda dtype, *_: "native")
    network = model_of("qwen3", hidden_size=96, intermediate_size=160, head_dim=32).to(torch.bfloat16)
    if kind != "bfloat16":
        quantise_linears(network, kind)

    def run() -> Tensor:
        model = HuggingFaceModel(network)
        assert model.forward_name == "native", model.native_off
        sequence = model.open()
        model.prefill(sequence, prompt_of(11))
        return model.forward([Feed(sequence, prompt_of(5, seed=3))])[0].logits

    assert are_equal(on_each(EIGHTS, run))
