"""Encoder-decoder targets: the encoder reads the prompt once, and drafts of the answer change nothing but the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seq2seq import PROMPTS, SHAPE, VOCAB, by_transformers, t5
from torch import Tensor
from transformers import (
    LongT5Config,
    LongT5ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MT5Config,
    MT5ForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

import foretoken as ft
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.lab.parity.report import Settings
from foretoken.lab.parity.run import run_parity
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.encoder_decoder import EncoderDecoderModel
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch

NEW = 20
TREES = ("recycling", "model,tree=3x2x1")
CHAINS = ("ngram,k=4", "suffix,k=4", "jacobi", "model,k=3", "sam", "ngram_cache", "lookahead")


@pytest.fixture(scope="module")
def network() -> Any:
    return t5()


@pytest.fixture(scope="module")
def target(network: Any) -> EncoderDecoderModel:
    model = wrap(network)
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with other weights in its decoder's last layer: a draft that is often right."""
    model, folder = t5(), tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        for weight in model.decoder.block[-1].parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(target: EncoderDecoderModel) -> list[list[int]]:
    return written(target, None)


def written(target: Any, drafter: Any, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    llm = ft.load(target, drafter, **{"controller": "constant"} if drafter is not None else {})
    outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, **options)
    return [list(output.token_ids) for output in outputs]


def named(spec: str, draft: Path) -> str:
    return spec.replace("model", f"model:{draft}")


def test_plain_text_is_that_of_transformers_and_depends_on_the_prompt(network: Any, plain: list[list[int]]) -> None:
    assert plain == [by_transformers(network, prompt, NEW) for prompt in PROMPTS]
    assert len({tuple(text) for text in plain}) == len(PROMPTS)
    assert min(len(set(text)) for text in plain) > 3  # not one token again and again


@pytest.mark.parametrize("spec", [*CHAINS, *TREES])
def test_drafts_change_no_greedy_text(
    target: EncoderDecoderModel, draft: Path, plain: list[list[int]], spec: str
) -> None:
    assert written(target, named(spec, draft)) == plain
    assert [written(target, named(spec, draft), [prompt])[0] for prompt in PROMPTS] == plain
    assert not target.pool.sequences


@pytest.mark.parametrize("spec", ["ngram,k=4", "model,k=3", "model,tree=3x2x1"])
def test_drafts_change_no_seeded_text(target: EncoderDecoderModel, draft: Path, spec: str) -> None:
    options = {"temperature": 1.0, "top_k": 20, "seed": [3, 4, 5]}
    assert written(target, named(spec, draft), **options) == written(target, None, **options)


def test_right_and_wrong_drafts_are_told_apart(target: EncoderDecoderModel, plain: list[list[int]]) -> None:
    script = [token if i % 3 != 2 else (token + 1) % VOCAB for i, token in enumerate(plain[0])]
    llm = ft.load(target, ScriptedDrafter(as_output=True, script=script), controller="constant,k=4")
    output = llm.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
    assert list(output.token_ids) == plain[0]
    assert output.stats.num_accepted_tokens == 13 and output.stats.num_drafts == 7


def test_a_draft_model_reads_the_same_input(target: EncoderDecoderModel, draft: Path) -> None:
    """The target's own network agrees always, which it could not without the prompt."""
    llm = ft.load(target, target.model, controller="constant,k=4")
    assert llm.generate(PROMPTS[2], max_new_tokens=NEW, ignore_eos=True).stats.acceptance_rate == 1.0
    llm = ft.load(target, f"model:{draft},k=4", controller="constant")
    assert llm.generate(PROMPTS[2], max_new_tokens=NEW, ignore_eos=True).stats.acceptance_rate > 0.3


def test_ngrams_are_found_in_what_the_encoder_reads(target: EncoderDecoderModel, plain: list[list[int]]) -> None:
    """The prompt holds the answer: after its first tokens the rest is copied from there."""
    prompt = [*plain[0], 2]
    (answer,) = written(target, None, [prompt])
    llm = ft.load(target, NgramDrafter(n=2, k=4), controller="constant")
    copied = llm.generate([*answer, 2], max_new_tokens=3, ignore_eos=True)
    assert list(copied.token_ids) == written(target, None, [[*answer, 2]])[0][:3]
    tree = NgramDrafter(n=1, k=3)
    drafts = _proposed(target, tree, [5, 6, 7, 8], [6])
    assert drafts == [7, 8, 0]  # behind the input comes what the decoder begins with


def _proposed(target: EncoderDecoderModel, drafter: NgramDrafter, prompt: list[int], output: list[int]) -> list[int]:
    from foretoken.core import Budget, Context, Rng
    from foretoken.core.sampling import Sampler, SamplingParams

    tokens = [*prompt, *target.answer_start, *output]
    context = Context(1, tokens, len(tokens) - len(output), Sampler(SamplingParams()), Rng(0))
    drafter.start(context)
    return list(drafter.propose(context, Budget(3, 3)).tokens[1:])


# -- the protocol ----------------------------------------------------------------------------------------------------


def fresh(target: EncoderDecoderModel, prompt: list[int], answer: list[int]) -> Tensor:
    """[V] logits by the network's own forward, without a cache."""
    begun = torch.tensor([[*target.answer_start, *answer]])
    return target.model(input_ids=torch.tensor([prompt]), decoder_input_ids=begun, use_cache=False).logits[0, -1]


@torch.inference_mode()
def test_committed_paths_of_trees_are_the_text_read_afresh(target: EncoderDecoderModel) -> None:
    """Positions are depths, and rows of a batch begin at unequal slots; one of them ends, and another moves."""
    sequences = [target.open() for _ in PROMPTS]
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        target.prefill(sequence, prompt)
    feed = [0, 7, 9, 12, 9]
    for path, places in (((0, 1, 3), (0, 1, 2)), ((0, 2), (0, 2)), ((0, 1, 4), (2, 1))):
        target.forward([Feed(sequences[i], feed, [-1, 0, 0, 1, 1]) for i in places])
        for i in places:
            target.commit(sequences[i], path)
            texts[i] += [feed[node] for node in path]
        feed = [5, 8, 2, 6, 30]
    rows = target.forward([Feed(sequence, [4]) for sequence in sequences])
    for row, prompt, text in zip(rows, PROMPTS, texts, strict=True):
        torch.testing.assert_close(row.logits[0], fresh(target, prompt, [*text[1:], 4]))
    for sequence in sequences:
        target.commit(sequence, ())
    target.release(sequences[0])  # the last row takes its place
    target.rewind(sequences[2], len(PROMPTS[2]) + 2)
    again = target.forward([Feed(sequences[2], [6], wanted=1), Feed(sequences[1], [4])])
    torch.testing.assert_close(again[0].logits[0], fresh(target, PROMPTS[2], [*texts[2][1:2], 6]))
    torch.testing.assert_close(again[1].logits[0], fresh(target, PROMPTS[1], [*texts[1][1:], 4]))
    for sequence in sequences[1:]:
        target.release(sequence)
    assert target.kv_bytes == 0 and target.kv_peak_bytes > 0


def counted(network: Any, calls: dict[str, int]) -> list[Any]:
    """Count forwards of the encoder, and of the projection of cross-attention's keys."""

    def counter(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[name] = calls.get(name, 0) + 1

        return count

    keys = network.decoder.block[0].layer[1].EncDecAttention.k
    return [
        network.encoder.register_forward_hook(counter("encoder")),
        keys.register_forward_hook(counter("keys")),
    ]


@pytest.mark.parametrize("chunk", [None, 4])
def test_an_input_is_read_once(network: Any, plain: list[list[int]], chunk: int | None) -> None:
    """Whatever the rounds, and whether or not the prompt comes in pieces."""
    calls: dict[str, int] = {}
    hooks = counted(network, calls)
    try:
        target = wrap(network)
        calls.clear()
        engine = Engine(target, NgramDrafter(k=3), None, ConstantController(), prefill_chunk=chunk)
        for prompt, count in zip(PROMPTS, (NEW, 3, NEW - 5), strict=True):  # they end one after the other
            engine.add(Request(prompt, max_new_tokens=count, ignore_eos=True))
        texts: dict[int, list[int]] = {}
        while engine.busy:
            for run, emission in engine.step():
                texts.setdefault(run.id, []).extend(emission.token_ids)
    finally:
        for hook in hooks:
            hook.remove()
    assert [texts[i + 1] for i in range(3)] == [plain[0], plain[1][:3], plain[2][: NEW - 5]]
    assert calls == {"encoder": len(PROMPTS), "keys": len(PROMPTS)}


def test_penalties_and_processors_see_the_answer_alone(network: Any, target: EncoderDecoderModel) -> None:
    """As in Transformers, the encoder's input is not penalised."""
    (answer,) = written(target, "ngram,k=3", PROMPTS[:1], repetition_penalty=1.7)
    assert answer == by_transformers(network, PROMPTS[0], NEW, repetition_penalty=1.7)
    lengths: list[int] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        assert ids[0, 0] == 0
        return scores

    written(target, None, PROMPTS[:1], logits_processor=[note])
    assert sorted(set(lengths)) == list(range(1, NEW + 1))


def test_parity_holds_on_it(target: EncoderDecoderModel, draft: Path) -> None:
    """Greedy, seeded and sampled text, stops and batches, as users check them."""
    settings = Settings(max_new_tokens=6, samples=24, controller="constant")
    report = run_parity(target, None, ["ngram,k=3", f"model:{draft},k=2"], PROMPTS[:2], settings)
    assert report.passed, [check.notes for check in report.checks]
    assert {check.mode for check in report.checks} >= {"greedy", "seed", "transformers", "batch", "sampled"}


# -- heads -----------------------------------------------------------------------------------------------------------


def trained(method: str, target: EncoderDecoderModel, steps: int = 40) -> Any:
    """A head that has learned from the decoder's states over random texts."""
    recipe = find_recipe(method)(target, TargetParts(target), {}, seed=1)
    texts = torch.randint(2, VOCAB, (steps, 4, 25), generator=torch.Generator().manual_seed(1))
    recipe.prepare(texts.flatten().numpy())
    recipe.parts.network.requires_grad_(False)
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=1e-2)
    for step, tokens in enumerate(texts):
        with torch.enable_grad():
            features = recipe.parts.features(tokens[:, :-1], recipe.taps)
            recipe.loss(
                Batch(tokens, features, recipe.parts, step, steps), torch.Generator().manual_seed(step)
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return recipe.drafter({})


@pytest.mark.parametrize("method", ["medusa", "hydra", "bpd", "eagle", "eagle3"])
def test_heads_on_the_decoder_draft(target: EncoderDecoderModel, plain: list[list[int]], method: str) -> None:
    drafter = trained(method, target)
    llm = ft.load(target, drafter, controller="constant")
    outputs = llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == plain
    assert sum(output.stats.num_draft_tokens for output in outputs) > 0
    options = {"temperature": 1.0, "seed": [1, 2, 3]}
    assert written(target, drafter, **options) == written(target, None, **options)


@torch.inference_mode()
def test_states_of_texts_are_those_of_the_decoder(target: EncoderDecoderModel) -> None:
    """A text is the answer to its own first half."""
    tokens = torch.tensor([[3, 9, 14, 20, 5, 6]])
    states = TargetParts(target).features(tokens, ("last", "layer:0"))
    parts = TargetParts(target)
    logits = parts.logits(states["last"])
    torch.testing.assert_close(logits[0, -1], fresh(target, [3, 9, 14], tokens[0].tolist()))
    torch.testing.assert_close(states["layer:0"], parts.embedding(tokens))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "model"), [(MT5Config, MT5ForConditionalGeneration), (LongT5Config, LongT5ForConditionalGeneration)]
)
def test_kin_of_t5(config: Any, model: Any) -> None:
    network = t5(config=config, model=model)
    target = wrap(network)
    assert written(target, "ngram,k=4") == [by_transformers(network, prompt, NEW) for prompt in PROMPTS]


def test_other_families_are_refused_in_one_line(network: Any) -> None:
    for config, model in ((UMT5Config, UMT5ForConditionalGeneration), (MarianConfig, MarianMTModel)):
        shape = {**SHAPE, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                 "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32}  # fmt: skip
        with pytest.raises(CapabilityError, match="without a relative position bias shared by all layers") as error:
            wrap(model(config(**shape)))
        assert "\n" not in str(error.value)
    with pytest.raises(CapabilityError, match="switch_transformers: its experts drop tokens beyond a capacity"):
        wrap(t5(config=SwitchTransformersConfig, model=SwitchTransformersForConditionalGeneration))
    without = t5(decoder_start_token_id=None, num_layers=1, num_decoder_layers=1)
    without.generation_config.decoder_start_token_id = None
    with pytest.raises(CapabilityError, match=r"t5: config\.json has no decoder_start_token_id"):
        wrap(without)


def test_a_forward_that_says_something_else_is_refused(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose positions were read in another way would be decoded wrongly without a word."""
    layer = network.decoder.block[0].layer[0].SelfAttention
    monkeypatch.setattr(layer, "compute_bias", lambda *a, **k: type(layer).compute_bias(layer, *a, **k) * 1.5 + 1 / 3
                        if k.get("past_seen_tokens") else type(layer).compute_bias(layer, *a, **k))  # fmt: skip
    with pytest.raises(CapabilityError, match="t5 cannot be decoded here: its logits of a tree differ from those of"):
        EncoderDecoderModel(network)


def test_what_needs_more_than_a_decoder_is_refused(target: EncoderDecoderModel) -> None:
    for spec in ("layer_skip", "sparse_kv", "swift"):
        with pytest.raises(CapabilityError):
            ft.load(target, spec)
    with pytest.raises(ValueError, match="prompt_logprobs: an encoder reads the prompt"):
        ft.load(target, None).generate(PROMPTS[0], prompt_logprobs=1, max_new_tokens=2)
    with pytest.raises(CapabilityError, match="a draft model with an encoder needs a target with an encoder"):
        target.open_beside(None)
    sequence = target.open()
    with pytest.raises(ValueError, match="an encoder's input is read by prefill"):
        target.forward([Feed(sequence, [0])])
    target.release(sequence)


def test_a_draft_with_an_encoder_does_not_learn(target: EncoderDecoderModel, draft: Path) -> None:
    with pytest.raises(CapabilityError, match=r"weights of a decoder-only .*is run as EncoderDecoderModel"):
        ft.load(target, f"online:{draft}")


def test_a_folder_loads_with_its_encoder(network: Any, plain: list[list[int]], tmp_path: Path) -> None:
    network.save_pretrained(tmp_path)
    llm = ft.load(tmp_path)  # float64, as it was saved; n-grams
    assert llm.drafter is not None
    outputs = llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == plain
    assert llm.describe()["forward"] == "public" and llm.memory()["kv_bytes_per_token"] == 2 * 2 * 4 * 8 * 8


def test_an_answer_begins_with_the_start_token_whatever_the_file_that_names_it() -> None:
    network = t5()
    network.config.forced_bos_token_id, network.config.decoder_start_token_id = 5, None
    network.generation_config.decoder_start_token_id = 7
    assert wrap(network).answer_start == (7, 5)
    network.generation_config.forced_bos_token_id = 6
    assert wrap(network).answer_start == (7, 6), "the generation's configuration takes precedence"


def test_a_changed_network_is_noticed(plain: list[list[int]]) -> None:
    model = t5()
    llm = ft.load(wrap(model), "ngram,k=3", controller="constant")
    assert list(llm.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True).token_ids) == plain[0]
    with torch.no_grad():
        model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(-1)
    output = llm.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
    assert list(output.token_ids) == by_transformers(model, PROMPTS[0], NEW) != plain[0]
