"""The default set of ``layer_skip``: measured on the target's own text, remembered, and honest where nothing pays."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.costs import TargetCost
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters import layer_skip, skip_default
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.skip_default import (
    Choice,
    NothingToSkipWarning,
    SkipsNotMeasuredWarning,
    default_set,
    measured_set,
    promised_speed,
)
from foretoken.methods.drafters.skip_sets import SkipSet
from foretoken.models import wrap
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.taps import decoder_layers
from models.checkpoints import new_model, prompt_of
from toys import engine, outputs, serve

LAYERS = 6
PROMPTS = [prompt_of(5, seed=i) for i in range(4)]
SILENT = {"attention": frozenset({2, 3}), "mlp": frozenset({4})}
CHEAP = TargetCost({1: 1.0, 64: 1.0})


def target_with_silent_sublayers(seed: int = 0) -> HuggingFaceModel:
    """A deep toy of whose sublayers three add nothing, and every other one much."""
    network = new_model("llama", seed=seed, num_hidden_layers=LAYERS).double()
    for index, layer in enumerate(decoder_layers(network)):
        for kind, weight in (("attention", layer.self_attn.o_proj.weight), ("mlp", layer.mlp.down_proj.weight)):
            with torch.no_grad():
                weight.mul_(0.0 if index in SILENT[kind] else 8.0)
    return HuggingFaceModel(network)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(skip_default.KEPT, "results", {})
    monkeypatch.setattr(skip_default, "is_busy", lambda: False)
    monkeypatch.setattr(skip_default, "quick_costs", lambda target: CHEAP)
    monkeypatch.setattr(skip_default._OwnText, "_saved", lambda self: (1 / 24, 1 / 12))


def test_what_adds_nothing_is_left_out() -> None:
    choice = measured_set(target_with_silent_sublayers(), PROMPTS, tokens=12)
    assert choice.skips.attention >= SILENT["attention"] or choice.skips.mlp >= SILENT["mlp"]
    assert choice.skips.attention <= {1, *SILENT["attention"]} and choice.acceptance > 0.9 and choice.speed > 1


def test_sensitivities_tell_them_apart() -> None:
    text = skip_default._OwnText(target_with_silent_sublayers(), PROMPTS, 12)
    silent = [SkipSet(attention=frozenset({i})) for i in SILENT["attention"]] + [SkipSet(mlp=SILENT["mlp"])]
    assert max(map(text.sensitivity, silent)) < 1e-6
    assert min(text.sensitivity(SkipSet(mlp=frozenset({i}))) for i in (1, 2, 3)) > 1e-3
    assert text.judged(SkipSet()).acceptance == 1.0, "with nothing left out all of its own tokens are likeliest"
    text.close()
    assert not any(sequence.tokens for sequence in text.target._sequences)


def test_the_promised_speed_by_hand() -> None:
    """a = .8, c = .5, k = 2: 1 + .8 + .64 tokens for two halves and a call of three nodes."""
    costs = TargetCost({1: 1.0, 2: 1.3, 3: 1.4, 4: 9.0})
    assert promised_speed(0.8, 0.5, costs) == pytest.approx(2.44 / (1.0 + 1.4))
    assert promised_speed(0.0, 0.9, CHEAP) == pytest.approx(1 / 1.9)


def test_the_first_request_measures_and_the_text_is_the_targets_own() -> None:
    target = target_with_silent_sublayers()
    drafter = LayerSkipDrafter(target)
    assert not drafter.is_decided and drafter.skips == SkipSet.middle(LAYERS)
    for params in (SamplingParams(), SamplingParams(temperature=0.9)):
        request = [Request(prompt, params, 16, seed=i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingToSkipWarning)
            texts = outputs(engine(target, drafter), request)
        assert texts == outputs(engine(target), request)
    assert drafter.is_decided and drafter.plan == drafter.skips.plan


@pytest.mark.parametrize("calls", [0, 3, 9, 15])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_measurement_keeps_nothing_and_is_made_again(calls: int, error: type[BaseException]) -> None:
    """It stops while prompts are read, while they are continued, and while sets are tried."""
    target = target_with_silent_sublayers()
    drafter = LayerSkipDrafter(target)
    forward, left = target.forward, calls

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise error("planted")
        return forward(*args, **options)

    target.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(error, match="planted"):
        drafter.decide()
    assert target.kv_bytes == 0 and not any(sequence.tokens for sequence in target._sequences)
    assert not drafter.is_decided and drafter.skips == SkipSet.middle(LAYERS)
    target.forward = forward  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToSkipWarning)
        drafter.decide()
    assert drafter.is_decided and drafter.plan == drafter.skips.plan


class Failing:
    """``default_set`` that raises the given errors one after another, and then chooses a set."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self, *args: Any) -> Choice:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return Choice(SkipSet(mlp=frozenset({4})), 1.0, 2.0)


def written(target: HuggingFaceModel, drafter: LayerSkipDrafter) -> tuple[list[list[int]], list[int]]:
    """The texts of four requests one after another, and how many tokens were drafted for each."""
    runs = [
        run
        for prompt in PROMPTS
        for run in serve(engine(target, drafter), [Request(prompt, max_new_tokens=8, ignore_eos=True)])
    ]
    return [run.output for run in runs], [run.stats.num_draft_tokens for run in runs]


def test_where_the_measurement_fails_requests_decode_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_with_silent_sublayers()
    failing = Failing(IndexError("planted\nin two lines"))
    monkeypatch.setattr(layer_skip, "default_set", failing)
    with pytest.warns(SkipsNotMeasuredWarning) as record:
        texts, drafted = written(target, LayerSkipDrafter(target))
    assert texts == outputs(engine(target), [Request(p, max_new_tokens=8, ignore_eos=True) for p in PROMPTS])
    assert drafted == [0, 0, 0, 0] and failing.calls == 1
    assert [str(warning.message) for warning in record] == [
        "layer_skip drafts nothing for this model: measuring which sublayers to skip failed (IndexError: planted in "
        "two lines); give them, for example attention=2, or use another drafter"
    ]


def test_where_memory_ran_out_a_later_request_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_with_silent_sublayers()
    failing = Failing(MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    monkeypatch.setattr(layer_skip, "default_set", failing)
    with pytest.warns(SkipsNotMeasuredWarning, match=r"until a later request's .* failed \(MemoryError\);") as record:
        texts, drafted = written(target, LayerSkipDrafter(target))
    assert texts == outputs(engine(target), [Request(p, max_new_tokens=8, ignore_eos=True) for p in PROMPTS])
    assert drafted[:2] == [0, 0] and min(drafted[2:]) > 0
    assert failing.calls == 3 and len(record) == 1


def test_a_tokenizer_that_spells_none_of_the_prompts() -> None:
    """One id for each of them, or only ids that the model does not have: ordinary ids are continued instead."""
    target = target_with_silent_sublayers()
    expected = skip_default._prompt_ids(target, None)
    for ids in ([7], [target.vocab_size] * 5):
        assert skip_default._prompt_ids(target, lambda text, ids=ids, **options: {"input_ids": ids}) == expected


@pytest.mark.parametrize("entry", [{"attention": "1"}, {"attention": "99", "mlp": "1"}, 3])
def test_a_damaged_entry_is_measured_again(monkeypatch: pytest.MonkeyPatch, entry: Any) -> None:
    choice = Choice(SkipSet(mlp=frozenset({1})), 0.9, 1.5)
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: choice)
    monkeypatch.setattr(skip_default.KEPT, "read", lambda name: entry)
    assert default_set(target_with_silent_sublayers(), None) == choice


def test_a_set_that_is_given_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_skip, "default_set", lambda *args: pytest.fail("nobody asked"))
    target = target_with_silent_sublayers()
    drafter = LayerSkipDrafter(target, attention="2")
    outputs(engine(target, drafter), [Request(PROMPTS[0], SamplingParams(), 8)])
    assert drafter.skips.options == {"attention": "2", "mlp": "none"}


def test_it_is_remembered_by_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_default, "WORTH_KEEPING_S", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToSkipWarning)
        first = default_set(target_with_silent_sublayers(), None)
        monkeypatch.setattr(skip_default.KEPT, "results", {})  # another process
        monkeypatch.setattr(skip_default, "measured_set", lambda *args: pytest.fail("the file has it"))
        assert default_set(target_with_silent_sublayers(), None) == first
    other = Choice(SkipSet(mlp=frozenset({1})), 0.9, 1.5)
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: other)
    assert default_set(target_with_silent_sublayers(seed=1), None) == other, "another model is measured itself"


def test_another_forward_of_the_same_network_has_a_set_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaving sublayers out saves depends on the forward that runs the others."""
    choices = [Choice(SkipSet(mlp=frozenset({layer})), 0.9, 1.5) for layer in (1, 2)]
    sets = iter(choices)
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: next(sets))
    network = target_with_silent_sublayers().model.float()
    public, fast = wrap(network, exact="bitwise", lean=False), wrap(network)
    assert [default_set(target, None) for target in (public, fast, public, fast)] == choices * 2


def test_it_is_measured_again_where_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_default, "WORTH_KEEPING_S", 0.0)
    choices = [Choice(SkipSet(mlp=frozenset({layer})), 0.9, 1.5) for layer in (1, 2)]
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: choices[0])
    monkeypatch.setattr(skip_default, "is_busy", lambda: True)
    assert default_set(target_with_silent_sublayers(), None) == choices[0]
    monkeypatch.setattr(skip_default.KEPT, "results", {})  # another process
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: choices[1])
    assert default_set(target_with_silent_sublayers(), None) == choices[1]


def test_it_says_when_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: Choice(SkipSet(mlp=frozenset({1})), 0.31, 0.62))
    target = target_with_silent_sublayers()
    for _ in range(2):  # also when it was remembered
        with pytest.warns(
            NothingToSkipWarning,
            match="no set of skipped sublayers is faster .* 0.62 of plain .*31% of its drafts are accepted",
        ) as record:
            default_set(target, None)
        assert "\n" not in str(record[0].message)
    monkeypatch.setattr(skip_default.KEPT, "results", {})
    monkeypatch.setattr(skip_default, "measured_set", lambda *args: Choice(SkipSet(mlp=frozenset({1})), 0.9, 1.2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default_set(target, None)
