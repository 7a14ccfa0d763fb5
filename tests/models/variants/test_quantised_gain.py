"""Whether quantised drafts are expected to pay: the cost model on given times, and what is never measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.loading import LoadingContext, default_drafter, load_model
from foretoken.methods.drafters.quantized import PAYS, pays_here
from foretoken.models import wrap
from foretoken.models.linear.quantised import available
from foretoken.models.other.table import TableModel
from foretoken.models.variants import quantised_gain
from foretoken.models.variants.quantised_gain import ACCEPTANCE, expected_gain
from foretoken.models.variants.second_weights import Scheme
from gguf_writer import write_model
from toys import llama

SCHEME = Scheme("8", 32)


@pytest.fixture
def target() -> Any:
    return wrap(llama(dtype=torch.float32))


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    if not available():
        pytest.skip("this build of PyTorch has no quantised matrix products")
    monkeypatch.setattr(quantised_gain, "SMALLEST", 0)
    monkeypatch.setattr(quantised_gain, "_step_s", lambda model: 0.0)


def taking(seconds: Sequence[float]) -> Callable[[Sequence[Callable[[], Any]]], list[float]]:
    """Given times in place of measured ones; every call still runs."""

    def least(calls: Sequence[Callable[[], Any]]) -> list[float]:
        assert len(calls) == len(seconds)
        for call in calls:
            call()
        return list(seconds)

    return least


def test_the_best_length_of_the_cost_model(target: Any, any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # A quantised row costs a quarter of a full one, and 2, 4, 6, 9 rows cost 1, 1.1, 3 and 9: three drafts are best.
    monkeypatch.setattr(quantised_gain, "_seconds", taking([0.25, 1.0, 1.0, 1.1, 3.0, 9.0]))
    tokens = 1 + ACCEPTANCE + ACCEPTANCE**2 + ACCEPTANCE**3
    assert expected_gain(target, SCHEME) == pytest.approx(tokens / (3 * 0.25 + 1.1))


def test_quantised_rows_that_cost_what_full_ones_do_lose(
    target: Any, any_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_gain, "_seconds", taking([1.0, 1.0, 1.5, 2.5, 3.5, 5.0]))
    assert expected_gain(target, SCHEME) < 1


def test_what_is_beside_the_products_counts(target: Any, any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_gain, "_seconds", taking([0.25, 1.0, 1.0, 1.0, 1.0, 1.0]))
    free = expected_gain(target, SCHEME)
    monkeypatch.setattr(quantised_gain, "_step_s", lambda model: 10.0)
    assert 1 < expected_gain(target, SCHEME) < free


@pytest.mark.parametrize(("sample", "expected"), [(1, 1), (5 * 64 * 32, 4), (3 * 64 * 32, 3)])
def test_as_many_layers_of_the_largest_shape_are_timed_as_fit(
    monkeypatch: pytest.MonkeyPatch, sample: int, expected: int
) -> None:
    monkeypatch.setattr(quantised_gain, "SAMPLE", sample)
    wide, narrow = [nn.Linear(32, 64) for _ in range(4)], [nn.Linear(32, 32) for _ in range(4)]
    chosen = quantised_gain._largest([layer for pair in zip(narrow, wide, strict=True) for layer in pair])
    assert chosen == wide[:expected]


def test_really_measured_gains_are_numbers(target: Any, any_size: None) -> None:
    assert 0 < expected_gain(target, SCHEME) < 10


def test_small_models_and_little_memory_are_not_measured(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(calls: Any) -> list[float]:
        raise AssertionError("measured")

    monkeypatch.setattr(quantised_gain, "_seconds", never)
    assert expected_gain(target, SCHEME) == 0
    assert expected_gain(TableModel.random(4, seed=0), SCHEME) == 0
    monkeypatch.setattr(quantised_gain, "SMALLEST", 0)
    monkeypatch.setattr(quantised_gain, "free_bytes", lambda: 1000)
    assert expected_gain(target, SCHEME) == 0


@pytest.mark.parametrize(
    ("gain", "default"), [(PAYS, "router,drafters=(quantized|ngram)"), (PAYS - 0.01, "ngram"), (0.0, "ngram")]
)
def test_auto_has_it_where_it_promises_enough(
    target: Any, monkeypatch: pytest.MonkeyPatch, gain: float, default: str
) -> None:
    monkeypatch.setattr("foretoken.methods.drafters.quantized.expected_gain", lambda target, scheme: gain)
    assert pays_here(LoadingContext(target, "somewhere")) is (gain >= PAYS)
    assert default_drafter(target, "somewhere") == default
    assert default_drafter(target, target.model) == "ngram"  # handed in


@pytest.mark.parametrize(("kind", "measured"), [("Q4_1", False), ("Q8_0", False), ("F32", True)])
def test_a_target_in_few_bits_is_not_measured(
    tmp_path: Path, any_size: None, monkeypatch: pytest.MonkeyPatch, kind: str, measured: bool
) -> None:
    """Its weights read a second time in as many bytes bring nothing; 8 bits in place of 8 neither."""
    small = llama(dtype=torch.float32).config
    network = LlamaForCausalLM(
        LlamaConfig(**{**small.to_dict(), "hidden_size": 64, "intermediate_size": 64, "head_dim": 16})
    )
    target = load_model(write_model(tmp_path / "target.gguf", network, kind))
    monkeypatch.setattr(quantised_gain, "_seconds", taking([0.25, 1.0, 1.0, 1.1, 3.0, 9.0]))
    assert (expected_gain(target, Scheme("4")) > 0) == (measured or kind == "Q8_0")
    assert (expected_gain(target, SCHEME) > 0) == measured
