"""On a device without numbers of 64 bits models load and write what they write on the CPU.

The device is a stand-in (``fake_cuda``): like MPS it raises TypeError for every float64 tensor.
"""

from __future__ import annotations

import pytest
import torch

import foretoken as ft
from fake_cuda import fake_mps
from foretoken.models.checks.self_test import relative

OPTIONS = {"max_new_tokens": 8, "ignore_eos": True}


def test_the_stand_in_has_no_float64() -> None:
    """The control: this is what is refused."""
    with fake_mps():
        x = torch.ones(2, device="mps")
        assert x.device.type == "mps"
        for ask in (x.double, lambda: x.to(torch.float64), lambda: torch.ones(2, dtype=torch.float64, device="mps")):
            with pytest.raises(TypeError, match="doesn't support float64"):
                ask()


@pytest.mark.parametrize("drafter", [None, "ngram", "model,k=3", "model,tree=2x2", "medusa"])
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
def test_the_built_in_model_loads_and_writes_as_on_the_cpu(drafter: str | None, seed: int | None) -> None:
    options = OPTIONS if seed is None else {**OPTIONS, "temperature": 1.0, "seed": seed}
    expected = ft.load(drafter=drafter, dtype="float32").generate("def read(path):", **options).token_ids
    with fake_mps():
        llm = ft.load(drafter=drafter, dtype="float32", device="mps")
        assert llm.target.device.type == "mps"  # type: ignore[attr-defined]
        assert llm.generate("def read(path):", **options).token_ids == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_precision_is_checked_at_load(dtype: str) -> None:
    """The check of the lean forward has no judge in float64 there, and passes all the same."""
    with fake_mps():
        llm = ft.load(drafter=None, device="mps", dtype=dtype)
        assert llm.describe()["forward"] == "lean", llm.describe()["refused"]
        assert len(llm.generate("def read(path):", **OPTIONS).token_ids) == 8


def test_sums_in_float64_are_refused() -> None:
    with (
        fake_mps(),
        pytest.raises(ValueError, match="sums attention in float64, which mps does not support: leave it out"),
    ):
        ft.load(drafter=None, device="mps", dtype="float32", exact="bitwise")


def test_states_are_compared_on_the_cpu() -> None:
    with fake_mps():
        tensor = torch.tensor([1.0, 2.0], device="mps")
        assert relative(tensor, tensor) == 0.0 and relative(tensor * 2, tensor) == pytest.approx(1.0)
