"""Inputs of ``model.generate`` beside token ids: each has its effect with the hook, or is refused by its name."""

from __future__ import annotations

import logging
import threading
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TextIteratorStreamer
from transformers.generation.stopping_criteria import StopStringCriteria

import foretoken as ft
from foretoken.loading import load_tokenizer
from test_hub import MASK, ONE, THREE, both, llama

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(eos=None)


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer whose words are ``w0`` to ``w23``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(24)}, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def ours(model: Any, ids: torch.Tensor = ONE, **options: Any) -> Any:
    return model.generate(ids, custom_generate=ft.custom_generate, **{"drafter": "ngram", **GREEDY, **options})


def test_a_cache_of_the_caller_is_refused(model: Any) -> None:
    for name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match=r"cache= \(it keeps its own cache: pass all token ids"):
            ours(model, **{name: DynamicCache()})
    cache = DynamicCache()
    model(ONE[:, :3], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="pass all token ids"):
        ours(model, ONE, attention_mask=torch.ones(1, 5), cache=cache)


def test_positions_that_count_the_tokens_may_be_given(model: Any) -> None:
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    plain, output = both(model, THREE, attention_mask=MASK, position_ids=positions)
    assert torch.equal(plain, output)
    plain, output = both(model, ONE, position_ids=torch.arange(5)[None], num_return_sequences=1)
    assert torch.equal(plain, output)


@pytest.mark.parametrize("positions", [[[0, 3, 6, 9, 12]], [[1, 2, 3, 4, 5]]])
def test_other_positions_are_refused(model: Any, positions: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="position_ids= that do not count the tokens from 0"):
        ours(model, position_ids=torch.tensor(positions))


def test_embeddings_are_refused_beside_ids_and_alone(model: Any) -> None:
    embeddings = model.get_input_embeddings()(ONE.flip(1))
    with pytest.raises(ValueError, match="inputs_embeds="):
        ours(model, inputs_embeds=embeddings)
    with pytest.raises(ValueError, match="inputs_embeds="):
        model.generate(inputs_embeds=embeddings, custom_generate=ft.custom_generate, **GREEDY)


def test_whatever_else_the_forward_takes_is_refused_by_name() -> None:
    config = GPT2Config(
        vocab_size=24, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=None
    )
    gpt2 = GPT2LMHeadModel(config).eval()
    for name, value in (("token_type_ids", torch.ones_like(ONE)), ("encoder_hidden_states", torch.zeros(1, 5, 16))):
        with pytest.raises(ValueError, match=f"{name}=: leave it out of this call"):
            ours(gpt2, **{name: value})
    plain, output = both(gpt2, ONE, token_type_ids=None, **GREEDY)
    assert torch.equal(plain, output)


def test_quantized_caches_and_assistants_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="assistant_model"):
        ours(model, assistant_model=llama(seed=1))
    from foretoken.loading.hub_inputs import check_supported

    config = SimpleNamespace(num_beams=1, cache_implementation="quantized", return_dict_in_generate=False)
    with pytest.raises(ValueError, match="cache_implementation='quantized'"):
        check_supported(model, ONE, config, (), False, {}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dola_layers": "high"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"contrastive search \(penalty_alpha with top_k\)"),
        ({"force_words_ids": [[4]]}, r"constrained beam search \(force_words_ids, constraints\)"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, r'prompt_lookup_num_tokens \(pass drafter="ngram"\)'),
        ({"assistant_early_exit": 1}, r'assistant_early_exit \(pass drafter="early_exit"\)'),
        ({"use_mtp": True}, r'use_mtp \(pass drafter="mtp"\)'),
    ],
    ids=lambda options: next(iter(options)) if isinstance(options, dict) else "",
)
def test_other_decoding_methods_are_refused_by_name(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"custom_generate does not support {words}.*: leave it out of this call"):
        ours(model, **options)


def test_how_a_model_would_speculate_by_itself_is_no_obstacle() -> None:
    """The folders that we export for early exits say so in their generation_config.json."""
    model = llama(eos=None)
    expected = model.generate(ONE, **GREEDY)
    model.generation_config.assistant_early_exit = 1
    assert torch.equal(ours(model), expected)
    assert torch.equal(
        ours(model, penalty_alpha=0.6, top_k=4, do_sample=True, seed=1), ours(model, top_k=4, do_sample=True, seed=1)
    )


def test_a_cache_that_is_not_offloaded_is_said(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foretoken"):
        output = ours(model, cache_implementation="offloaded_static")
    assert torch.equal(output, model.generate(ONE, **GREEDY))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "foretoken"]
    assert "cache_implementation='offloaded_static' has no effect" in line


class PeftModelForCausalLM:
    """The parts of PEFT's class that its ``generate`` uses for prompt learning."""

    def __init__(self, base: Any, is_prompt_learning: bool) -> None:
        self.base_model = base
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning, peft_type="PREFIX_TUNING")
        self.original = base.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base_model.generate(*args, **kwargs)
        finally:
            self.base_model.prepare_inputs_for_generation = self.original


def test_trained_prompts_of_peft_are_refused_and_its_base_model_goes_on() -> None:
    base = llama()
    tuned = PeftModelForCausalLM(base, is_prompt_learning=True)
    with pytest.raises(ValueError, match="PEFT's prefix tuning, whose trained prompt it would leave out"):
        tuned.generate(ONE, custom_generate=ft.custom_generate, **GREEDY)
    plain, output = both(base, ONE)
    assert torch.equal(plain, output)


def test_adapters_of_their_own_for_every_row_are_refused() -> None:
    """PEFT's ``adapter_names=`` arrives as hooks, which it leaves on the model when an error passes."""
    model = llama(eos=None)
    expected = model.generate(ONE, max_new_tokens=4, do_sample=False)

    def _adapter_names_pre_forward_hook(target: Any, args: Any, kwargs: Any, adapter_names: list[str]) -> Any:
        raise AssertionError(f"rows of a call that is over: {adapter_names}")

    for module in model.model.layers:
        hook = partial(_adapter_names_pre_forward_hook, adapter_names=["one", "two"])
        module.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(ValueError, match=r"does not support PEFT's adapter_names= .*leave it out") as caught:
        model.generate(ONE, max_new_tokens=4, do_sample=False, custom_generate=ft.custom_generate)
    assert "\n" not in str(caught.value)
    for more in ({}, {"custom_generate": ft.custom_generate, "drafter": "ngram"}):
        assert torch.equal(model.generate(ONE, max_new_tokens=4, do_sample=False, **more), expected)


def test_a_prepare_inputs_of_the_callers_is_refused() -> None:
    model = llama()
    honest = type(model).prepare_inputs_for_generation
    model.prepare_inputs_for_generation = MethodType(  # type: ignore[method-assign]
        lambda self, ids, **kwargs: honest(self, ids.flip(1), **kwargs), model
    )
    with pytest.raises(ValueError, match="a prepare_inputs_for_generation that was set on the model"):
        ours(model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "LoraConfig"])
def test_peft_itself(kind: str) -> None:
    peft: Any = pytest.importorskip("peft", reason="PEFT is not a dependency; the test above has its structure")
    options = {"r": 4, "target_modules": ["q_proj"]} if kind == "LoraConfig" else {"num_virtual_tokens": 3}
    torch.manual_seed(0)
    tuned = peft.get_peft_model(llama(eos=None), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()
    if kind == "LoraConfig":
        with torch.no_grad():
            for name, weight in tuned.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
        plain = tuned.generate(input_ids=ONE, **GREEDY)
        assert torch.equal(tuned.generate(input_ids=ONE, custom_generate=ft.custom_generate, **GREEDY), plain)
        return
    with pytest.raises(ValueError, match=r"PEFT's .* tuning"):
        tuned.generate(input_ids=ONE, custom_generate=ft.custom_generate, **GREEDY)


# -- streamers and stop strings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["streamer", "token_streamer"])
@pytest.mark.parametrize("skip_prompt", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_text_iterators_show_the_text_and_end(model: Any, words: Any, name: str, skip_prompt: bool, kept: bool) -> None:
    streamer = TextIteratorStreamer(words, skip_prompt=skip_prompt, timeout=20)
    generate = ft.CustomGenerate(drafter="ngram") if kept else ft.custom_generate
    options = {**GREEDY, name: streamer}
    thread = threading.Thread(target=model.generate, args=(ONE,), kwargs={"custom_generate": generate, **options})
    thread.start()
    shown = "".join(streamer)
    thread.join()
    expected = model.generate(ONE, **GREEDY)[0, 5 if skip_prompt else 0 :]
    assert shown.split() == [f"w{i}" for i in expected.tolist()]


def test_a_streamer_ends_when_something_fails(model: Any, words: Any) -> None:
    streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=20)

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        ours(model, streamer=streamer, logits_processor=[broken])
    assert list(streamer) == [""]


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafter": "nosuch"},
        {"return_dict_in_generate": True, "output_scores": True},
        {"seed": [1, 2]},
        {"prediction": "words"},
        {"dola_layers": "high"},
        {"token_streamer": object()},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@pytest.mark.parametrize("name", ["streamer", "token_streamer"])
def test_a_streamer_ends_when_its_call_is_refused(model: Any, words: Any, wrong: dict[str, Any], name: str) -> None:
    streamer, other = (TextIteratorStreamer(words, skip_prompt=True, timeout=20) for _ in range(2))
    if "token_streamer" in wrong:  # two of them, which is refused, too
        wrong = {"streamer": other, "token_streamer": other}
        wrong[name] = streamer
    with pytest.raises(ValueError, match=r"unknown drafter|does not support|seeds|tokenizer|pass one of them"):
        ours(model, **{name: streamer, **wrong})
    assert list(streamer) == [""]


def test_two_streamers_and_many_rows_are_refused(model: Any, words: Any) -> None:
    first, second = (TextIteratorStreamer(words) for _ in range(2))
    with pytest.raises(ValueError, match="pass one of them"):
        ours(model, streamer=first, token_streamer=second)
    with pytest.raises(ValueError, match="a streamer shows one row"):
        ours(model, THREE, attention_mask=MASK, token_streamer=first)


def test_stop_strings() -> None:
    """Transformers takes ``tokenizer=`` away before it looks for it: a criterion made by the caller reaches us."""
    tokenizer: Any = load_tokenizer("builtin")
    model = llama(vocab=len(tokenizer), eos=None)
    stop = tokenizer.decode(model.generate(ONE, **GREEDY)[0, 11])
    plain = model.generate(ONE, stop_strings=[stop], tokenizer=tokenizer, **GREEDY)
    assert plain.shape[1] < 17
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        ours(model, stop_strings=[stop], tokenizer=tokenizer)
    with pytest.raises(ValueError, match="token healing, you must pass the model's tokenizer"):
        ours(model, token_healing=True, tokenizer=tokenizer)
    assert torch.equal(ours(model, stopping_criteria=[StopStringCriteria(tokenizer, [stop])]), plain)


# -- draft models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target_width", "draft_width"), [(64, 40), (40, 64)])
def test_draft_models_of_another_padded_width(target_width: int, draft_width: int) -> None:
    target, draft = llama(vocab=target_width, eos=None), llama(vocab=draft_width, eos=None, seed=1)
    options: dict[str, Any] = {"custom_generate": ft.custom_generate, "drafter": draft, "controller": "constant,k=3"}
    ids = torch.tensor([[5, target_width - 1, 9, 5, 3]])
    plain = target.generate(ids, max_new_tokens=24)
    output = target.generate(ids, max_new_tokens=24, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, plain) and output.stats[0].num_draft_tokens > 0
    drawn = target.generate(ids, max_new_tokens=24, do_sample=True, num_return_sequences=4, seed=3, **options)
    alone = target.generate(
        ids, max_new_tokens=24, do_sample=True, num_return_sequences=4, seed=3, custom_generate=ft.custom_generate,
        drafter=None,
    )  # fmt: skip
    assert torch.equal(drawn, alone)
