"""An inflated model computes what the small one computes, and small drafters run on it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import foretoken as ft
from foretoken.lab.workload import inflation, target_name
from foretoken.loading import load_model
from foretoken.models.base import Feed
from foretoken.models.cache import pool
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import PackedLinear, weight_bytes
from foretoken.models.network.layers import LayerPlan
from foretoken.models.variants.inflated import InflatedModel
from foretoken.models.variants.inflation import InflatedShape, big_config, inflate, layer_ends, parse_size, shape_for
from toys import llama

SHAPE = InflatedShape(small=16, copies=3, halvings=1, layers=7, units=40)
"""12 times the width: three copies, then as much space again and twice more."""
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = ([5, 3, 5, 8], [-1, 0, 0, 1])


def pair(shape: InflatedShape = SHAPE, **more: Any) -> tuple[HuggingFaceModel, InflatedModel]:
    small = llama()
    return HuggingFaceModel(small, **more), InflatedModel(inflate(small, shape), small, shape, **more)


def scored(model: HuggingFaceModel, taps: tuple[str, ...] = ()) -> tuple[Tensor, dict[str, Tensor]]:
    sequence = model.open()
    model.prefill(sequence, TEXT)
    rows = model.forward([Feed(sequence, *TREE)], taps)[0]
    model.release(sequence)
    return rows.logits, rows.taps


def tiny(kind: str) -> Any:
    """A random model of another family, with biases or norms over heads and its own projection."""
    config_class, model_class = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[
        kind
    ]
    more = {"head_dim": 8} if kind == "qwen3" else {}
    config = config_class(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.4,
        **more,
    )
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms and biases that matter
                weight.add_(0.3 * torch.randn(weight.shape, dtype=weight.dtype))
            assert weight.abs().sum() > 0, name
    return model


# -- the same function -----------------------------------------------------------------------------------------------


def test_float64_outputs_are_the_small_models() -> None:
    small, big = pair()
    assert small.is_lean and big.is_lean
    assert big.model.config.hidden_size == 192
    assert (scored(small)[0] - scored(big)[0]).abs().max() < 1e-9


def test_the_public_forward_agrees_too() -> None:
    """Transformers takes the mean of squares in float32 whatever the dtype, so that its order of sums shows."""
    small, big = pair(lean=False)
    assert (scored(small)[0] - scored(big)[0]).abs().max() < 1e-4


def test_taps_are_the_small_models() -> None:
    small, big = pair()
    taps = ("layer:0", "layer:1", "layer:2", "last")
    small_taps, big_taps = scored(small, taps)[1], scored(big, taps)[1]
    for name in taps:
        assert small_taps[name].shape == big_taps[name].shape == (4, 16)
        assert (small_taps[name] - big_taps[name]).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_biases_and_head_norms(kind: str) -> None:
    model = tiny(kind)
    big = inflate(model, InflatedShape(small=16, copies=1, halvings=1, layers=5, units=40))
    ids = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        difference = (model(ids).logits - big(ids).logits).abs().max()
    assert difference < 1e-4 * model(ids).logits.std()


@pytest.mark.parametrize("broken", ["norm", "epsilon", "reader"])
def test_planted_mistakes_are_seen(broken: str) -> None:
    """Negative controls: without its corrections the big model says something else."""
    small = llama()
    big = inflate(small, SHAPE)
    layer = big.model.layers[-1]
    if broken == "norm":
        layer.input_layernorm.weight.mul_(2)
    elif broken == "epsilon":
        layer.input_layernorm.variance_epsilon = 0.5
    else:
        layer.mlp.down_proj.weight[0, -1] = 0.3
    model = InflatedModel(big, small, SHAPE)
    assert (scored(HuggingFaceModel(small))[0] - scored(model)[0]).abs().max() > 1e-6


def test_what_is_multiplied_by_zeros_is_not_zero() -> None:
    """Nothing in the reading weights could be left out."""
    big = inflate(llama(), SHAPE)
    for layer in big.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert linear.weight[:, 16:].abs().min() > 0
    assert big.lm_head.weight[:, 16:].abs().min() > 0


def test_bfloat16_greedy_tokens_of_the_builtin_model() -> None:
    """Halving norm weights rounds nothing; only the order of sums differs."""
    prompt = "def read_lines(path):\n"
    small = ft.load("builtin", None, dtype="float32").generate(prompt, max_new_tokens=6, ignore_eos=True)
    big = ft.load("builtin", None, dtype="bfloat16", inflate="40m")
    assert big.generate(prompt, max_new_tokens=6, ignore_eos=True).token_ids == small.token_ids
    assert "inflated to 0.04b" in target_name(big.target, "builtin")


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "expected"), [("300m", 3e8), ("1b", 1e9), ("3b", 3e9), ("7b", 7e9), (5 * 10**8, 5e8)])
def test_named_sizes_are_within_a_few_percent(size: str | int, expected: float) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(Path(ft.__file__).parent / "zoo" / "target")
    shape = shape_for(config, size)
    big = big_config(config, shape)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        count = sum(p.numel() for p in LlamaForCausalLM(big).parameters())
    assert count == pytest.approx(expected, rel=0.03)
    assert big.head_dim == 64
    assert big.num_attention_heads * 64 == big.hidden_size
    assert 50 < shape.width / shape.layers < 200
    assert 2 < shape.units / shape.width < 6


def test_layers_are_spread() -> None:
    assert layer_ends(2, 7) == [0, 3, 7]
    assert layer_ends(8, 8) == list(range(9))


@pytest.mark.parametrize("size", ["big", "", "-1b", "1x", 0, "1kb"])
def test_bad_sizes(size: str | int) -> None:
    with pytest.raises(ValueError, match="300m, 1b, 3b, 7b"):
        parse_size(size)


def test_too_small_a_size() -> None:
    with pytest.raises(ValueError, match="already"):
        load_model(llama(), inflate=1000)


def test_other_architectures_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=16))
    with pytest.raises(ValueError, match=r"gpt2.*llama, mistral, qwen2, qwen3"):
        load_model(model, inflate="1b")


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.variants.inflation.free_bytes", lambda: 10_000)
    with pytest.raises(ValueError, match="GiB are free"):
        inflate(llama(), SHAPE)


# -- as a target -----------------------------------------------------------------------------------------------------


def test_layer_windows_are_blocks() -> None:
    """The first small layer is the first block: a draft that stops behind it sees the small model's state."""
    small, big = pair()
    plan = LayerPlan(stop=1)
    states = []
    for model in (small, big):
        sequence = model.open()
        model.prefill(sequence, TEXT)
        part = model.forward_part([Feed(sequence, [5, 3])], plan, ("layer:1",))[0]
        whole = model.forward([Feed(sequence, [5, 3, 7], [-1, 0, 1])])[0]
        states.append((part.logits, part.taps["layer:1"], whole.logits))
    for small_states, big_states in zip(*states, strict=True):
        assert (small_states - big_states).abs().max() < 1e-9


def test_skipped_sublayers_are_blocks() -> None:
    small, big = pair()
    plan = LayerPlan(skip_attention=frozenset({0}), skip_mlp=frozenset({1}))
    logits = []
    for model in (small, big):
        sequence = model.open()
        model.prefill(sequence, TEXT)
        logits.append(model.forward_part([Feed(sequence, [5, 3])], plan)[0].logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-9


def test_extra_embeddings_are_widened() -> None:
    small, big = pair()
    rows = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = []
    for model in (small, big):
        first = model.extra_embeddings(rows)
        assert model.extra_embeddings(rows) == first == 32
        sequence = model.open()
        logits.append(model.forward([Feed(sequence, [5, first, first + 1])])[0].logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-9
    with pytest.raises(ValueError, match="16"):
        big.extra_embeddings(torch.zeros(1, 192))


def test_texts_in_caches_of_their_own_are_counted_as_the_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lean forward runs several rectangles at once: all of them hand out the small model's layers."""
    monkeypatch.setattr(pool, "SHORT", 0)
    _, big = pair()
    assert big.is_lean
    texts = [big.open() for _ in range(2)]
    assert texts[0].cache is not texts[1].cache
    for text in texts:
        big.prefill(text, TEXT)
    _, expected = scored(big, ("layer:1", "last"))
    for rows in big.forward([Feed(text, *TREE) for text in texts], ("layer:1", "last")):
        assert {name: (states - expected[name]).abs().max() < 1e-9 for name, states in rows.taps.items()} == {
            "layer:1": True,
            "last": True,
        }


def test_drafters_see_the_small_model() -> None:
    small, big = pair()
    assert TargetParts(big).fingerprint() == TargetParts(small).fingerprint()
    assert TargetParts(big).hidden_size == 16


def test_profiles_tell_them_apart() -> None:
    from foretoken.loading.measured.profile import fingerprint_of

    small, big = pair()
    assert fingerprint_of(small) != fingerprint_of(big)


def test_notes() -> None:
    small, big = pair()
    assert inflation(small) is None
    assert inflation(big) == {
        "parameters": big.num_parameters,
        "layers": 7,
        "hidden_size": 192,
        "small_layers": 2,
        "small_hidden_size": 16,
    }
    assert target_name(small, "x") == "x"
    assert "small model's outputs" in target_name(big, "x")


def test_packed_in_place() -> None:
    """An inflated model has one copy of its weights, packed where this machine has a faster layout for them."""
    small = copy.deepcopy(llama()).bfloat16()
    model = InflatedModel(inflate(small, SHAPE), small, SHAPE, in_place=True)
    assert model.is_lean
    packed = any(isinstance(module, PackedLinear) for module in model.model.modules())
    assert packed == (model.forwards.packing.layout != "plain")
    assert weight_bytes(model.model) <= 1.1 * sum(p.nbytes for p in inflate(small, SHAPE).parameters())


def test_seed_fixes_the_weights() -> None:
    first, same, other = (inflate(llama(), SHAPE, seed).model.layers[0].mlp.up_proj.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


# -- the front door --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inflated() -> ft.llm.Llm:
    return ft.load("builtin", None, dtype="float32", inflate="36m")


@pytest.fixture(scope="module")
def small() -> ft.llm.Llm:
    return ft.load("builtin", None, dtype="float32")


@pytest.mark.parametrize("spec", ["model,k=4", "ngram", "medusa,nodes=7", "eagle,nodes=7", "mtp", "kangaroo"])
def test_zoo_drafters(spec: str, inflated: Any, small: Any) -> None:
    """The same text as plain decoding, in as many rounds as on the small model, with trees of one size.

    By default measured times choose the size."""
    from foretoken.llm import assemble
    from foretoken.loading import build_drafter

    prompt = "class Stack:\n    def __init__(self):\n"
    runs = []
    for llm in (inflated, small):
        drafter = build_drafter(spec, llm.target, tokenizer=llm.tokenizer)
        runs.append(
            assemble(llm.target, drafter, "auto", "constant", llm.tokenizer).generate(
                prompt, max_new_tokens=6, ignore_eos=True
            )
        )
    plain = inflated.generate(prompt, max_new_tokens=6, ignore_eos=True)
    assert runs[0].token_ids == runs[1].token_ids == plain.token_ids
    assert runs[0].stats.num_drafts == runs[1].stats.num_drafts


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from foretoken.cli.main import main

    code = main(["generate", "x = [1,", "--inflate", "36m", "--dtype", "float32", "--max-new-tokens", "4", "--json"])
    printed = capsys.readouterr()
    assert code == 0
    assert "inflated to 0.0" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["inflation"]["small_hidden_size"] == 384


def test_a_bad_size_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from foretoken.cli.main import main

    assert main(["generate", "x", "--inflate", "huge"]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
