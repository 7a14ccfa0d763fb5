"""``model.generate(..., custom_generate=ft.custom_generate)`` says what ``model.generate`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    TextStreamer,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import foretoken as ft
from foretoken.core import Budget, Context, TokenTree
from foretoken.core.noise import unseeded_from
from foretoken.core.sampling import Sampler
from foretoken.hub import SpeculativeOutput
from foretoken.lab.parity.distribution import chi_square, upper_tail
from foretoken.loading.hub_params import params_of
from foretoken.loading.prepared import ATTRIBUTE
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter

VOCAB = 24
FALSE_ALARM = 1e-4  # of each distribution test; seeds are fixed


def llama(seed: int = 0, vocab: int = VOCAB, eos: int | list[int] | None = 0, noise: float = 0.0) -> LlamaForCausalLM:
    """A random model with clear preferences; ``noise`` moves the weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=eos,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    return llama(noise=0.03)


ONE = torch.tensor([[5, 3, 9, 5, 3]])
THREE = torch.tensor([[0, 0, 0, 7, 4, 2], [3, 8, 8, 3, 8, 1], [0, 11, 12, 13, 11, 12]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


def both(model: Any, ids: torch.Tensor, drafter: Any = "ngram", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' own output and ours."""
    options.setdefault("max_new_tokens", 24)
    plain = model.generate(ids, **options)
    ours = model.generate(ids, **options, custom_generate=ft.custom_generate, drafter=drafter)
    return plain, ours


# -- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["auto", "ngram,n=2,k=4", None, "model", "object", "list"])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_output_is_that_of_generate(model: Any, draft: Any, spec: Any, batch: int) -> None:
    drafters = {"model": draft, "object": NgramDrafter(n=2), "list": ["ngram,n=2", JacobiDrafter(m=3)]}
    drafter = drafters.get(str(spec), spec)
    ids, mask = (ONE, None) if batch == 1 else (THREE, MASK)
    plain, ours = both(model, ids, drafter, attention_mask=mask, do_sample=False)
    assert torch.equal(plain, ours)


def test_a_draft_model_is_really_used(model: Any, draft: Any) -> None:
    how = {"drafter": draft, "controller": "constant"}  # the default one may find that it does not pay
    out = model.generate(
        ONE, max_new_tokens=24, custom_generate=ft.custom_generate, return_dict_in_generate=True, **how
    )
    assert isinstance(out, SpeculativeOutput)
    assert out.stats[0].num_accepted_tokens > 0


def test_a_draft_model_from_disk(model: Any, draft: Any, tmp_path: Path) -> None:
    draft.save_pretrained(tmp_path)
    plain, ours = both(model, ONE, f"model:{tmp_path},k=3")
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("eos", [[3, 17], [17, 9, 20], 8, None])
def test_end_of_text_ids_and_padding(model: Any, eos: Any) -> None:
    plain, ours = both(model, THREE, attention_mask=MASK, eos_token_id=eos, pad_token_id=23)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 14},
        {"max_new_tokens": None},
        {"min_new_tokens": 20, "eos_token_id": [3, 17, 8, 9]},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [8, 3]]},
        {"suppress_tokens": [1, 2, 3, 4, 5, 6]},
        {"begin_suppress_tokens": [8, 9, 20]},
        {"sequence_bias": {(4,): 5.0}},
        {"exponential_decay_length_penalty": (2, 1.5)},
        {"forced_eos_token_id": 6, "max_new_tokens": 9},
        {"generation_config": GenerationConfig(max_new_tokens=10, eos_token_id=0, pad_token_id=0)},
        {"stopping_criteria": [MaxLengthCriteria(9)]},
        {"num_return_sequences": 1, "use_cache": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("padded", [False, True])
def test_every_option_of_generate_keeps_its_meaning(model: Any, options: dict[str, Any], padded: bool) -> None:
    mask = MASK if padded else None
    plain, ours = both(model, THREE, attention_mask=mask, **options)
    assert torch.equal(plain, ours)


def test_prefix_constraints_know_their_row(model: Any) -> None:
    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        return [(int(sent[-1]) + row) % VOCAB, (len(sent) * 3 + row) % VOCAB]

    plain, ours = both(model, THREE, attention_mask=MASK, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(plain, ours)


def test_a_logits_processor_of_the_user(model: Any) -> None:
    class Shift(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.roll(int(input_ids.shape[1]) % 5, -1)

    plain, ours = both(model, THREE, attention_mask=MASK, logits_processor=[Shift()])
    assert torch.equal(plain, ours)


def test_stopping_criteria_of_the_user_cut_the_output_at_their_token(model: Any) -> None:
    class Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return (input_ids[:, -1] % 3 == 1) & (torch.tensor(input_ids.shape[1]) > 8)

    plain, ours = both(model, ONE, stopping_criteria=[Stop()])
    assert torch.equal(plain, ours) and ours.shape[1] < 5 + 24


# -- sampled ---------------------------------------------------------------------------------------------------------


def distribution_of_two(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """[V * V] exact distribution of the next two tokens under Transformers' own processors."""
    config = GenerationConfig(do_sample=True, **options)
    processors = model._get_logits_processor(config, ids.shape[1], device="cpu")
    distributions = []
    with torch.no_grad():
        first = torch.softmax(processors(ids, model(ids).logits[:, -1]), -1)[0]
        for token in range(len(first)):
            longer = torch.cat([ids, torch.tensor([[token]])], 1)
            distributions.append(first[token] * torch.softmax(processors(longer, model(longer).logits[:, -1]), -1)[0])
    return torch.stack(distributions).double().flatten()


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 0, "typical_p": 0.8},
        {"top_k": 5, "repetition_penalty": 2.0},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_sampled_output_has_the_distribution_of_generate(options: dict[str, Any], kind: str) -> None:
    small = llama(seed=3, vocab=5, eos=None)
    drafter = llama(seed=3, vocab=5, noise=0.1, eos=None) if kind == "model" else "ngram,n=1,k=3"
    ids, count = torch.tensor([[2, 4, 2, 1, 2]]), 500
    with unseeded_from(11):
        out = small.generate(
            ids, do_sample=True, max_new_tokens=3, num_return_sequences=count, custom_generate=ft.custom_generate,
            drafter=drafter, **options,
        )  # fmt: skip
    pairs = out[:, 5] * 5 + out[:, 6]
    counts = torch.bincount(pairs, minlength=25)
    assert upper_tail(*chi_square(counts, count * distribution_of_two(small, ids, **options))) > FALSE_ALARM


def test_seeds(model: Any) -> None:
    def sample(**more: Any) -> list[list[int]]:
        out = model.generate(
            THREE, attention_mask=MASK, do_sample=True, max_new_tokens=12, custom_generate=ft.custom_generate, **more
        )
        rows: list[list[int]] = out.tolist()
        return rows

    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    assert sample(seed=[1, 2, 3]) == sample(seed=1)
    torch.manual_seed(7)
    first = sample()
    torch.manual_seed(7)
    assert sample() == first != sample()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_a_seed_gives_the_same_text_with_every_drafter(model: Any, draft: Any, options: dict[str, Any]) -> None:
    def sample(drafter: Any) -> list[list[int]]:
        out = model.generate(
            THREE, attention_mask=MASK, do_sample=True, max_new_tokens=12, custom_generate=ft.custom_generate, seed=8,
            drafter=drafter, **options,
        )  # fmt: skip
        rows: list[list[int]] = out.tolist()
        return rows

    plain = sample(None)
    assert all(sample(drafter) == plain for drafter in ("ngram", draft, "early_exit,layer=1", ["ngram", "jacobi"]))


@pytest.mark.parametrize("kind", [np.int64, np.uint64, torch.tensor], ids=lambda kind: kind.__name__)
def test_seeds_and_predictions_of_numpy_and_torch(model: Any, kind: Any) -> None:
    def sample(**more: Any) -> list[list[int]]:
        out = model.generate(
            THREE, attention_mask=MASK, do_sample=True, max_new_tokens=12, custom_generate=ft.custom_generate, **more
        )
        rows: list[list[int]] = out.tolist()
        return rows

    expected = sample(seed=3)
    assert sample(seed=kind(3)) == expected == sample(seed=[kind(3), kind(4), kind(5)])
    assert sample(seed=np.array([3, 4, 5])) == expected == sample(seed=torch.tensor([3, 4, 5]))
    for prediction in ([kind(8), kind(3)], torch.tensor([8, 3]), np.array([[8], [3], [1]]), [torch.tensor([8])] * 3):
        assert sample(seed=3, prediction=prediction) == expected
    llm = ft.load(model, drafter=None)
    sampled = [llm.generate([5, 3, 9], temperature=1.0, seed=seed, max_new_tokens=6) for seed in (kind(3), 3)]
    assert sampled[0].token_ids == sampled[1].token_ids and type(sampled[0].seed) is int
    request = llm.request([5, 3, 9], temperature=1.0, seed=np.int64(3), max_new_tokens=6)
    (emission,) = llm.calls.finish([request])
    assert emission.seed == 3 and type(emission.seed) is int
    with pytest.raises(ValueError, match="prediction must be a list of token ids, not 3"):
        sample(prediction=kind(3))


@pytest.mark.parametrize("seed", [1.5, np.float64(2), True, "3", torch.tensor([1.0])], ids=str)
def test_what_is_no_seed(model: Any, seed: Any) -> None:
    with pytest.raises(ValueError, match="a seed must be an integer"):
        model.generate(ONE, do_sample=True, max_new_tokens=2, custom_generate=ft.custom_generate, seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**64, [1, 2], [1, 2, -3]])
def test_bad_seeds(model: Any, seed: Any) -> None:
    with pytest.raises(ValueError, match=r"a seed must be an integer|2 seeds for 3 rows"):
        model.generate(THREE, attention_mask=MASK, do_sample=True, custom_generate=ft.custom_generate, seed=seed)


def test_rows_of_one_prompt_are_different_samples(model: Any) -> None:
    # Of a twelfth of the seeds the text ends at once: none of these four.
    out = model.generate(
        ONE, do_sample=True, num_return_sequences=4, max_new_tokens=12, custom_generate=ft.custom_generate, seed=50
    )
    assert len({tuple(row) for row in out.tolist()}) == 4


def test_temperature_and_filters_are_applied_once(model: Any) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=7, top_p=0.8, min_p=0.1)
    processors = model._get_logits_processor(config, 5, device="cpu")
    params = params_of(processors, 0, 0, config)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.8, 0.1)
    assert params.processors == ()
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    distribution = Sampler(params).distribution(logits, [])
    assert torch.allclose(distribution, torch.softmax(processors(ONE, logits[None]), -1)[0], atol=1e-6)


@pytest.mark.parametrize(
    "warper",
    [TopKLogitsWarper(2, filter_value=-1.0), TopPLogitsWarper(0.6, filter_value=-1.0), MinPLogitsWarper(0.5, -1.0)],
)
def test_a_filter_with_a_value_of_its_own_only_lowers_tokens(warper: Any) -> None:
    params = params_of([TemperatureLogitsWarper(0.5), warper], 0, 0, GenerationConfig(do_sample=True))
    logits = torch.tensor([3.0, 2.0, 1.0, 0.5])
    expected = torch.softmax(warper(ONE, logits[None] / 0.5), -1)[0]
    assert bool((expected > 0).all())
    assert torch.allclose(Sampler(params).distribution(logits, [1]), expected, atol=1e-6)


def test_top_p_0_is_the_likeliest_token(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.0}
    greedy = model.generate(ONE, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ONE, **options), greedy)
    for drafter in (None, "ngram,n=2,k=3"):
        assert torch.equal(model.generate(ONE, custom_generate=ft.custom_generate, drafter=drafter, **options), greedy)


# -- output forms and side effects -----------------------------------------------------------------------------------


def test_return_dict(model: Any) -> None:
    out = model.generate(
        THREE, attention_mask=MASK, max_new_tokens=6, return_dict_in_generate=True, custom_generate=ft.custom_generate
    )
    plain = model.generate(THREE, attention_mask=MASK, max_new_tokens=6)
    assert torch.equal(out.sequences, plain)
    assert [stats.num_new_tokens for stats in out.stats] == [6, 6, 6]


@pytest.mark.parametrize("by", ["eos", "criterion"])
def test_statistics_end_where_the_row_ends(model: Any, by: str) -> None:
    """Nothing that was drafted and accepted behind the end counts, and drafters learn nothing from it."""
    learned: list[list[int]] = []

    class Perfect(ScriptedDrafter):
        def finish(self, context: Context) -> None:
            learned.append(list(context.tokens))

    class Long(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= 5 + 8])

    plain = model.generate(ONE, max_new_tokens=24, eos_token_id=None)[0, 5:].tolist()
    kept = plain.index(plain[7]) + 1 if by == "eos" else 8
    end = {"eos_token_id": [plain[7], VOCAB + 1]} if by == "eos" else {"stopping_criteria": [Long()]}
    out = model.generate(
        ONE, max_new_tokens=24, custom_generate=ft.custom_generate, return_dict_in_generate=True,
        drafter=Perfect(script=plain, as_output=True), controller="constant,k=11", **{"eos_token_id": None, **end},
    )  # fmt: skip
    assert out.sequences[0, 5:].tolist() == plain[:kept]
    (stats,) = out.stats
    assert (stats.num_drafts, stats.num_new_tokens, stats.num_accepted_tokens) == (1, kept, kept)
    assert stats.num_accepted_tokens_per_pos == [1] * kept
    assert by == "criterion" or learned == [[*ONE[0].tolist(), *plain[:kept]]]


@pytest.mark.parametrize(
    "setting",
    [{"verifier": "greedy"}, {"controller": "constant"}, {"exact": "bitwise"}, {"profile": "x"}, {"allow_lossy": True}],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_beside_kept_ones_are_refused(model: Any, setting: dict[str, Any]) -> None:
    ended: list[bool] = []
    streamer = TextStreamer(None)
    streamer.put = lambda value: None  # type: ignore[method-assign]
    streamer.end = lambda: ended.append(True)  # type: ignore[method-assign]
    call: dict[str, Any] = {"custom_generate": ft.custom_generate, "drafter": ft.CustomGenerate("ngram")}
    with pytest.raises(ValueError, match=f"settings of its own: pass it {next(iter(setting))}, and not here"):
        model.generate(ONE, max_new_tokens=3, token_streamer=streamer, **call, **setting)
    assert ended
    assert model.generate(ONE, max_new_tokens=3, **call).shape[1] == 8


def test_a_streamer_gets_every_token_once(model: Any) -> None:
    class Collect(TextStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Collect()
    out = model.generate(ONE, max_new_tokens=12, custom_generate=ft.custom_generate, token_streamer=streamer)
    assert streamer.got == out[0].tolist() and streamer.ended


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    model.train()
    model.model.layers[0].eval()
    names, modes = set(vars(model)), [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.generate(ONE, max_new_tokens=4, custom_generate=ft.custom_generate)
    assert set(vars(model)) - {ATTRIBUTE} == names
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("form", ["alone", "list", "kept"])
def test_a_draft_model_in_training_stays_in_training(model: Any, form: str) -> None:
    draft = llama(noise=0.03, seed=0)
    draft.train()
    draft.model.layers[0].eval()
    modes = [module.training for module in draft.modules()]
    drafter: Any = ["ngram", draft] if form == "list" else draft
    hook = ft.CustomGenerate(drafter=drafter)
    options = (
        {"custom_generate": hook} if form == "kept" else {"custom_generate": ft.custom_generate, "drafter": drafter}
    )
    for _ in range(2):
        model.generate(ONE, max_new_tokens=6, do_sample=False, **options)
        assert [module.training for module in draft.modules()] == modes
    with pytest.raises(ValueError, match="unknown verifier"):
        model.generate(ONE, max_new_tokens=6, custom_generate=ft.custom_generate, drafter=drafter, verifier="nosuch")
    assert [module.training for module in draft.modules()] == modes


def test_changed_weights_are_seen_by_the_next_call() -> None:
    model = llama()
    before = model.generate(ONE, max_new_tokens=12, custom_generate=ft.custom_generate)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    plain, ours = both(model, ONE, max_new_tokens=12)
    assert torch.equal(plain, ours) and not torch.equal(ours, before)


def test_what_was_learned_is_kept_between_calls() -> None:
    """A suffix drafter that has seen the answer writes it again in few rounds; a new one does not."""
    model = llama(eos=None)
    generate = ft.CustomGenerate(drafter="suffix,k=8", controller="constant,k=8")
    options: dict[str, Any] = {"max_new_tokens": 40, "return_dict_in_generate": True}
    first, second = (model.generate(ONE, custom_generate=generate, **options) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert second.stats[0].num_drafts < first.stats[0].num_drafts
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    third = model.generate(ONE, custom_generate=generate, **options)
    assert torch.equal(third.sequences, model.generate(ONE, max_new_tokens=40)), "other weights, another engine"


def test_a_prediction_is_drafted_first(model: Any) -> None:
    plain = model.generate(THREE, attention_mask=MASK, max_new_tokens=16)
    answers = [row[6:].tolist() for row in plain]
    output = model.generate(
        THREE, attention_mask=MASK, max_new_tokens=16, custom_generate=ft.custom_generate, drafter=None,
        prediction=answers, return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([[8], [3]], "2 predictions for 3 prompts"),
        ([None, ["a"], [3]], "must hold token ids"),
        (["ab"] * 3, "tokenizer"),
    ],
)
def test_predictions_are_those_of_a_request(model: Any, prediction: Any, message: str) -> None:
    """One per row may be missing, and a text is one, not a list of letters."""
    options = {"attention_mask": MASK, "max_new_tokens": 8, "custom_generate": ft.custom_generate, "drafter": None}
    plain = model.generate(THREE, attention_mask=MASK, max_new_tokens=8)
    output = model.generate(THREE, **options, prediction=[None, plain[1, 6:].tolist(), [8]])
    assert torch.equal(output, plain)
    with pytest.raises(ValueError, match=message):
        model.generate(THREE, **options, prediction=prediction)


@pytest.mark.parametrize("exact", ["distribution", "bitwise"])
def test_exact_and_profile_are_handed_on(model: Any, exact: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"drafter": "ngram,n=2,k=3", "controller": "constant,k=3"}))
    generate = ft.CustomGenerate(exact=exact, profile=profile)
    plain = model.generate(ONE, max_new_tokens=16)
    assert torch.equal(model.generate(ONE, max_new_tokens=16, custom_generate=generate), plain)
    llm = generate.llm(model)
    assert llm.engine.drafter.spec == "ngram,n=2,k=3"
    assert llm.target.exact == exact  # type: ignore[attr-defined]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
        ({"drafter": "nosuch"}, "unknown drafter 'nosuch'"),
        ({"verifier": "nosuch"}, "unknown verifier 'nosuch'"),
        ({"drafter": "ngram", "verifier": "typical"}, "allow_lossy"),
        ({"seed": [1, 2]}, "2 seeds for 1 rows"),
        ({"max_new_tokens": 500}, "max_new_tokens=500"),
        ({"drafter": llama(vocab=4096)}, "vocabulary"),
        ({"prediction": [[1], [2]]}, "2 predictions for 1 prompts"),
        ({"prediction": "text"}, "needs the model's tokenizer"),
        ({"exact": "nearly"}, "exact"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate(ONE, custom_generate=ft.custom_generate, **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize(
    ("mask", "words"), [([[1, 1, 0, 1, 1]], "left"), ([[1, 1, 1, 0, 0]], "left"), ([[0, 0, 0, 0, 0]], "row 0 is empty")]
)
def test_masks_that_are_not_left_padding_are_refused(model: Any, mask: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate(ONE, attention_mask=torch.tensor(mask), max_new_tokens=4, custom_generate=ft.custom_generate)


def test_what_fails_in_a_round_is_raised(model: Any) -> None:
    """The error is raised, not a shorter text returned: the engine ends the request, and its caller must hear of it."""

    def failing(context: Context, budget: Budget) -> TokenTree:
        raise ZeroDivisionError("planted")

    for ids in (ONE, THREE):
        with pytest.raises(ZeroDivisionError, match="planted"):
            how = {"drafter": ScriptedDrafter(propose=failing), "controller": "constant"}
            model.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=ft.custom_generate, **how)
