"""Sampling defaults of ``generation_config.json``, and the tokens that end an answer."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import foretoken as ft
from foretoken.core.conversation import turn_ends
from foretoken.loading import LoadError
from foretoken.loading.generation_defaults import GenerationDefaults, read_defaults

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from tiny_tokenizer import chat_tokenizer, eos, tokenizer

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny chat model."""
    size = len(tokenizer())
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def configure(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_requests_take_what_they_leave_out(folder: Path) -> None:
    llm = ft.load(configure(folder, **SAMPLING, max_new_tokens=5), drafter="ngram")
    assert llm.defaults.sampling == {k: v for k, v in SAMPLING.items() if k != "do_sample"} | {"max_new_tokens": 5}
    assert str(llm.defaults) == (
        "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.1, max_new_tokens 5 from generation_config.json"
    )
    params = llm.request("return n").params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.7, 20, 0.8, 1.1)
    params = llm.request("return n", temperature=0.0, top_p=1.0).params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 1.0)
    out = llm.generate("return n", seed=3, ignore_eos=True)
    assert len(out.token_ids) == 5 and out.seed == 3
    assert len(llm.generate("return n", n=2)) == 2, "sampling is on, so there may be several"
    assert llm.plain.defaults == llm.defaults


def test_without_them_everything_is_greedy(folder: Path) -> None:
    llm = ft.load(configure(folder, **SAMPLING), drafter=None, generation_config=None)
    assert llm.defaults == GenerationDefaults() and str(llm.defaults) == ""
    assert llm.request("return n").params.temperature == 0.0
    with pytest.raises(ValueError, match="generation_config must be 'auto' or None"):
        ft.load(folder, generation_config="vllm")
    (folder / "generation_config.json").unlink()
    assert ft.load(folder, drafter=None).defaults == GenerationDefaults()


@pytest.mark.parametrize(
    ("values", "kept", "warning"),
    [
        (
            {"do_sample": False, "temperature": 0.7},
            {"temperature": 0.0},
            "temperature 0.7, but do_sample is false",
        ),
        (
            {"top_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
            "do_sample is not set",
        ),
        ({"do_sample": True}, {"temperature": 1.0}, ""),
        ({"do_sample": False, "temperature": 1.0, "top_k": None}, {}, ""),
        ({"do_sample": True, "temperature": 0.7, "top_k": -1}, {"temperature": 0.7}, ""),
        ({"temperature": 1.0, "top_k": -1}, {}, ""),
    ],
    ids=str,
)
def test_contradictions_are_said_in_one_line(
    values: dict[str, Any], kept: dict[str, Any], warning: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "foretoken"):
        assert read_defaults(configure(folder, **values)).sampling == kept
    lines = [record.getMessage() for record in caplog.records if record.name == "foretoken"]
    assert len(lines) == bool(warning) and warning in "".join(lines)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 1.5),
        ("top_p", 0),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("min_p", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("do_sample", "yes"),
        ("eos_token_id", "<eos>"),
        ("eos_token_id", [2, None]),
        ("eos_token_id", -1),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: Any, folder: Path) -> None:
    with pytest.raises(LoadError) as refused:
        ft.load(configure(folder, **{"do_sample": True, name: value}))
    text = str(refused.value)
    assert text.startswith(f"{folder / 'generation_config.json'}: {name} is {ascii(value)[:60]}, which is not valid")
    assert "\n" not in text and len(text) < 300


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_file_is_named(text: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(LoadError, match=r"generation_config.json is damaged"):
        read_defaults(folder)


def test_a_model_that_is_handed_in_brings_its_own(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5)
    assert ft.load(model, drafter=None, tokenizer=tokenizer()).defaults.sampling == {"temperature": 0.5}
    wrapped = ft.load(torch.nn.DataParallel(model), drafter=None, tokenizer=tokenizer())
    assert wrapped.defaults.sampling == {"temperature": 0.5}
    assert ft.load(ft.load(folder).target, drafter=None).defaults == GenerationDefaults()
    model.generation_config.temperature = -1.0
    with pytest.raises(LoadError, match=r"LlamaForCausalLM.s generation_config: temperature is -1\.0"):
        ft.load(model, drafter=None, tokenizer=tokenizer())


def test_a_hub_id_and_a_low_rank_update_have_those_of_their_model(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, update = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("update")
    place = cache / "models--org--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots").mkdir()
    (place / "snapshots" / "abc").symlink_to(configure(folder, **SAMPLING))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expected = {name: value for name, value in SAMPLING.items() if name != "do_sample"}
    assert read_defaults("org/name").sampling == expected
    with pytest.raises(LoadError, match="org/other is neither a folder here"):
        read_defaults("org/other")
    (update / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2, "lora_alpha": 2})
    )
    assert read_defaults(update).sampling == expected


NEUTRAL = {
    "num_beams": 1, "guidance_scale": 1.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "min_length": 0, "bad_words_ids": None, "suppress_tokens": [], "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "min_new_tokens": 0, "token_healing": False, "length_penalty": 1.0, "max_length": 20, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"no_repeat_ngram_size": 2, "suppress_tokens": [3, 4]}, "no_repeat_ngram_size 2, suppress_tokens [3, 4]"),
        ({"num_beams": 3, "forced_eos_token_id": 0}, "num_beams 3, forced_eos_token_id 0"),
        ({"do_sample": True, "typical_p": 0.2, "epsilon_cutoff": 0.1}, "typical_p 0.2, epsilon_cutoff 0.1"),
        ({"bad_words_ids": [[5]], "sequence_bias": [[[4], 5.0]]}, "bad_words_ids [[5]], sequence_bias [[[4], 5.0]]"),
        ({"typical_p": 0.2, "epsilon_cutoff": 0.1}, ""),
        (NEUTRAL, ""),
        ({"do_sample": True, **NEUTRAL}, ""),
    ],
    ids=str,
)
def test_what_generate_would_do_and_we_do_not_is_said_in_one_line(
    values: dict[str, Any], named: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    for name, value in values.items():
        setattr(model.generation_config, name, value)
    for source in (configure(folder, **values), model):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "foretoken"):
            ft.load(source, drafter=None, tokenizer=tokenizer())
        lines = [record.getMessage() for record in caplog.records if record.name == "foretoken"]
        assert len(lines) == bool(named)
        assert not named or f" has {named}, not applied here: pass logits_processor=[...]" in lines[0]


def test_fewest_new_tokens_are_those_of_generate(folder: Path) -> None:
    llm = ft.load(configure(folder, min_new_tokens=6), drafter="ngram")
    assert str(llm.defaults) == "min_tokens 6 from generation_config.json"
    assert llm.request("return n").min_tokens == 6
    assert llm.request("return n", min_tokens=0).min_tokens == 0
    assert llm.request("return n", max_new_tokens=4).min_tokens == 4, "generate stops at its limit, too"
    assert len(llm.generate("return n", max_new_tokens=4).token_ids) == 4
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        llm.generate("return n", max_new_tokens="4")  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="min_new_tokens is -1, which is not valid"):
        ft.load(configure(folder, min_new_tokens=-1))


def test_the_models_own_limit_is_cut_to_its_context(folder: Path) -> None:
    llm = ft.load(configure(folder, max_new_tokens=100_000), drafter=None)
    room = llm.target.context_length - len(llm.encode("return n"))
    assert llm.request("return n").max_new_tokens == room < 100_000
    assert str(llm.defaults) == "max_new_tokens 100000 from generation_config.json"
    with pytest.raises(ValueError, match=f"at most {room} of"):
        llm.generate("return n", max_new_tokens=100_000)


# -- GGUF files --------------------------------------------------------------------------------------------------------


def gguf_file(folder: Path, **sampling: Any) -> Path:
    pytest.importorskip("gguf", reason="gguf writes the file (pip install 'foretoken[gguf]')")
    from gguf_writer import write_model

    def state(header: dict[str, Any], tensors: Any) -> None:
        header.update({f"general.sampling.{name}": value for name, value in sampling.items()})

    return write_model(folder / "m.gguf", LlamaForCausalLM.from_pretrained(folder).float(), change=state)


@pytest.mark.parametrize(
    ("stated", "kept", "named"),
    [
        ({}, {}, ""),
        ({"temp": 0.8, "top_p": 0.95}, {"temperature": 0.8, "top_p": 0.95}, ""),
        (
            {"top_k": 20, "min_p": 0.05, "penalty_repeat": 1.1},
            {"temperature": 1.0, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1},
            "",
        ),
        ({"penalty_repeat": 1.1, "penalty_last_n": 64}, {"repetition_penalty": 1.1}, "penalty_last_n 64"),
        ({"penalty_repeat": 1.1, "penalty_last_n": 0, "mirostat": 0, "mirostat_tau": 5.0}, {}, ""),
        (
            {"mirostat": 2, "mirostat_tau": 5.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
            {},
            "xtc_probability 0.5, xtc_threshold 0.1, mirostat 2, mirostat_tau 5.0",
        ),
    ],
    ids=str,
)
def test_a_gguf_file_brings_its_own(
    stated: dict[str, Any], kept: dict[str, Any], named: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = gguf_file(folder, **stated)
    with caplog.at_level(logging.WARNING, "foretoken"):
        llm = ft.load(file, drafter=None)
    assert llm.defaults.sampling == kept
    assert llm.defaults.source == ("the GGUF file" if kept else "")
    lines = [line for line in caplog.messages if "not applied here" in line]
    assert len(lines) == bool(named)
    assert not named or lines[0].startswith(f"{file} has {named}, not applied here: pass logits_processor=[...]")
    assert ft.load(file, drafter=None, generation_config=None).defaults == GenerationDefaults()


def test_an_impossible_value_in_a_gguf_file_is_refused_by_name(folder: Path) -> None:
    file = gguf_file(folder, temp=-1.0)
    with pytest.raises(LoadError, match=r"m\.gguf: temperature is -1.0, which is not valid: .*generation_config=None"):
        ft.load(file, drafter=None)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(LoadError, match=r"m\.gguf is cut off or damaged"):
        ft.load(file, drafter=None)


# -- ends of turn ------------------------------------------------------------------------------------------------------


def with_turns() -> Any:
    """A tokenizer whose template ends turns with a token of its own, which no configuration names."""
    tokens = chat_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<turn_end>"]})
    tokens.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<turn_end>\n{% endfor %}"
    return tokens


def test_the_templates_end_of_turn_ends_an_answer(folder: Path) -> None:
    tokens = with_turns()
    end = tokens.convert_tokens_to_ids("<turn_end>")
    assert turn_ends(tokens) == {end, eos()}
    assert turn_ends(tokenizer()) == frozenset() and turn_ends(None) == frozenset()
    broken = with_turns()
    broken.chat_template = "{{ raise_exception('no') }}"
    assert turn_ends(broken) == {eos()}
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokens))
    llm = ft.load(model, drafter=None, tokenizer=tokens)
    assert llm.target.eos_token_ids >= {1, end, eos()}


def test_every_end_of_text_of_the_file_ends_a_text(folder: Path) -> None:
    llm = ft.load(configure(folder, eos_token_id=[3, 5]), drafter=None)
    assert llm.target.eos_token_ids >= {3, 5}


def test_a_second_end_of_text_ends_an_answer(folder: Path) -> None:
    """Chat models end turns with ``<|im_end|>``, and sometimes a whole text with ``<|endoftext|>``."""
    tokens = tokenizer()
    tokens = type(tokens)(tokenizer_object=tokens.backend_tokenizer, eos_token="<eos>")
    tokens.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    end = tokens.convert_tokens_to_ids("<|endoftext|>")
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)  # new rows of the vocabulary are drawn; some would write the other end in the last place
    model.resize_token_embeddings(len(tokens))
    prompt = "return n"
    plain = ft.load(model, drafter=None, tokenizer=tokens).generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids
    first = plain.index(plain[3])
    with torch.no_grad():  # what was the likeliest token there is now the end of the text
        model.lm_head.weight[[end, plain[3]]] = model.lm_head.weight[[plain[3], end]]
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()  # of a model with a template the tokenizer's names of ends count as well
    for ends, length in (([1], 8), ([1, end], first + 1)):
        llm = ft.load(configure(folder, eos_token_id=ends), drafter="ngram")
        out = llm.generate(prompt, max_new_tokens=8)
        assert (len(out.token_ids), out.token_ids[first]) == (length, end)
        assert out.finish_reason == ("eos" if end in ends else "length")
        assert "<|endoftext|>" not in out.text
        ids = torch.tensor([llm.encode(prompt)])
        expected = AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=8, do_sample=False)
        assert expected[0, ids.shape[1] :].tolist() == out.token_ids


def test_the_hook_takes_what_generate_passes_alone(folder: Path) -> None:
    """``generate`` has merged the model's own options already: options that it left out are not filled in again."""
    model = LlamaForCausalLM.from_pretrained(configure(folder, **SAMPLING, max_new_tokens=5))
    hook = ft.CustomGenerate(drafter="ngram")
    assert hook.llm(model).defaults == GenerationDefaults()
    ids = torch.tensor([tokenizer()("return n")["input_ids"]])
    options = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 9}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, custom_generate=hook))
