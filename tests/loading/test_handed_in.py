"""Models that callers hand in: wrappers are taken off, weights may be elsewhere, and what is no model is named."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5Model,
)  # fmt: skip

import foretoken as ft
from foretoken.loading import LoadError, load_model
from foretoken.models import wrap
from foretoken.models.base import CapabilityError
from foretoken.models.forward.parts import TargetParts
from models.checkpoints import new_model, prompt_of

PROMPT = prompt_of(9)


def written(model: Any, **options: Any) -> list[int]:
    return ft.load(model, "ngram,n=1,k=3", **options).generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return written(new_model("llama"))


def compiled() -> Any:
    return torch.compile(new_model("llama"), backend="eager")


def test_compiled_and_parallel_models_run_as_what_is_inside(expected: list[int]) -> None:
    for wrapped in (compiled(), nn.DataParallel(new_model("llama")), nn.DataParallel(compiled())):
        assert written(wrapped) == expected
    network = new_model("llama")
    assert load_model(torch.compile(network, backend="eager")).model is network  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["llama", "bloom", "mamba", "gptj"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_forward_is_not_called(family: str, whole: bool) -> None:
    """It would be compiled anew for most calls, and a full graph refuses the first one."""
    drafter = "ngram,n=1,k=3" if family != "mamba" else None
    expected = ft.load(new_model(family), drafter).generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    network, calls = new_model(family), []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    if whole:
        network.compile(backend=backend, fullgraph=True)
    else:
        network.forward = torch.compile(network.forward, backend=backend, fullgraph=True)
    kept = dict(vars(network))
    llm = ft.load(network, drafter)
    assert llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == expected and not calls
    assert llm.target.weights_version == 0 and vars(network) == kept
    if family == "llama":
        assert llm.target.is_lean, "compiling changes no results"  # type: ignore[attr-defined]
        options: dict[str, Any] = {"custom_generate": ft.custom_generate, "drafter": drafter, "do_sample": False}
        output = network.generate(torch.tensor([PROMPT]), max_new_tokens=12, eos_token_id=None, **options)
        assert output[0, len(PROMPT) :].tolist() == expected and not calls


@pytest.mark.parametrize("family", ["llama", "bloom", "mamba"])
def test_weights_that_accelerate_keeps_elsewhere(family: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    network = new_model(family)
    drafter = "ngram,n=1,k=3" if family != "mamba" else None
    plain = ft.load(network, drafter).generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    offloaded = accelerate.cpu_offload(new_model(family), execution_device="cpu")
    assert offloaded.device.type == "meta"
    llm = ft.load(offloaded, drafter)
    assert llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == plain


def test_some_weights_on_the_disk(expected: list[int], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    new_model("llama").save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers"), "cpu")
    split: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={**places, "lm_head": "disk"}, offload_folder=tmp_path / "off"
    )
    assert split.lm_head.weight.device.type == "meta"
    assert written(split) == expected
    with pytest.raises(CapabilityError, match="needs all of the target's weights in memory"):
        TargetParts(load_model(split))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "nonsense"}, "unknown dtype 'nonsense'"),
        ({"dtype": ["float32"]}, r"unknown dtype \['float32'\]"),
        ({"device": 1.5}, "device must be a name such as cpu or cuda:0, not a float"),
        ({"device": True}, "device must be a name such as cpu or cuda:0, not a bool"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used here"),
        ({"dtype": "bfloat16"}, r"keeps its dtype, float32: call model.to\(torch.bfloat16\) first$"),
        ({"device": "meta"}, r"keeps its device, cpu: call model.to\('meta'\) first$"),
    ],
)
def test_a_dtype_or_device_that_a_model_does_not_have(options: dict[str, Any], message: str) -> None:
    network = new_model("llama")
    for model in (network, wrap(network)):
        with pytest.raises(ValueError, match=message):
            ft.load(model, drafter=None, **options)


def test_the_dtype_and_device_that_a_model_has(expected: list[int]) -> None:
    assert written(new_model("llama"), dtype="float32", device="cpu") == expected
    assert written(new_model("llama"), dtype=torch.float32, device="auto") == expected


def test_layers_that_were_cut_off() -> None:
    network = new_model("llama")
    count = len(network.model.layers)
    network.model.layers = network.model.layers[:1]
    advice = (
        f"cannot find the {count} decoder layers of LlamaForCausalLM: it has 1, so set config.num_hidden_layers to 1"
    )
    with pytest.raises(CapabilityError, match=advice):
        ft.load(network, "ngram")
    network.config.num_hidden_layers = 1
    assert written(network)


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("some/folder", r"not 'some/folder': give AutoTokenizer.from_pretrained\('some/folder'\)"),
        (5, "not an int: give AutoTokenizer's"),
        (LlamaConfig, "not a type: give AutoTokenizer's"),
    ],
)
def test_a_tokenizer_that_is_none(tokenizer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"tokenizer must be a Transformers tokenizer, {words}"):
        ft.load(new_model("llama"), "ngram", tokenizer=tokenizer)


def test_a_backend_for_a_model_names_its_class() -> None:
    with pytest.raises(ValueError, match=r"and a LlamaForCausalLM is not one: leave backend out$"):
        ft.load(new_model("llama"), backend="llama.cpp")


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy, copy.copy])
def test_what_is_loaded_stays_in_its_process(take: Any) -> None:
    with pytest.raises(TypeError, match="an Llm cannot be copied or pickled: load it in each process"):
        take(ft.load(new_model("llama"), None))


def test_weights_on_the_device_meta_are_none() -> None:
    with torch.device("meta"):
        network = LlamaForCausalLM(new_model("llama").config)
    with pytest.raises(LoadError, match="LlamaForCausalLM has no weights"):
        ft.load(network, None)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mamba"])
def test_dropout_is_off_while_decoding(family: str) -> None:
    rates = {"gpt2": {"resid_pdrop": 0.9, "embd_pdrop": 0.9}, "bloom": {"hidden_dropout": 0.9}, "mamba": {}}[family]
    network = new_model(family, **rates)
    expected = ft.load(network, None).generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    network.train()
    llm = ft.load(network, None)
    assert not network.training
    network.train()  # as somebody who trains it between two requests does
    assert llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == expected
    public = ft.load(load_model(network, lean=False), None)
    network.train()
    assert public.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == expected


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one process: weights are spread over it as over many."""
    hook = sys.excepthook  # PyTorch puts its own there for good
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    sys.excepthook = hook
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_weights_that_are_spread_over_processes(mesh: Any) -> None:
    network = new_model("llama")
    fully_shard(network, mesh=mesh)  # FSDP2
    split = new_model("llama")
    weight = nn.Parameter(distribute_tensor(split.lm_head.weight.detach(), mesh, [Shard(0)]))
    split.lm_head.weight = weight  # as in tensor parallel models: some weights only
    for model in (network, split):
        with pytest.raises(
            LoadError, match=r"is sharded over several processes \(DTensor\): save it, and load its path"
        ) as e:
            ft.load(model, None)
        assert "\n" not in str(e.value)
        with pytest.raises(LoadError, match=r"\(DTensor\)"):
            ft.load(new_model("llama"), model)


class Adapted(nn.Module):
    """As PEFT wraps a model: the adapter's settings beside it, and the model's own forward behind ``**kwargs``."""

    def __init__(self, network: Any, **settings: Any) -> None:
        super().__init__()
        self.base_model = network
        self.peft_config = {"default": SimpleNamespace(**settings), "other": SimpleNamespace(is_prompt_learning=True)}
        self.active_adapter = "default"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def test_prompt_tuning_is_refused_and_other_adapters_run(expected: list[int]) -> None:
    for kind in ("PROMPT_TUNING", "PREFIX_TUNING"):
        network = Adapted(new_model("llama"), is_prompt_learning=True, peft_type=kind)
        with pytest.raises(LoadError, match=rf"Adapted prepends learned rows to every sequence \({kind}\)"):
            ft.load(network, None)
    assert written(Adapted(new_model("llama"), is_prompt_learning=False, peft_type="LORA")) == expected


def test_learnt_rows_within_the_attention_run_with_the_model_that_has_them() -> None:
    network = Adapted(new_model("llama"), is_prompt_learning=False, peft_type="ADAPTION_PROMPT")
    with pytest.raises(
        LoadError, match=r"Adapted wraps a model whose attention has learned rows .*its get_base_model\(\)"
    ):
        ft.load(network, None)
    del network.active_adapter
    network._active_adapter = "default"  # PEFT's AdaptionPromptModel itself, whose name for it this is
    with pytest.raises(LoadError, match=r"its get_base_model\(\)"):
        ft.load(network, None)


def test_a_model_within_which_adapters_are(expected: list[int]) -> None:
    """``get_base_model()`` of a PEFT model gives such a model: Transformers' ``active_adapters()`` fails on it."""
    network = new_model("llama")
    network.peft_config = {"default": SimpleNamespace(is_prompt_learning=False, peft_type="LORA")}
    with pytest.raises((ValueError, ImportError)):  # no adapter that it has loaded, or no PEFT that it knows
        network.active_adapters()
    assert written(network) == expected


class Pipeline:
    def __init__(self) -> None:
        self.model, self.tokenizer = new_model("llama"), None


class Words:
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "no model was given"),
        ("", "the name of the model is empty"),
        (LlamaConfig(), "a LlamaConfig has no weights: give the model"),
        (Words(), "a Words is a tokenizer: give it as tokenizer="),
        (Pipeline(), r"a Pipeline is not a model, but has one: give its \.model"),
        ({"weight": torch.zeros(1)}, "a dict of weights or settings is not a model"),
        (LlamaForCausalLM, r"LlamaForCausalLM is a class: give LlamaForCausalLM\.from_pretrained"),
        (3, "an int is not a model: give the path"),
        (nn.Linear(2, 2), "a Linear is not a Transformers model"),
    ],
)
def test_what_is_no_model(model: Any, words: str) -> None:
    with pytest.raises(LoadError, match=words) as caught:
        ft.load(model, None)
    assert "\n" not in str(caught.value)


def test_models_of_other_tasks() -> None:
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, num_attention_heads=2)
    for network in (LlamaForSequenceClassification(config), LlamaForCausalLM(config).model):
        with pytest.raises(CapabilityError, match=f"^{type(network).__name__} does not return logits for every token"):
            ft.load(network, None)
    with pytest.raises(LoadError, match="T5Model has no vocabulary projection: give the model for conditional"):
        ft.load(T5Model(T5Config(vocab_size=64, d_model=16, num_layers=1, d_ff=16)), None)
