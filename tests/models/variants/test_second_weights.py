"""A second set of weights beside packed ones: nothing is unpacked to decide, and nothing twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear import quantised
from foretoken.models.linear.packing import PackedLinear, Projection, dtype_of, joined_weight, unpack_linears
from foretoken.models.linear.quantised import available, make_product
from foretoken.models.linear.quantised_products import Int8Product, QuantisedProduct
from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight
from foretoken.models.variants import quantised_gain, second_weights
from foretoken.models.variants.quantised_gain import expected_gain
from foretoken.models.variants.second_weights import QuantisedWeights, Scheme, check_quantisable, linears
from models.checkpoints import new_model


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the weight of each projection is asked for."""
    if not available():
        pytest.skip("this build of PyTorch has no quantised matrix products")
    counts: Counter[int] = Counter()
    real = Projection.weight.fget

    def counted(self: Projection) -> torch.Tensor:
        counts[id(self)] += 1
        return real(self)  # type: ignore[misc, no-any-return]

    monkeypatch.setattr(Projection, "weight", property(counted))
    return counts


@pytest.fixture(params=[True, False], ids=["lean", "public"])
def owner(request: Any, monkeypatch: pytest.MonkeyPatch, unpacked: Counter[int]) -> HuggingFaceModel:
    """A model whose linear layers all are in another layout than the plain one."""
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda dtype, shapes, names: names[-1])
    network = new_model("qwen2", hidden_size=64).float()
    model = HuggingFaceModel(network, lean=request.param, in_place=True)
    assert model.is_lean is request.param
    if not any(isinstance(module, PackedLinear) for module in network.modules()):
        pytest.skip("this machine has the plain layout alone")
    monkeypatch.setattr(second_weights, "fastest_draft_product", lambda *_: Int8Product)
    unpacked.clear()
    return model


def test_nothing_is_unpacked_to_find_out_whether_it_pays(
    owner: HuggingFaceModel, unpacked: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_gain, "SMALLEST", 0)
    check_quantisable(owner.forwards, Scheme("8"))
    assert expected_gain(owner, Scheme("8")) > 0
    assert not unpacked


def test_every_projection_is_unpacked_once(owner: HuggingFaceModel, unpacked: Counter[int]) -> None:
    packed = {id(module.projection) for module in linears(owner.model) if isinstance(module, PackedLinear)}
    weights = QuantisedWeights(owner.forwards, Scheme("8"))
    assert unpacked == dict.fromkeys(packed, 1)
    assert len(weights.all_products) >= len(packed)


def test_weights_are_joined_as_they_stand(owner: HuggingFaceModel) -> None:
    attention = owner.model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    for some in (parts, parts[:1], parts[1:], parts[::2], parts[::-1]):
        joined = joined_weight(some)
        assert torch.equal(joined, torch.cat([module.weight for module in some])) and joined.dtype == torch.float32
        assert all(dtype_of(module) == torch.float32 for module in some)
    unpack_linears(owner.model)
    plain = [getattr(owner.model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(joined_weight(plain), joined_weight(parts)) and dtype_of(plain[0]) == torch.float32


def test_a_timed_weight_is_quantised_once_for_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[type] = Counter()
    for kind in (Int8Weight, Int4Weight):
        real = kind.of

        def counted(*args: Any, kind: type = kind, real: Any = real) -> Any:
            counts[kind] += 1
            return real(*args)

        monkeypatch.setattr(kind, "of", counted)
    products: list[type[QuantisedProduct]] = list(available().values())
    counts.clear()
    times = quantised.measured(products, 64, 64, 32, (1,))
    assert set(times) == set(products) and all(seconds > 0 for seconds in times.values())
    assert all(count == 1 for count in counts.values()) and counts


def test_copies_lie_apart() -> None:
    """Copies that share their memory would be timed in a cache."""
    weight = torch.linspace(-1, 1, 32 * 64).view(32, 64)
    x = torch.ones(1, 64)
    for kind in available().values():
        kernel = make_product(kind, weight, None, 32)
        copied = kernel.copied()
        assert torch.equal(kernel(x), copied(x))
        pairs = [(vars(kernel)[name], vars(copied)[name]) for name in vars(kernel)]
        tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor) and pair[0].numel()]
        assert all(tensor.data_ptr() != copied_tensor.data_ptr() for tensor, copied_tensor in tensors)
        assert kernel.nbytes == copied.nbytes
