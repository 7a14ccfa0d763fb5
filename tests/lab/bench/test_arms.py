"""Arms of other engines run the same weights and say how long decoding took."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.lab.bench.arms import ArmSetup, Generation, Unit
from foretoken.lab.bench.results import UnitResult, rate
from foretoken.lab.bench.serving import make_arm
from foretoken.lab.bench.specs import is_foreign
from foretoken.lab.bench.transformers_arms import RoundClock, run_of, unpacked
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.layouts import usable_layouts
from foretoken.models.linear.packing import PackedLinear, Packing, pack_linears
from foretoken.models.other.table import TableModel
from toys import llama

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4]


@pytest.fixture
def shared() -> ArmSetup:
    return ArmSetup(HuggingFaceModel(llama()), "a toy")


def written(spec: str, shared: ArmSetup, new_tokens: int, ids: Sequence[int] = PROMPT) -> UnitResult:
    """What an arm writes greedily for one prompt."""
    return make_arm(spec, shared).run(Unit.of(ids, new_tokens), (0.0, 1))


@pytest.fixture
def with_draft(shared: ArmSetup, tmp_path: Any) -> str:
    llama(noise=0.2).save_pretrained(tmp_path / "draft")
    return str(tmp_path / "draft")


@pytest.mark.parametrize("spec", ["none", "ngram,n=2,k=4", "transformers:plain", "transformers:prompt_lookup,k=4,n=2"])
def test_greedy_ids_are_the_same(spec: str, shared: ArmSetup) -> None:
    plain, run = (written(name, shared, 20) for name in ("none", spec))
    assert run.outputs == plain.outputs
    assert len(run.outputs[0]) == 20
    assert run.seconds > 0 and run.prefill_s > 0 and rate([run]) > 0


@pytest.mark.parametrize("spec", ["none", "ngram,n=2,k=4", "early_exit,layer=1,k=3"])
def test_a_batch_that_is_read_together_is_read_once(spec: str) -> None:
    """The seconds of a joint reading are not taken off once for every prompt: the rounds must fit in what is left."""
    prompts = [[(place * number) % 31 for place in range(600)] for number in (1, 3, 5, 7)]
    unit = Unit("", 0, range(4), prompts, range(4), 1)
    arm = make_arm(spec, ArmSetup(HuggingFaceModel(llama(context=1024)), "a toy"))
    result = arm.run(unit, (0.0, 4))
    assert result.draft_s is not None and result.target_s is not None and result.verify_s is not None
    assert result.seconds >= result.draft_s + result.target_s + result.verify_s > 0


@pytest.mark.parametrize("options", ["", ",k=3", ",k=3,threshold=0.5", ",k=3,schedule=heuristic"])
def test_assisted(options: str, shared: ArmSetup, with_draft: str) -> None:
    run = written(f"transformers:assisted,draft={with_draft},dtype=float64{options}", shared, 16)
    assert run.outputs == written("none", shared, 16).outputs
    assert run.mean_acceptance_length is not None and run.mean_acceptance_length >= 1.0


def test_assisted_settings(shared: ArmSetup, with_draft: str) -> None:
    fixed: Any = make_arm(f"transformers:assisted,draft={with_draft},k=3", shared)
    settings = fixed.assistant.generation_config
    assert (settings.num_assistant_tokens, settings.assistant_confidence_threshold) == (3, 0.0)
    assert settings.num_assistant_tokens_schedule == "constant"
    left: Any = make_arm(f"transformers:assisted,draft={with_draft}", shared)
    assert left.assistant.generation_config.assistant_confidence_threshold != 0.0


def test_a_perfect_draft_is_accepted_whole(shared: ArmSetup, tmp_path: Any) -> None:
    llama().save_pretrained(tmp_path)
    run = written(f"transformers:assisted,draft={tmp_path},k=3,dtype=float64", shared, 20)
    assert run.mean_acceptance_length == 4.0


@pytest.mark.parametrize("spec", ["none", "transformers:plain"])
def test_a_seed_fixes_samples(spec: str, shared: ArmSetup) -> None:
    arm = make_arm(spec, shared)
    first, same, other = (arm.run(Unit.of(PROMPT, 16, seed), (1.0, 1)).outputs for seed in (0, 0, 1))
    assert first == same != other


def test_the_checkpoint_s_penalties_and_bans_apply_to_no_arm(tmp_path: Any) -> None:
    """Transformers' arms wrote another text, and their draft models could not draft what the target may write."""
    model = copy.deepcopy(llama())
    (plain,) = written("none", ArmSetup(HuggingFaceModel(model), "a toy"), 16).outputs
    strict = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": plain[:8]}
    model.generation_config.update(**strict, num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    model.save_pretrained(tmp_path)
    shared = ArmSetup(HuggingFaceModel(model), "a toy")
    assisted = f"transformers:assisted,draft={tmp_path},dtype=float64"
    for spec in ("none", "transformers:plain", "transformers:prompt_lookup,k=4,n=2", assisted):
        run = written(spec, shared, 16)
        assert run.outputs == [plain], spec
    assert run.mean_acceptance_length == 4.0  # a perfect draft model, whose checkpoint asks for three tokens
    assert model.generation_config.suppress_tokens == plain[:8]


def test_end_of_text_is_passed_over_unless_told() -> None:
    model = llama()
    target = HuggingFaceModel(model)
    (first,) = written("none", ArmSetup(target, "a toy"), 4).outputs
    model.generation_config.eos_token_id = first[1]
    try:
        ended = HuggingFaceModel(model)
        for spec in ("none", "transformers:plain"):
            stopping = ArmSetup(ended, "a toy", ignore_eos=False)
            assert written(spec, stopping, 4).outputs == [first[: first.index(first[1]) + 1]]
            assert written(spec, ArmSetup(ended, "a toy"), 4).outputs == [first]
        model.generation_config.eos_token_id = None
        ended.eos_token_ids = frozenset({first[1]})  # such as a template's end of turn: the checkpoint lacks it
        for spec in ("none", "transformers:plain"):
            assert written(spec, ArmSetup(ended, "a toy", ignore_eos=False), 4).outputs == [first[:2]]
    finally:
        model.generation_config.eos_token_id = None


def test_rounds_are_counted_from_the_streamer() -> None:
    clock = RoundClock()
    clock.put(torch.zeros(1, 5))  # the prompt
    clock.rounds = [(0.5, 1), (0.7, 3), (1.0, 2)]
    run = run_of([1, 2, 3, 4, 5, 6], clock)
    assert run == Generation([1, 2, 3, 4, 5, 6], 0.5, 5, 0.5, 2.5)


def test_one_token_has_no_rate() -> None:
    clock = RoundClock()
    clock.rounds = [(0.5, 1)]
    assert run_of([1], clock).num_decoded == 0


def test_packed_weights_are_unpacked() -> None:
    model = copy.deepcopy(llama()).bfloat16()
    layout = usable_layouts(torch.bfloat16)[-1]
    if layout == "plain":
        pytest.skip("this machine has no packed bfloat16 layers")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert pack_linears(model, Packing(layout)) > 0
    plain = unpacked(model)
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    weights = plain.state_dict()
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_arms_share_one_unpacked_network() -> None:
    """Each held the whole model again."""
    model = copy.deepcopy(llama()).bfloat16()
    layout = usable_layouts(torch.bfloat16)[-1]
    if layout == "plain":
        pytest.skip("this machine has no packed bfloat16 layers")
    assert pack_linears(model, Packing(layout)) > 0
    shared = ArmSetup(HuggingFaceModel(model), "a toy")
    arms: list[Any] = [make_arm(f"transformers:{name}", shared) for name in ("plain", "prompt_lookup")]
    first, second = ({id(value) for value in arm.network.parameters()} for arm in arms)
    assert first == second


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("transformers:fast", "transformers:plain, transformers:assisted, transformers:prompt_lookup"),
        ("llama.cpp:fast", "llama.cpp:plain, llama.cpp:prompt_lookup, llama.cpp:draft"),
        ("transformers:prompt_lookup,depth=3", "valid ones: .*k, n"),
        ("transformers:assisted", "draft=PATH"),
        ("transformers:assisted,draft=x,schedule=never", "constant, heuristic"),
        ("nothing", "unknown drafter"),
    ],
)
def test_bad_specs(spec: str, words: str, shared: ArmSetup) -> None:
    with pytest.raises(ValueError, match=words):
        make_arm(spec, shared)


@pytest.mark.parametrize("spec", ["transformers:plain", "transformers:prompt_lookup"])
def test_the_speed_of_another_engine_needs_a_second_token(spec: str, shared: ArmSetup) -> None:
    assert make_arm(spec, replace(shared, max_new_tokens=2)).name == spec
    with pytest.raises(ValueError, match=rf"{spec} makes the first token in its prefill: give --max-new-tokens of at"):
        make_arm(spec, replace(shared, max_new_tokens=1))


def test_a_table_model_has_no_other_engine() -> None:
    with pytest.raises(ValueError, match="needs a Transformers target"):
        make_arm("transformers:plain", ArmSetup(TableModel.random(4)))


def test_without_llama_cpp(shared: ArmSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llama_cpp":
            raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match="pip install llama-cpp-python") as error:
        make_arm("llama.cpp", shared)
    assert "\n" not in str(error.value)


def test_is_foreign() -> None:
    assert is_foreign("transformers:plain") and is_foreign("llama.cpp") and is_foreign("llama.cpp:draft,k=3")
    assert not is_foreign("model:./transformers,k=3") and not is_foreign("ngram")


# -- llama.cpp -------------------------------------------------------------------------------------------------------


def test_gguf_holds_the_weights(tmp_path: Any) -> None:
    gguf = pytest.importorskip("gguf")
    from foretoken.lab.bench.gguf_export import write_gguf

    model = copy.deepcopy(llama()).float()
    write_gguf(model, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    weights = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert torch.equal(weights["output.weight"], model.lm_head.weight)
    assert torch.equal(weights["blk.1.ffn_up.weight"], model.model.layers[1].mlp.up_proj.weight)
    query = model.model.layers[0].self_attn.q_proj.weight  # 4 heads of 4: halves 0 1 | 2 3 become neighbours
    assert torch.equal(weights["blk.0.attn_q.weight"][:4], query[[0, 2, 1, 3]])


def test_gguf_refuses_float64(tmp_path: Any) -> None:
    pytest.importorskip("gguf")
    from foretoken.lab.bench.gguf_export import write_gguf

    with pytest.raises(ValueError, match="dtype=bfloat16 or float32"):
        write_gguf(llama(), tmp_path / "m.gguf")


@pytest.mark.parametrize("spec", ["llama.cpp", "llama.cpp:prompt_lookup,k=4", "llama.cpp:draft,k=4"])
def test_llama_cpp_says_the_same(spec: str) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from foretoken.loading import load_model, load_tokenizer

    shared = ArmSetup(load_model("builtin", dtype="float32"))
    ids = load_tokenizer("builtin")("def fib(n):\n    a, b = 0, 1\n")["input_ids"]
    run = written(spec, shared, 16, ids)
    assert run.outputs == written("none", shared, 16, ids).outputs
    assert run.mean_acceptance_length is not None and run.mean_acceptance_length >= 1.0
