"""Every family of the lean forward equals its public forward, and what is planted wrong in it is refused.

The public forward takes norms and rotary angles to float32 whatever the model is in.  Inside ``InFloat64`` it does
not, so that both can be compared to nine digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of
from families import MODELS, model_of, windows
from forwards import InFloat64, agrees, compare, outputs
from torch.nn import functional as F

from foretoken.models.base import Feed
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.lean_families import FAMILIES
from foretoken.models.forward.lean_parts import LeanRmsNorm
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import Packing


def test_all_families_are_here() -> None:
    assert MODELS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("exact", ["distribution", "bitwise"])
@pytest.mark.parametrize("name", MODELS)
def test_lean_is_the_public_forward(name: str, exact: str) -> None:
    """Chains, trees, ragged batches, taps and layer windows."""
    with InFloat64():
        network = model_of(name).double()
        lean, plain = (HuggingFaceModel(network, exact=exact, lean=flag) for flag in (True, False))
        assert lean.is_lean, "the check against the public forward refused it"
        compare(outputs(lean), outputs(plain), 1e-9)
        compare(windows(lean), windows(plain), 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_families_are_covered_in_the_dtypes_that_models_come_in(name: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        network = model_of(name).to(dtype)
        lean, plain = (HuggingFaceModel(network, lean=flag) for flag in (True, False))
        assert lean.is_lean
        if dtype == torch.float32 or not FAMILIES[name].experts:  # rounding to bfloat16 may choose another expert
            compare(outputs(lean), outputs(plain), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_bits_do_not_depend_on_the_tree(name: str, dtype: torch.dtype) -> None:
    model = HuggingFaceModel(model_of(name).to(dtype), exact="bitwise")
    assert model.is_lean
    path, alone = prompt_of(6, seed=3), []
    a, b = model.open(), model.open()
    model.prefill(a, prompt_of(11))
    for token in path:
        alone.append(model.forward([Feed(a, [token])])[0].logits[0])
        model.commit(a, [0])
    model.prefill(b, prompt_of(11))
    tree = [path[0], 5, path[1], 6, path[2], 7, path[3], path[4], 8, path[5]]
    rows = model.forward([Feed(b, tree, [-1, 0, 0, 1, 2, 2, 4, 6, 4, 7]), Feed(a, [9, 4, 3], [-1, 0, 0])])[0].logits
    assert torch.equal(rows[[0, 2, 4, 6, 7, 9]], torch.stack(alone))


# -- negative controls -------------------------------------------------------------------------------------------------

Fault = Callable[[LeanForward], None]


def _set(path: str, value: Any) -> Fault:
    """A fault in one place of the forward or of its second layer; a function changes what is there."""

    def plant(lean: LeanForward) -> None:
        first, _, rest = path.partition("layers.")
        owner: Any = lean.layers[1] if rest else lean
        *names, last = (rest or first).split(".")
        for name in names:
            owner = getattr(owner, name)
        setattr(owner, last, value(getattr(owner, last)) if callable(value) and value is not F.relu else value)

    return plant


def _without_offset(lean: LeanForward) -> None:
    lean.layers[1].norm_attention = LeanRmsNorm(lean.owner.model.model.layers[1].input_layernorm, Packing())


def _swapped(kind: str) -> str:
    return "full_attention" if kind == "sliding_attention" else "sliding_attention"


BIAS = ("layers.qkv.bias", None)
ACTIVATION = ("layers.mlp.activation", F.relu)
SCALING = ("layers.scaling", lambda x: 1.1 * x)
WINDOW = ("layers.mask", _swapped)
RESIDUAL = (("layers.out.joined.scale", 1.0), ("layers.mlp.output.joined.scale", 1.0))
INPUT = ("input_scale", 1.0)
LOGITS = ("logit_scale", 1.0)
FINAL_CAP = ("logit_cap", None)
NO_HEAD_NORM = ("layers.q_norm", None)
NO_NORM = (("layers.norm_attention", None), ("layers.norm_mlp", None))
NO_END = ("layers.out.joined.after", None)

FAULTS: dict[str, tuple[Any, ...]] = {
    "llama": (ACTIVATION, SCALING, *NO_NORM),
    "mistral": (ACTIVATION, SCALING),
    "qwen2": (BIAS, ACTIVATION, SCALING, WINDOW),
    "qwen3": (ACTIVATION, NO_HEAD_NORM),
    "gemma": (BIAS, ACTIVATION, SCALING, ("embedding_scale", None), _without_offset),
    "gemma2": (ACTIVATION, SCALING, WINDOW, FINAL_CAP, NO_END, ("layers.soft_cap", None), _without_offset),
    "gemma3_text": (ACTIVATION, SCALING, WINDOW, NO_END, NO_HEAD_NORM, ("layers.rope", _swapped), _without_offset),
    "phi3": (ACTIVATION, SCALING, *NO_NORM),
    "olmo2": (BIAS, ACTIVATION, SCALING, NO_END, NO_HEAD_NORM),
    "granite": (BIAS, ACTIVATION, SCALING, *RESIDUAL, INPUT, LOGITS),
    "gpt_neox": (BIAS, ACTIVATION, SCALING, ("layers.interleaved", False), ("layers.parallel", False)),
    "mixtral": (SCALING, *NO_NORM),
    "qwen3_moe": (SCALING, NO_HEAD_NORM),
    "olmoe": (SCALING, NO_HEAD_NORM),
    "granitemoe": (SCALING, RESIDUAL[0], ("layers.mlp.joined.scale", 1.0), INPUT, LOGITS),
}
CASES = [(name, fault) for name, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(
    ("name", "fault"), CASES, ids=lambda x: x[0] if isinstance(x, tuple) else getattr(x, "__name__", x)
)
def test_a_planted_fault_is_refused(name: str, fault: Any) -> None:
    owner = HuggingFaceModel(model_of(name), lean=False).forwards
    lean = LeanForward(owner)
    assert agrees(owner, lean)
    (_set(*fault) if isinstance(fault, tuple) else fault)(lean)
    assert not agrees(owner, lean)


def test_a_partial_rotary_embedding_is_not_a_whole_one() -> None:
    owner = HuggingFaceModel(model_of("gpt_neox"), lean=False).forwards
    lean = LeanForward(owner)
    assert len(lean.rotary[""].signed) == lean.size.dim // 2
    lean.rotary = LeanForward(HuggingFaceModel(model_of("gpt_neox", rotary_pct=1.0), lean=False).forwards).rotary
    assert len(lean.rotary[""].signed) == lean.size.dim
    assert not agrees(owner, lean)


def test_experts_that_cannot_be_multiplied_leave_the_public_forward() -> None:
    """Transformers' grouped product of experts knows no float64: whoever runs it is told so then, not at loading."""
    assert not HuggingFaceModel(new_model("mixtral", **MODELS["mixtral"]).double()).is_lean
