"""Layer skipping: sets and their files, the adaptive threshold, acceptance, and a planted bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Scores, Verdict
from foretoken.core.budget import MovingThreshold
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.skip_sets import SkipSet, fingerprint, load_skips, save_skips
from foretoken.models.base import CapabilityError
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.taps import decoder_layers
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

LAYERS = 6
PROMPT = prompt_of(9)
T1 = SamplingParams(temperature=1.0)


def model(name: str = "llama", lean: bool = True, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    return HuggingFaceModel(new_model(name, seed=seed, num_hidden_layers=LAYERS).to(dtype), lean=lean)


def started(target: HuggingFaceModel, drafter: LayerSkipDrafter, params: SamplingParams = T1) -> Any:
    """A request after its first round."""
    speculative = engine(target, drafter)
    speculative.add(Request(PROMPT, params, 60, seed=0, ignore_eos=True))
    speculative.step()
    return speculative.requests.running[0]


# -- sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("", ()),
        ("none", ()),
        ("3", (3,)),
        ("1+3+5", (1, 3, 5)),
        ("2-4", (2, 3, 4)),
        ("0 + 2-3", (0, 2, 3)),
        ("1+1", (1,)),
    ],
)
def test_lists_of_layers(text: str, layers: tuple[int, ...]) -> None:
    skips = SkipSet.parse(text, "none", LAYERS)
    assert skips == SkipSet(attention=frozenset(layers))
    assert SkipSet.parse(**skips.options, num_layers=LAYERS) == skips


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1+", "must be layers such as"),
        ("x", "must be layers such as"),
        ("-1", "must be layers such as"),
        ("1-", "must be layers such as"),
        ("6", "out of range: the target has layers 0 to 5"),
        ("4-2", "out of range"),
        ("0-999999999", "out of range"),
    ],
)
def test_broken_lists_of_layers(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"mlp={text!r}".replace("+", r"\+") + f".* {words}"):
        SkipSet.parse("", text, LAYERS)


def test_sets_by_rule() -> None:
    assert SkipSet.middle(30).options == {"attention": "12+13+14+15+16+17", "mlp": "none"}
    assert SkipSet.middle(3).options == {"attention": "1", "mlp": "none"}
    assert SkipSet.odd(8).options == {"attention": "1+3+5", "mlp": "1+3+5"}
    assert SkipSet.odd(8, keep=0).attention == {1, 3, 5, 7}
    assert LayerSkipDrafter(model(), mlp="2-3").skips.options == {"attention": "none", "mlp": "2+3"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("layer_skip,attention=9", "out of range"),
        ("layer_skip,attention=0-5,mlp=0-5", "leaves no sublayer"),
        ("layer_skip,k=0", "layer_skip needs k >= 1"),
        ("layer_skip,draw=sorted", "draw must be"),
        ("layer_skip,layers=3", "unknown option 'layers'"),
        ("layer_skip:x.json,mlp=1", "not both"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    target = model()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def test_targets_that_cannot_are_refused() -> None:
    with pytest.raises(CapabilityError, match="layers can be run one by one"):
        LayerSkipDrafter(tables()[0])
    with pytest.raises(CapabilityError, match="no separate MLP"):
        LayerSkipDrafter(HuggingFaceModel(new_model("opt", num_hidden_layers=4)))
    uneven = model()
    del decoder_layers(uneven.model)[2].mlp
    with pytest.raises(CapabilityError, match="no separate MLP"):  # the measurement would fail for every request
        LayerSkipDrafter(uneven)
    with pytest.raises(ValueError, match="give the layers, for example attention=1"):
        LayerSkipDrafter(llamas()[0])


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_for_the_target_that_it_was_made_for(tmp_path: Path) -> None:
    target, file = model(), tmp_path / "deep" / "skips.json"
    skips = SkipSet(frozenset({1, 4}), frozenset({2}))
    save_skips(file, skips, target, tokens_per_s=12.5)
    assert json.loads(file.read_text())["tokens_per_s"] == 12.5
    assert [path.name for path in file.parent.iterdir()] == ["skips.json"]
    for same in (target, model(lean=False), model(dtype=torch.float32), model(dtype=torch.float16)):
        assert load_skips(file, same) == skips
    built: Any = build_drafter(f"layer_skip:{file},k=3", target, target_source=target)
    assert (built.skips, built.max_depth) == (skips, 3)


def test_other_targets_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "skips.json"
    save_skips(file, SkipSet(), model())
    with pytest.raises(ValueError, match=r"another target .6 layers of width 48; this one has 2 of 16"):
        load_skips(file, llamas()[0])
    for other in (model(seed=1), model("qwen2")):
        with pytest.raises(ValueError, match=r"another target .6 layers of width 48; this one has other weights"):
            load_skips(file, other)
    assert fingerprint(model())["layers"] == LAYERS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-20], "damaged or half-written"),
        (lambda text: "", "damaged or half-written"),
        (lambda text: "[1]", "holds no layer-skip set"),
        (lambda text: '{"attention": [1], "mlp": []}', "holds no layer-skip set"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2"),
        (lambda text: text.replace('"mlp": []', '"mlp": ["1"]'), "is damaged"),
        (lambda text: text.replace('"mlp"', '"xyz"'), "is damaged"),
        (lambda text: text.replace('"mlp": []', '"mlp": [77]'), "out of range"),
        (lambda text: text.replace('"layers": 6', '"layers": 7'), "another target"),
    ],
)
def test_damaged_files(tmp_path: Path, change: Any, words: str) -> None:
    target, file = model(), tmp_path / "skips.json"
    save_skips(file, SkipSet(frozenset({1})), target)
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(f"layer_skip:{file}", target, target_source=target)
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    target = model()
    with pytest.raises(FileNotFoundError):
        build_drafter(f"layer_skip:{tmp_path / 'no.json'}", target, target_source=target)


# -- drafting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_nothing_skipped_every_draft_stands(lean: bool, temperature: float) -> None:
    target = model(lean=lean)
    drafter = LayerSkipDrafter(target, attention="none", k=3, adaptive=False)
    request = Request(PROMPT, SamplingParams(temperature=temperature), 40, seed=1, ignore_eos=True)
    (run,) = serve(engine(target, drafter), [request])
    assert (run.stats.num_drafts, run.stats.num_accepted_tokens) == (10, 30)
    if temperature == 0:
        assert [run.output] == outputs(engine(target), [request])


def test_a_draft_step_runs_what_is_left() -> None:
    """Three attentions and one MLP of six layers less: four layers' worth; the verification runs all six."""
    target = model()
    drafter = LayerSkipDrafter(target, attention="1-3", mlp="4", k=3, adaptive=False)
    run = started(target, drafter)
    before = layer_runs(target)
    drafter.propose(run.context, Budget(3, 64))
    assert layer_runs(target) - before == 3 * (LAYERS - 3 / 2 - 1 / 2)
    target.commit(run.sequence, ())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "olmo2"])
def test_families_write_what_they_write_alone(name: str) -> None:
    target = model(name)
    requests = [Request(prompt_of(n, seed=n), max_new_tokens=20, ignore_eos=True) for n in (9, 1, 14)]
    plain = outputs(engine(target), requests)
    for options in ({"mlp": "2", "k": 3}, {"attention": "1+4", "tree": "2x2"}):
        drafter = LayerSkipDrafter(target, **options)  # type: ignore[arg-type]
        assert outputs(engine(target, drafter, max_batch=3), requests) == plain


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_experts_that_return_their_scores_too_can_be_skipped(name: str) -> None:
    """MLPs of gpt_oss and every second one of llama4 return a pair."""
    target = HuggingFaceModel(new_model(name), lean=False)
    requests = [Request(prompt_of(n, seed=n), max_new_tokens=12, ignore_eos=True) for n in (9, 1, 14)]
    plain = outputs(engine(target), requests)
    for mlp in ("1", "2", "1-2"):
        drafter = LayerSkipDrafter(target, mlp=mlp, k=3)
        assert outputs(engine(target, drafter, max_batch=3), requests) == plain


# -- the threshold ---------------------------------------------------------------------------------------------------


def test_the_threshold_follows_the_acceptance_rate() -> None:
    """By hand: rates .5, .75, .875 raise it, .9375 at full length holds it, a stop at .97 lowers it, .48 raises it."""
    threshold, seen = MovingThreshold(0.8), []
    for drafted, accepted in ((8, 8), (8, 8), (8, 8), (8, 8), (4, 4), (4, 0)):
        threshold.update(drafted, accepted, cap=8)
        seen.append(threshold.value)
    assert seen == pytest.approx([0.801, 0.802, 0.803, 0.803, 0.802, 0.803])
    assert threshold.rate == pytest.approx(0.484375)


def test_the_threshold_stays_a_probability() -> None:
    target = model()
    drafter = LayerSkipDrafter(target, k=4)
    run = started(target, drafter)
    threshold = run.context.state[drafter, "threshold"]
    threshold.value = 0.9995
    for _ in range(3):
        tree = drafter.propose(run.context, Budget(4, 64))
        target.commit(run.sequence, ())
        scores = Scores(torch.zeros(len(tree), 1), tree, run.context.tokens, run.context.sampler)
        drafter.observe(run.context, tree, scores, Verdict((), 0, next_is_bonus=False))
    assert threshold.value == 1.0


@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "sampled"])
def test_a_stop_keeps_the_drawn_token(params: SamplingParams) -> None:
    target = model()
    drafter = LayerSkipDrafter(target, k=6)
    run = started(target, drafter, params)
    threshold: MovingThreshold = run.context.state[drafter, "threshold"]
    lengths = []
    for value in (0.0, 1.1):
        threshold.value = value
        lengths.append(drafter.propose(run.context, Budget(6, 64)).num_drafts)
        target.commit(run.sequence, ())
    assert lengths == [6, 1]


def test_every_request_has_a_threshold_of_its_own() -> None:
    target = model()
    drafter = LayerSkipDrafter(target, k=4)
    speculative = engine(target, drafter)
    for params in (SamplingParams(), T1):
        speculative.add(Request(PROMPT, params, 30, seed=0, ignore_eos=True))
    speculative.step()
    contexts = [run.context for run in speculative.requests.running]
    values = [context.state[drafter, "threshold"].value for context in contexts]
    assert values == pytest.approx([0.801, 0.501])  # nothing is accepted often enough yet
    while speculative.busy:
        speculative.step()
    assert not any((drafter, "threshold") in context.state for context in contexts)


def test_the_callers_stop_still_counts() -> None:
    target = model()
    drafter = LayerSkipDrafter(target, k=6)
    run = started(target, drafter)
    run.context.state[drafter, "threshold"].value = 0.0
    tree = drafter.propose(run.context, Budget(6, 64, stop=lambda distribution, chance: True))
    assert tree.num_drafts == 1
    target.commit(run.sequence, ())


# -- exactness -------------------------------------------------------------------------------------------------------


class ArgmaxWithSoftDistribution(LayerSkipDrafter):
    """The published code's mistake: the likeliest token is drafted, and said to be drawn from the soft distribution."""

    draws_together = False

    def _candidates(self, tree: Growing, logits: Tensor, parent: int, width: int) -> tuple[Tensor | None, list[int]]:
        distribution, _ = super()._candidates(tree, logits, parent, width)
        assert distribution is not None
        return distribution, [int(distribution.argmax())]


@pytest.mark.parametrize("kind", [LayerSkipDrafter, ArgmaxWithSoftDistribution])
def test_argmax_drafts_under_a_soft_distribution_are_caught(kind: type[LayerSkipDrafter]) -> None:
    target, _ = llamas(vocab=4)
    prompt, tokens = [0, 1, 2, 3, 0, 1], 3
    distributions = {"T=1": joint_distribution(target, T1, prompt, tokens)}
    drafter = kind(target, attention="0-1", mlp="1", k=2, adaptive=False)
    value = sampled_p_value(engine(target, drafter, max_batch=8), {"T=1": T1}, distributions, prompt, tokens, 800)
    assert value > FALSE_ALARM if kind is LayerSkipDrafter else value < CAUGHT
