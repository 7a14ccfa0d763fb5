"""The check of fast paths on networks with the statistics of real ones, in bfloat16."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, new_model
from realistic import SPECIAL, realistic_model
from test_lean_families import CASES, MODELS, SCALING, Fault, _set
from torch import nn

import foretoken as ft
from foretoken.models.base import Refusal
from foretoken.models.checks import fast_paths as checks_module
from foretoken.models.checks.fast_paths import Checks, code_version, fingerprint
from foretoken.models.checks.judging import CHAIN, NODES, ROWS, TEXTS, Judge, ordinary_ids, probe_logits, widened
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.network import Network
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import Projection
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.native import attention
from foretoken.models.network.call import NetworkCall, Outputs

OLD_TOLERANCE = 5e-2
"""The difference, in standard deviations, that was allowed between two forwards' logits of special tokens."""
ALIKE = ("gemma2", "gemma3_text")
"""Norms behind both sublayers keep massive activations from adding up: these families were never refused."""


def deep(name: str, **changes: Any) -> Any:
    """A family's network of 24 layers in bfloat16, with everything switched on that it can have."""
    values = {**MODELS[name], "experts_implementation": "eager", **changes}
    values.pop("num_hidden_layers", None)
    if "layer_types" in values:
        values["layer_types"] = ["sliding_attention", "full_attention"] * 12
    return realistic_model(name, **values)


@pytest.mark.parametrize("name", MODELS)
def test_a_sound_lean_forward_passes_on_real_statistics(name: str) -> None:
    """On special tokens the two forwards differ by more than any fixed tolerance that still finds faults."""
    owner = HuggingFaceModel(deep(name), lean=False).forwards
    lean = LeanForward(owner)
    special = [1 + i % (SPECIAL - 2) for i in range(ROWS)]
    public = probe_logits(owner, owner.run_public, owner.dtype, special)
    other = probe_logits(owner, lean.run, lean.dtype, special)
    assert public is not None and other is not None
    apart = float((public - other).square().mean().sqrt() / public.std())
    assert apart > 0.8 * OLD_TOLERANCE or name in ALIKE, "the fixture is too tame to show what was wrong"
    judge = Judge.of(owner, ordinary_ids(owner.vocab_size))
    assert judge is not None and judge.fault(owner, lean.run, lean.dtype) is None
    assert HuggingFaceModel(owner.model).is_lean


def everywhere(path: str, value: Any) -> Fault:
    """The fault of one layer in all of them."""

    def plant(lean: LeanForward) -> None:
        for layer in lean.layers:
            name = path.removeprefix("layers.")
            setattr(layer, name, value(getattr(layer, name)) if callable(value) else value)

    return plant


@pytest.mark.parametrize(
    ("name", "fault"), CASES, ids=lambda x: x[0] if isinstance(x, tuple) else getattr(x, "__name__", x)
)
def test_a_planted_fault_is_caught_in_bfloat16(name: str, fault: Any) -> None:
    """One layer of 24 computes something else; scores that are scaled or capped otherwise do so in all layers."""
    owner = HuggingFaceModel(deep(name), lean=False).forwards
    lean, judge = LeanForward(owner), Judge.of(owner, ordinary_ids(owner.vocab_size))
    assert judge is not None
    if isinstance(fault, tuple):
        fault = everywhere(*fault) if fault in (SCALING, ("layers.soft_cap", None)) else _set(*fault)
    fault(lean)
    assert judge.fault(owner, lean.run, lean.dtype) is not None


def test_what_is_refused_is_said_once_with_its_reason_and_its_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = deep("llama")
    monkeypatch.setattr(Projection, "plus", lambda self, x, residual: residual + 1.5 * self(x))
    for _ in range(2):
        llm = ft.load(model, drafter="ngram")
        assert llm.describe()["forward"] == "public" and llm.exactness == "rounding"
    (refused,) = llm.describe()["refused"]
    assert refused["path"] == "lean forward" and "off by" in refused["why"] and "twice as long" in refused["costs"]
    assert [r.getMessage() for r in caplog.records if r.name == "foretoken"] == [str(Refusal(**refused))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_kernels_are_judged_by_the_numbers_they_stand_for(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def quantised() -> Any:
        model = deep("llama", hidden_size=64, intermediate_size=128).to(dtype)
        quantise_linears(model, kind)
        return model

    assert HuggingFaceModel(quantised(), lean=False).refused == ()
    assert HuggingFaceModel(quantised()).is_lean
    model = quantised()
    layer = next(m for m in model.modules() if isinstance(m, QuantisedLinear))
    kernel = type(layer.product).product
    monkeypatch.setattr(type(layer.product), "product", lambda self, x: 1.1 * kernel(self, x))
    monkeypatch.setattr(type(layer.product), "dense", lambda self: kernel(self, torch.eye(self.shape[1])).float().t())
    checks_module.KEPT.results.clear()
    monkeypatch.setattr(checks_module.KEPT, "file", lambda: tmp_path / "other")  # where a slow machine keeps them
    (refused,) = HuggingFaceModel(model, lean=False).refused
    assert refused.path == "quantised kernels"


def test_packed_weights_of_a_public_forward_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.models.forward import public

    def scaled(model: nn.Module, packing: Any) -> int:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, __, out: 1.1 * out)
        return 1

    monkeypatch.setattr(public, "pack_linears", scaled)
    assert [r.path for r in HuggingFaceModel(deep("llama"), lean=False, in_place=True).refused] == ["packed weights"]


@pytest.mark.parametrize(("parts", "passes"), [((0,), True), ((0, 1), False)])
def test_trees_are_judged_by_all_texts_of_the_probe(parts: tuple[int, ...], passes: bool) -> None:
    """By rounding the tree of one text was twice as wrong as the public forward's, and a sound path was refused."""
    owner = HuggingFaceModel(deep("llama"), lean=False).forwards
    judge = Judge.of(owner, ordinary_ids(owner.vocab_size))
    assert judge is not None
    texts = iter(range(TEXTS))

    def run(call: NetworkCall) -> Outputs:
        text = next(texts)
        truth = judge.truth[text * NODES : (text + 1) * NODES].clone()
        noise = torch.linspace(-1.7, 1.7, truth.shape[1], dtype=truth.dtype) * truth.std(-1, keepdim=True)
        sizes = [judge.public.chain] * CHAIN + [(2.0 if text in parts else 0.5) * judge.public.tree] * (NODES - CHAIN)
        return [truth + noise * torch.tensor(sizes).unsqueeze(1)], None

    assert judge.public.tree > 0.02  # what may be added for rounding does not decide
    assert (judge.fault(owner, run, owner.dtype) is None) == passes


def test_the_judge_is_the_network_in_float32() -> None:
    """Weights are widened one module at a time, and are the same objects afterwards."""
    model, twin = deep("llama"), deep("llama").float()
    before = {name: (id(weight), weight.dtype) for name, weight in model.named_parameters()}
    owner, wide = (HuggingFaceModel(network, lean=False).forwards for network in (model, twin))
    ids = ordinary_ids(owner.vocab_size)
    with widened(model, torch.float32):
        judged = probe_logits(owner, owner.run_public, torch.float32, ids)
    expected = probe_logits(wide, wide.run_public, torch.float32, ids)
    assert judged is not None and expected is not None
    assert float((judged - expected).abs().max()) < 1e-4 * float(expected.std())
    assert {name: (id(weight), weight.dtype) for name, weight in model.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_results_are_remembered_by_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "WORTH_KEEPING_S", 0.0)
    model = deep("llama")
    assert HuggingFaceModel(model).is_lean
    kept = checks_module.KEPT.stored()
    assert len(kept) == 2 and all(isinstance(lines, list) for lines in kept.values())
    checks_module.KEPT.results.clear()
    monkeypatch.setattr(Judge, "of", None)  # nothing is judged again
    assert HuggingFaceModel(model).is_lean
    checks_module.KEPT.file().write_text("{")  # a damaged file is none
    checks_module.KEPT.results.clear()
    with pytest.raises(TypeError):
        HuggingFaceModel(model)


def test_results_belong_to_the_code_in_both_languages_but_not_to_what_is_compiled(tmp_path: Path) -> None:
    def version() -> str:
        code_version.cache_clear()
        return code_version(tmp_path)

    seen = [version()]
    for name in ("one.py", "native/one.cpp", "native/one.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        seen.append(version())
    assert len(set(seen)) == 4
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "one.cpython-313.pyc").write_text("x")
    assert version() == seen[-1]


def test_all_results_of_a_model_with_a_slow_check_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later check would be judged by a network that the first path, which is remembered, has laid out."""
    clock = iter([0.0, 5.0])  # the first check takes five seconds, the others none
    monkeypatch.setattr(checks_module, "perf_counter", lambda: next(clock, 5.0))
    checks_module.KEPT.results.clear()
    HuggingFaceModel(deep("llama"), in_place=True)
    kept = checks_module.KEPT.stored()
    assert any(" bits " in name for name in kept) and len(kept) >= 2
    checks_module.KEPT.results.clear()
    monkeypatch.setattr(Judge, "of", None)  # nothing is judged again
    HuggingFaceModel(deep("llama"), in_place=True)
    assert checks_module.KEPT.stored() == kept


def test_fingerprints_tell_networks_apart() -> None:
    model = deep("llama")
    first = fingerprint(model)
    assert first is not None and fingerprint(deep("llama")) == first
    assert fingerprint(deep("llama", rms_norm_eps=1e-3)) != first
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.5)
    assert fingerprint(model) != first
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert fingerprint(model) is None
    handle.remove()
    model.model.layers[0].forward = model.model.layers[1].forward
    assert fingerprint(model) is None


def test_a_forward_that_was_put_on_a_class_is_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As packages of faster kernels do it, and ablations: what was found out is of the class as it was."""
    monkeypatch.setattr(checks_module, "WORTH_KEEPING_S", 0.0)
    model = deep("llama")
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    before = fingerprint(model)
    assert HuggingFaceModel(model).is_lean
    kept = checks_module.KEPT.stored()
    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", lambda self, x: x * 0)
        assert fingerprint(model) is None
        assert not HuggingFaceModel(model).is_lean and checks_module.KEPT.stored() == kept
        patched.setattr(kind, "forward", wraps(own)(lambda self, x: x * 0))
        assert fingerprint(model) is None, "its module's name is a copy"
    with monkeypatch.context() as patched:  # a function of the class's own file
        patched.setattr(kind, "forward", type(model.model.layers[0].input_layernorm).forward)
        assert fingerprint(model) not in (None, before)
    assert fingerprint(model) == before and HuggingFaceModel(model).is_lean


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ordinary_models_keep_their_results(architecture: str) -> None:
    """Decorators and inherited forwards are nobody's patch."""
    model = new_model(architecture)
    key = fingerprint(model)
    model(torch.tensor([[5, 6, 7]]))
    assert key is not None and fingerprint(model) == key


def test_fingerprints_tell_numbers_and_frequencies_apart() -> None:
    model = deep("llama")
    keys = [fingerprint(model)]
    model.model.layers[0].self_attn.scaling *= 2
    keys.append(fingerprint(model))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    keys.append(fingerprint(model))
    assert len(set(keys)) == 3


def test_the_probe_is_the_text_where_there_is_one() -> None:
    owner = HuggingFaceModel(deep("llama"), lean=False).forwards
    assert Checks(owner, lambda: list(range(10, 90))).ids == list(range(10, 10 + ROWS))
    assert Checks(owner, lambda: [5, 6]).ids == [5, 6, *ordinary_ids(owner.vocab_size)[: ROWS - 2]]
    assert min(ordinary_ids(50_000)) > 1000 and len(set(ordinary_ids(50_000))) == ROWS


# -- bits --------------------------------------------------------------------------------------------------------------


def test_exactness_is_tried_and_said() -> None:
    model = deep(
        "llama", hidden_size=128, intermediate_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1
    )
    for dtype in (torch.float32, torch.bfloat16):
        wrapped = HuggingFaceModel(model.to(dtype), exact="bitwise")
        assert (wrapped.exactness, wrapped.describe()["exactness"]) == ("bitwise", "bitwise"), wrapped.exactness_why
    plain = HuggingFaceModel(model.float())
    assert plain.exactness == "rounding" and "number of rows" in plain.exactness_why
    native = HuggingFaceModel(model.bfloat16(), in_place=True)
    kernels = native.forwards.packing.layout == "native" and attention.why_not() is None
    assert (native.exactness == "bitwise") == kernels, native.exactness_why


def test_a_model_that_changes_is_checked_again() -> None:
    model = deep("llama", hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    llm = ft.load(model, drafter="ngram", exact="bitwise")
    before = llm.generate([20, 21, 22], max_new_tokens=4).token_ids
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    after = llm.generate([20, 21, 22], max_new_tokens=4).token_ids
    assert llm.exactness == "bitwise" and after != before
    assert after == ft.load(model, drafter=None, exact="bitwise").generate([20, 21, 22], max_new_tokens=4).token_ids


@pytest.mark.parametrize("company", ["chain", "tree", "batch"])
def test_bits_that_depend_on_company_are_noticed(company: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep("llama", hidden_size=64, intermediate_size=128)
    honest = Network.run_all

    def disturbed(self: Network, calls: Any) -> Any:
        ((logits, taps),), (call,) = honest(self, calls), calls
        is_tree = len(call.wanted) == 1 and call.ids.shape[1] > 5
        is_chain = len(call.wanted) == 1 and call.ids.shape[1] == 5
        if {"chain": is_chain or is_tree, "tree": is_tree, "batch": len(call.wanted) > 1}[company]:
            logits = [1.25 * rows for rows in logits]
        return [(logits, taps)]

    monkeypatch.setattr(Network, "run_all", disturbed)
    wrapped = HuggingFaceModel(model, exact="bitwise")
    assert wrapped.exactness == "rounding" and f"a {company} gave different bits" in wrapped.exactness_why
