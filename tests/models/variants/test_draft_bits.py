"""Draft models in few bits: where that is chosen, what turns it off, what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, draft_models, load_model
from foretoken.loading.draft_models import build_draft_model
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import quantised_bits, storage_of
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.linear.quantised_products import Int4Product, Int8Product, QuantisedProduct
from foretoken.models.variants import draft_bits
from foretoken.models.variants.draft_bits import fastest_kind
from models.checkpoints import new_model, prompt_of
from toys import engine, outputs

PROMPTS = [prompt_of(9), [3], prompt_of(14, seed=1)]
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


def saved(tmp_path: Path, name: str = "llama", **changes: Any) -> str:
    folder = tmp_path / name
    new_model(name, **{**SHAPE, **changes}).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times of the products: 4 bits take a third of what full weights take."""
    times = {"int4": 1.0, "full": 3.0}
    monkeypatch.setattr(draft_bits, "fastest_draft_product", lambda *shape: Int4Product if shape[-1] == "4" else None)
    monkeypatch.setattr(draft_bits, "measured", lambda products, *more: {products[0]: times["int4"]})
    monkeypatch.setattr(draft_bits, "_full_s", lambda *shape: times["full"])
    monkeypatch.setattr(draft_models, "_is_small", lambda path: False)
    draft_bits._fastest.cache_clear()
    return times


def kind_of(model: LanguageModel) -> str:
    return storage_of(getattr(model, "model"))  # noqa: B009


def built(spec: str, target: LanguageModel) -> ModelDrafter:
    drafter = build_drafter(spec, target, target_source="x")
    assert isinstance(drafter, ModelDrafter)
    return drafter


def test_a_draft_model_is_quantised_where_that_is_faster(tmp_path: Path, clock: dict[str, float]) -> None:
    path = saved(tmp_path)
    target = load_model(path)
    drafter = built(f"model:{path}", target)
    assert kind_of(drafter.model) == "int4" and drafter.describe()[0]["weights"] == "int4"
    assert kind_of(built(f"model:{path},quantize=none", target).model) == ""
    assert kind_of(built(f"model:{path},quantize=int8", target).model) == "int8"
    clock["full"] = 1.2  # a quarter faster is asked for
    draft_bits._fastest.cache_clear()
    assert kind_of(built(f"model:{path}", target).model) == ""
    assert built(f"model:{path}", target).describe()[0]["weights"] == "float32"


def test_the_kind_is_the_fastest_products(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    network = new_model("llama", **SHAPE)
    products: list[type[QuantisedProduct] | None] = [Int8Product, Int4Product, None]
    for product, kind in zip(products, ("int8", "int4", None), strict=True):
        monkeypatch.setattr(
            draft_bits, "fastest_draft_product", lambda *shape, p=product: p if p and shape[-1] == str(p.bits) else None
        )
        draft_bits._fastest.cache_clear()
        assert fastest_kind(network) == kind


def test_the_largest_layer_is_timed(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(draft_bits, "_full_s", lambda dtype, *shape: shapes.append(shape) or 9.0)  # type: ignore[func-returns-value]
    fastest_kind(new_model("llama", **SHAPE))
    assert shapes == [(128, 64)]  # not the vocabulary projection


def test_what_cannot_be_quantised_is_left_alone(clock: dict[str, float]) -> None:
    quantised = new_model("llama", **SHAPE)
    quantise_linears(quantised, "int8")
    assert fastest_kind(new_model("gpt2")) is None and fastest_kind(quantised) is None
    elsewhere = new_model("llama", **SHAPE).to("meta")
    assert fastest_kind(elsewhere) is None


def test_a_real_measurement_answers_something() -> None:
    draft_bits._fastest.cache_clear()
    assert draft_bits._fastest(torch.float32, 64, 64) in ("int4", "int8", None)
    assert draft_bits._full_s(torch.float32, 64, 64) > 0


def test_models_that_are_trained_or_small_are_left_alone(
    tmp_path: Path, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    target = load_model(path)
    trained = build_drafter(f"online:{path}", target, target_source="x")
    assert isinstance(trained, ModelDrafter) and kind_of(trained.model) == ""
    assert all(weight.is_floating_point() for weight in trained.model.model.parameters())  # type: ignore[attr-defined]
    assert kind_of(build_draft_model(path, target, "x", None, None)) == ""  # as it is written somewhere else
    monkeypatch.setattr(draft_models, "_is_small", lambda path: True)
    assert kind_of(built(f"model:{path}", target).model) == ""


@pytest.mark.parametrize("spec", ["model", "cascade", "shared_vocab", "retokenize"])
def test_another_kind_is_refused(spec: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    tokenizer: Any = object()
    words = "quantize must be one of auto, none, int8, int4, int8-a8, int4-a8 for a draft model, not 'int3'"
    with pytest.raises(ValueError, match=words):
        build_drafter(f"{spec}:{path},quantize=int3", load_model(path), target_source="x", tokenizer=tokenizer)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama", "llama_gqa_tied"])
def test_text_stays(name: str, temperature: float, tmp_path: Path, clock: dict[str, float]) -> None:
    path = saved(tmp_path, name)
    target = load_model(path)
    drafter = built(f"model:{path},k=3", target)
    assert kind_of(drafter.model) == "int4"
    requests = [Request(p, SamplingParams(temperature=temperature), 20, seed=3, ignore_eos=True) for p in PROMPTS]
    assert outputs(engine(target, drafter, max_batch=3), requests) == outputs(engine(target), requests)


def test_a_projection_that_shares_the_embeddings_weight_is_in_8_bits(tmp_path: Path, clock: dict[str, float]) -> None:
    path = saved(tmp_path, "llama_gqa_tied")
    target = load_model(path)
    drafter = built(f"model:{path}", target)
    assert drafter.head is not None and drafter.head.ids is None
    assert isinstance(drafter.head.product, QuantisedProduct) and drafter.head.product.bits == 8
    assert built(f"model:{path},quantize=none", target).head is None
    untied = saved(tmp_path)
    assert built(f"model:{untied}", load_model(untied)).head is None  # its own is quantised


def test_llm_tells(tmp_path: Path, clock: dict[str, float]) -> None:
    path = saved(tmp_path)
    llm = ft.load(path, drafter=f"model:{path}")
    assert [report["weights"] for report in llm.describe()["drafts"]] == ["int4"]


def test_only_layers_of_ours_have_quantised_bits() -> None:
    """Another package's name may begin as our labels do."""
    network = new_model("llama", **SHAPE)
    assert quantised_bits(network) is None
    network.config.quantization_config = {"quant_method": "int4_of_others"}
    assert storage_of(network) == "int4_of_others" and quantised_bits(network) is None
