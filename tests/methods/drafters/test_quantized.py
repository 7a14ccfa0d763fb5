"""The target's own quantised network drafts: exactness, no trace in the cache, acceptance, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.sparse_kv import SparseKvDrafter
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.network import Network
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import pack_linears
from foretoken.models.linear.quantised import available, multiplies_bytes
from foretoken.models.linear.quantised_products import (
    Int4Product,
    Int8Product,
    IntegerProduct,
    QuantisedProduct,
)
from foretoken.models.network.call import NetworkCall
from foretoken.models.network.layers import LayerPlan
from foretoken.models.variants import second_weights
from foretoken.models.variants.second_weights import OwnWeightsModel, QuantisedWeights, Scheme
from models.checkpoints import new_model, prompt_of
from toys import (
    CAUGHT,
    FALSE_ALARM,
    engine,
    joint_distribution,
    layer_runs,
    llamas,
    outputs,
    sampled_p_value,
    serve,
    tables,
)

PROMPTS = [prompt_of(9), [3], prompt_of(14, seed=1)]
T1 = SamplingParams(temperature=1.0)


def model(name: str = "llama", dtype: torch.dtype = torch.float64, lean: bool = True, **changes: Any) -> Any:
    """Wide enough for int4: hidden states of 64."""
    changes = {"hidden_size": 64, **changes}
    return HuggingFaceModel(new_model(name, **changes).to(dtype), lean=lean)


@cache
def builtin() -> HuggingFaceModel:
    loaded = load_model("builtin", dtype="float32")
    assert isinstance(loaded, HuggingFaceModel)
    return loaded


@pytest.fixture(params=["int8, integers", "int8, bf16", "int4"])
def product(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """One product for every layer, instead of the fastest; the bits that choose it."""
    kinds: dict[str, type[QuantisedProduct]] = {
        "int8, integers": IntegerProduct,
        "int8, bf16": Int8Product,
        "int4": Int4Product,
    }
    chosen = kinds[request.param]

    def pick(out: int, width: int, group: int, bits: str, activations: str) -> type[QuantisedProduct]:
        return chosen if bits != "8" or chosen.bits == 8 else Int8Product

    monkeypatch.setattr(second_weights, "fastest_draft_product", pick)
    return "4" if chosen.bits == 4 else "8"


GREEDY = SamplingParams()


def requests(params: SamplingParams = GREEDY, tokens: int = 24) -> list[Request]:
    return [Request(p, params, tokens, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "seeded"])
def test_the_text_is_that_of_plain_decoding(lean: bool, params: SamplingParams, product: str) -> None:
    target = model(lean=lean)
    assert target.is_lean is lean
    plain = outputs(engine(target), requests(params))
    runs = serve(engine(target, QuantizedDrafter(target, product, k=3)), requests(params))
    assert [run.output for run in runs] == plain
    rate = sum(r.stats.num_accepted_tokens for r in runs) / sum(r.stats.num_draft_tokens for r in runs)
    assert (0.6 if product == "8" else 0.2) < rate < 1.0  # it drafts well, and with other weights


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "phi3", "olmo2", "gpt_neox", "opt", "qwen3_moe"])
def test_families(name: str) -> None:
    """Families with biases, norms on heads, sliding windows and experts."""
    target = model(name, torch.float32)
    drafter = QuantizedDrafter(target, "8", tree="2x1x1")
    runs = serve(engine(target, drafter), requests())
    assert [run.output for run in runs] == outputs(engine(target), requests())
    assert sum(run.stats.num_accepted_tokens for run in runs) > 20


def test_both_forwards_draft_the_same(product: str) -> None:
    """Both use one kernel: which is the fastest depends on timing, and two of them round differently."""
    logits = []
    for lean in (True, False):
        target = model("qwen2", lean=lean)
        view, sequence = OwnWeightsModel(target, Scheme(product)), target.open()
        target.prefill(sequence, prompt_of(7))
        logits.append(view.forward([Feed(sequence, [5, 6, 7], [-1, 0, 0])])[0].logits)
    torch.testing.assert_close(*logits, rtol=0, atol=0.02 * float(logits[0].std()))
    assert target.forward([Feed(target.open(), [5])])[0].logits.shape == (1, 97)


def distribution_p_value(drafter: QuantizedDrafter, target: HuggingFaceModel) -> float:
    modes = {"T=1": T1}
    distributions = {"T=1": joint_distribution(target, T1, [1, 2], 3)}
    return sampled_p_value(engine(target, drafter), modes, distributions, [1, 2], 3, 700)


def test_sampled_outputs_have_the_targets_distribution() -> None:
    target, _ = llamas(vocab=4)
    assert distribution_p_value(QuantizedDrafter(target, "8", k=2), target) > FALSE_ALARM


def test_a_planted_bias_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token is proposed as if it had been drawn."""
    target, _ = llamas(vocab=4)
    drafter = QuantizedDrafter(target, "8", k=2)
    whole = QuantizedDrafter.propose_batch

    def lying(self: QuantizedDrafter, contexts: Any, budgets: Any) -> list[TokenTree]:
        trees = whole(self, contexts, budgets)
        return [t if t.q is None else replace(t, tokens=(t.tokens[0], *t.q.argmax(-1).tolist())) for t in trees]

    monkeypatch.setattr(QuantizedDrafter, "propose_batch", lying)
    assert distribution_p_value(drafter, target) < CAUGHT


# -- the cache -------------------------------------------------------------------------------------------------------


def stored(target: HuggingFaceModel, row: int, count: int) -> list[Tensor]:
    buffers = [*target.cache.keys, *target.cache.values]
    return [b[row, :, :count].clone() for b in buffers if b is not None]


def rows_after_rounds(target: HuggingFaceModel, drafter: Any, rounds: int) -> Iterator[tuple[list[int], list[Tensor]]]:
    speculative = engine(target, drafter)
    speculative.add(Request(PROMPTS[0], SamplingParams(), 60, ignore_eos=True))
    for _ in range(rounds):
        speculative.step()
        (run,) = speculative.requests.running
        yield list(run.sequence.tokens), stored(target, run.sequence.row, len(run.sequence.tokens))
    speculative.cancel(run.id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_trace_of_the_draft_is_left(dtype: torch.dtype) -> None:
    """With ``exact="bitwise"`` a row has the same bits in any call: after every round the cache is that of plain
    decoding, bit for bit."""
    network = new_model("llama", hidden_size=64).to(dtype)
    target = HuggingFaceModel(network, exact="bitwise")
    plain = HuggingFaceModel(network, exact="bitwise")
    *_, (text, expected) = rows_after_rounds(plain, None, 20)
    drafted = 0
    for tokens, rows in rows_after_rounds(target, QuantizedDrafter(target, "8", k=3), 5):
        assert tokens == text[: len(tokens)]
        drafted = max(drafted, len(tokens))
        assert all(torch.equal(a, b[:, : len(tokens)]) for a, b in zip(rows, expected, strict=True))
    assert drafted > len(PROMPTS[0]) + 6  # drafts were accepted


def test_a_draft_that_stays_in_the_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees it if the rows that the quantised network wrote are kept."""
    network = new_model("llama", hidden_size=64)
    target = HuggingFaceModel(network, exact="bitwise")
    *_, (_, expected) = rows_after_rounds(HuggingFaceModel(network, exact="bitwise"), None, 12)
    run = Network.run_all
    whole = LayerPlan(weights=Scheme("8").name)
    user = QuantizedDrafter(target, "8")  # the target has the weights as long as it is there

    def quantised(self: Network, calls: list[NetworkCall]) -> Any:
        return run(self, [replace(call, plan=whole) for call in calls])

    monkeypatch.setattr(Network, "run_all", quantised)
    tokens, rows = next(rows_after_rounds(target, ScriptedDrafter("1 2 0"), 1))
    del user
    assert not all(torch.equal(a, b[:, : len(tokens)]) for a, b in zip(rows, expected, strict=True))


@pytest.mark.parametrize("lean", [True, False])
def test_the_target_is_as_it_was(lean: bool) -> None:
    target = model(lean=lean)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    drafter = QuantizedDrafter(target, "8", k=3)
    speculative = engine(target, drafter)
    speculative.add(requests()[0])
    speculative.step()
    (run,) = speculative.requests.running
    drafter.propose_batch([run.context], [Budget(3, 8)])
    assert not run.sequence.scratch_tokens and not run.sequence.provisional
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("forward" in vars(module) for module in target.model.modules())


def test_forwards_are_put_back_when_a_draft_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model(lean=False)
    drafter = QuantizedDrafter(target, "8")

    def broken(self: Any, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    for kernel in available().values():
        monkeypatch.setattr(kernel, "product", broken)
    speculative = engine(target, drafter)
    speculative.add(requests()[0])
    with pytest.raises(KeyboardInterrupt):
        speculative.step()
    assert not any("forward" in vars(module) for module in target.model.modules())


# -- acceptance ------------------------------------------------------------------------------------------------------


def test_bits_16_accept_everything() -> None:
    target = model()
    for run in serve(engine(target, QuantizedDrafter(target, "16", k=4)), requests()):
        assert run.stats.acceptance_rate == 1.0
    assert not target.forwards._second


def test_acceptance_on_the_builtin_target(product: str) -> None:
    """At least .9 of the int8 drafts are accepted, and .75 of the int4 drafts."""
    target = builtin()
    target.forwards._second = {}
    prompts = [list(range(400, 424)), [50, 90, 17], list(range(1000, 1020))]
    texts = [Request(p, SamplingParams(), 32, ignore_eos=True) for p in prompts]
    runs = serve(engine(target, QuantizedDrafter(target, product, k=4)), texts)
    rate = sum(r.stats.num_accepted_tokens for r in runs) / sum(r.stats.num_draft_tokens for r in runs)
    assert rate >= (0.9 if product == "8" else 0.75)


# -- beside and inside other drafters --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "seeded"])
def test_groups(params: SamplingParams) -> None:
    target = model()
    plain = outputs(engine(target), requests(params))
    own = QuantizedDrafter(target, "8", k=3)
    for group in (
        EnsembleDrafter([NgramDrafter(n=2, k=3), own, QuantizedDrafter(target, "4", tree="2x1")]),
        EnsembleDrafter([own, SparseKvDrafter(target, k=2, budget=24, chunk=4)]),
        RouterDrafter([own, NgramDrafter(n=2)]),
    ):
        assert outputs(engine(target, group), requests(params)) == plain


@pytest.mark.parametrize("spec", ["quantized,bits=8,inner=ngram", "quantized,bits=8,k=4,inner=(ngram,k=3),width=2"])
def test_an_inner_drafter_guesses_for_the_quantised_network(spec: str) -> None:
    target = model()
    drafter = build_drafter(spec, target, target_source=target)
    runs = serve(engine(target, drafter), requests())
    assert [run.output for run in runs] == outputs(engine(target), requests())
    assert sum(run.stats.num_accepted_tokens for run in runs) > 30
    assert drafter is not None
    with pytest.raises(ValueError, match="drafts on the target's own cache"):
        EnsembleDrafter([drafter])


def test_sets_are_shared_and_siblings_have_them() -> None:
    target = model()
    first = QuantizedDrafter(target, "8")
    assert QuantizedDrafter(target, "8", k=2).model.weights is first.model.weights  # type: ignore[attr-defined]
    sibling = target.sibling()
    other = QuantizedDrafter(sibling, "8", k=3)
    assert other.model.weights is first.model.weights  # type: ignore[attr-defined]
    plain = outputs(engine(target), requests())
    assert outputs(engine(sibling, other), requests()) == plain
    assert outputs(engine(target, first), requests()) == plain


@pytest.mark.parametrize("lean", [True, False])
def test_sets_leave_with_their_last_drafter_and_come_back(lean: bool) -> None:
    """They stayed in the target, so that `tune` and `parity` held those of every drafter that they had tried."""
    target = model(dtype=torch.float32, lean=lean)
    drafters = [QuantizedDrafter(target, "8"), QuantizedDrafter(target, "8", k=2), QuantizedDrafter(target, "4")]
    sibling = target.sibling()
    drafts = outputs(engine(target, drafters[0]), requests())
    eight, four = (weakref.ref(drafters[i].model.weights) for i in (0, 2))  # type: ignore[attr-defined]
    del drafters[0]
    gc.collect()
    assert eight() is drafters[0].model.weights  # type: ignore[attr-defined]
    del drafters[0]
    gc.collect()
    assert eight() is None and four() is drafters[0].model.weights  # type: ignore[attr-defined]
    sequence = sibling.open()
    with pytest.raises(ValueError, match="no second weights"):
        sibling.forward_part([Feed(sequence, [1])], LayerPlan(weights=Scheme("8").name))
    assert outputs(engine(target, QuantizedDrafter(target, "8")), requests()) == drafts
    drafters.clear()
    gc.collect()
    assert four() is None and not target.forwards._second


def test_packed_layers_are_quantised_too() -> None:
    target = model(dtype=torch.bfloat16, lean=False)
    if not pack_linears(target.model):
        pytest.skip("this machine packs nothing")
    weights = QuantizedDrafter(target, "8").model.weights  # type: ignore[attr-defined]
    assert len(weights.all_products) == 3 * 7 + 1


@pytest.mark.parametrize("lean", [True, False])
def test_the_set_holds_what_the_dequantised_weights_say(lean: bool) -> None:
    """Layer by layer against the readable twin; the vocabulary projection is int8 even with bits=4."""
    target = model("qwen2", torch.float32, lean=lean)
    weights = QuantisedWeights(target.forwards, Scheme("4"))
    products = weights.all_products
    assert len(products) == (3 * 4 + 1 if lean else 3 * 7 + 1)
    assert [kernel.bits for kernel in products] == [4] * (len(products) - 1) + [8]
    twins = QuantisedWeights(target.forwards, Scheme("4"))
    x = torch.randn(3, 64)
    for kernel, twin in zip(products, twins.all_products, strict=True):
        if kernel.shape[1] == 64:
            torch.testing.assert_close(kernel(x), twin(x), rtol=0, atol=0)
    assert weights.nbytes < target.weight_bytes / 3


@pytest.mark.skipif(not multiplies_bytes(), reason="no kernel for activations of 8 bits")
@pytest.mark.parametrize("activations", ["8", "15"])
def test_drafts_take_activations_of_as_many_bits_as_they_are_told(activations: str) -> None:
    target = model()
    drafter = build_drafter(f"quantized,bits=8,activations={activations}", target, target_source=target)
    products = drafter.model.weights.all_products
    assert products and {product.activations for product in products} == {int(activations)}
    batch = [Request([3, 5, 7], GREEDY, 12, ignore_eos=True)]
    assert outputs(engine(target, drafter), batch) == outputs(engine(target), batch)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quantized:folder", "takes no path"),
        ("quantized,bits=5", "bits=4, 8 or auto"),
        ("quantized,activations=16", "activations must be one of 8, 15, auto"),
        ("quantized,group=48", "group must be one of 32, 64, 128"),
        ("quantized,k=0", "quantized needs k >= 1"),
        ("quantized,draw=sorted", "draw must be"),
        ("quantized,width=2", "with inner=... only"),
        ("quantized,inner=ngram,tree=2x1", "drafts chains"),
        ("quantized,inner=jacobi", "cannot use 'jacobi' inside"),
        ("quantized,inner=ngram,draw=iid", "drafts chains"),
        ("quantized,int=4", "unknown option 'int'"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    target = model()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def one_line(error: Any) -> bool:
    return "\n" not in str(error.value)


def test_targets_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match="network of layers") as error:
        QuantizedDrafter(tables()[0])
    assert one_line(error)
    gpt2 = HuggingFaceModel(new_model("gpt2"))
    with pytest.raises(CapabilityError, match=r"GPT2Block layers of this target have no nn\.Linear") as error:
        QuantizedDrafter(gpt2)
    assert one_line(error) and not gpt2.forwards._second
    odd = model(hidden_size=40, num_attention_heads=4, intermediate_size=72)
    with pytest.raises(CapabilityError, match=r"no layer of this target fits bits=4: .* use bits=8") as error:
        QuantizedDrafter(odd, "4")
    assert one_line(error)
    QuantizedDrafter(odd, "8")
    whole = model()
    with monkeypatch.context() as lacking:
        lacking.setattr(second_weights, "multiplies_bytes", lambda: False)
        with pytest.raises(CapabilityError, match="no kernel for activations of 8 bits: leave it out") as error:
            QuantizedDrafter(whole, "8", activations="8")
        assert one_line(error) and not whole.forwards._second
    monkeypatch.setattr(second_weights, "free_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"a second set of weights takes .* GB and .* are free") as full:
        QuantizedDrafter(whole, "8")
    assert one_line(full) and not whole.forwards._second
    monkeypatch.setattr(second_weights, "available", dict)
    with pytest.raises(CapabilityError, match="this build of PyTorch") as error:
        QuantizedDrafter(whole, "8")
    assert one_line(error)


def test_weights_that_are_no_floats_are_refused() -> None:
    target = model(lean=False)
    linear = target.model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(CapabilityError, match=r"torch\.int8 already"):
        QuantizedDrafter(target, "8")


def test_free_memory_is_known_here() -> None:
    assert (second_weights.free_bytes() or 0) > 10**6


def test_the_view_keeps_to_the_targets_sequences() -> None:
    target = model()
    view = OwnWeightsModel(target, Scheme("8"))
    with pytest.raises(CapabilityError, match="cannot work inside another drafter"):
        view.open_beside(None)
    sequence = target.open()
    assert view.open_beside(sequence) is sequence
    view.forward([Feed(sequence, [1, 2])])
    with pytest.raises(ValueError, match="cannot be committed"):
        view.commit(sequence, [0])
    with pytest.raises(ValueError, match="run all before committing"):
        target.commit(sequence, [0])
    view.commit(sequence, [])
    with pytest.raises(ValueError, match="no second weights 'x'"):
        target.forward_part([Feed(sequence, [1])], LayerPlan(weights="x"))


def test_the_request_only_pays_for_its_own_rounds() -> None:
    """A draft of no tokens runs nothing."""
    target = model()
    drafter = QuantizedDrafter(target, "8")
    speculative: Engine = engine(target, drafter)
    speculative.add(requests()[0])
    speculative.step()
    (run,) = speculative.requests.running
    context: Context = run.context
    before = layer_runs(target)
    assert drafter.propose_batch([context], [Budget(0, 0)])[0].num_drafts == 0
    assert layer_runs(target) == before
