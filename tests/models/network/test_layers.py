"""Layer windows and skipped sublayers: parts of a network equal what the whole one computes on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, new_model, prompt_of

from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import LayerPlan, running
from foretoken.models.network.taps import decoder_layers
from foretoken.models.other.table import TableModel
from toys import layer_runs

FAMILIES = ("llama", "llama_gqa_tied", "qwen2", "qwen2_sliding", "qwen3", "mistral", "mistral_sliding", "gpt_neox",
            "olmo2", "gemma2", "gemma3", "phi3", "gpt2", "granite", "opt")  # fmt: skip
SKIPPING = tuple(name for name in FAMILIES if name != "opt")
TREE = ([7, 5, 6, 5, 5], [-1, 0, 0, 1, 2])

Subject = Callable[[str, bool], HuggingFaceModel]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Models by name, on the lean forward where there is one or on the public one."""
    models: dict[tuple[str, bool], Any] = {}

    def get(name: str, lean: bool) -> HuggingFaceModel:
        if (name, lean) not in models:
            model: Any = checkpoint(tmp_path_factory.mktemp("layers"), name)
            models[name, lean] = model if lean and model.is_lean else HuggingFaceModel(model.model, lean=False)
        return models[name, lean]

    return get


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-5 * b.std())


def opened(model: HuggingFaceModel, length: int = 12) -> Any:
    sequence = model.open()
    model.prefill(sequence, prompt_of(length))
    return sequence


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_exits_have_the_hidden_states_of_the_whole_forward(subject: Subject, name: str, lean: bool) -> None:
    model = subject(name, lean)
    sequence = opened(model)
    exit_layer = model.num_layers - 1
    part = model.forward_part([Feed(sequence, *TREE)], LayerPlan(stop=exit_layer))[0]
    model.commit(sequence, ())
    whole = model.forward([Feed(sequence, *TREE)], [f"layer:{exit_layer}"])[0]
    model.release(sequence)
    assert close(part.taps[f"layer:{exit_layer}"], whole.taps[f"layer:{exit_layer}"])
    assert not close(part.logits, whole.logits)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_forward_goes_on_where_the_window_ended(subject: Subject, name: str, lean: bool) -> None:
    """The logits are those of a forward that never stopped, and so is the cache that is left."""
    model = subject(name, lean)
    plain, sequence = opened(model), opened(model)
    expected = model.forward([Feed(plain, *TREE)])[0].logits
    tokens, parents = TREE
    window = LayerPlan(stop=1)
    before = layer_runs(model)
    model.forward_part([Feed(sequence, tokens[:1], parents[:1])], window)
    model.forward_part([Feed(sequence, tokens[1:3], parents[1:3])], window)
    got = model.forward([Feed(sequence, tokens, parents)])[0].logits
    # Two windows while drafting, one for the last two nodes, the upper layers once.
    assert layer_runs(model) - before == 3 * 1 + (model.num_layers - 1)
    assert close(got, expected)
    for each in (plain, sequence):
        model.commit(each, [0, 1, 3])
    follow = [model.forward([Feed(each, [9, 4])])[0].logits for each in (plain, sequence)]
    for each in (sequence, plain):
        model.release(each)
    assert close(follow[1], follow[0])


@pytest.mark.parametrize("lean", [True, False])
def test_restating_another_tree_drops_what_differs(subject: Subject, lean: bool) -> None:
    model = subject("llama", lean)
    plain, sequence = opened(model), opened(model)
    model.forward_part([Feed(sequence, [7, 8, 9])], LayerPlan(stop=2))
    got = model.forward([Feed(sequence, *TREE)])[0].logits
    assert close(got, model.forward([Feed(plain, *TREE)])[0].logits)
    assert sequence.scratch_tokens == TREE[0] and not sequence.provisional
    for each in (sequence, plain):
        model.release(each)


@pytest.mark.parametrize("lean", [True, False])
def test_ragged_batches_of_finished_and_unfinished_rows(subject: Subject, lean: bool) -> None:
    model = subject("qwen3", lean)
    rows = [opened(model, n) for n in (3, 12, 7)]
    expected = [model.forward([Feed(row, tokens)])[0].logits for row, tokens in zip(rows, FEEDS, strict=True)]
    for row in rows:
        model.commit(row, ())
    model.forward_part([Feed(rows[0], [5, 6]), Feed(rows[2], [8])], LayerPlan(stop=2))
    got = model.forward([Feed(row, tokens) for row, tokens in zip(rows, FEEDS, strict=True)])
    for output, right in zip(got, expected, strict=True):
        assert close(output.logits, right)
    for row in reversed(rows):
        model.release(row)


FEEDS = ([5, 6, 7], [9], [8, 4, 4, 3])


@pytest.mark.parametrize("name", SKIPPING)
def test_skipping_nothing_but_one_sublayer_changes_the_logits(subject: Subject, name: str) -> None:
    model = subject(name, False)
    sequence = opened(model)
    seen = []
    for plan in (LayerPlan(skip_attention=frozenset({1})), LayerPlan(skip_mlp=frozenset({1}))):
        seen.append(model.forward_part([Feed(sequence, *TREE)], plan)[0].logits)
        model.commit(sequence, ())
    whole = model.forward([Feed(sequence, *TREE)])[0].logits
    model.release(sequence)
    assert not close(seen[0], whole) and not close(seen[1], whole) and not close(seen[0], seen[1])


@pytest.mark.parametrize("name", [n for n in SKIPPING if n.split("_")[0] in ("llama", "qwen2", "qwen3", "mistral")])
def test_the_lean_twin_skips_the_same(subject: Subject, name: str) -> None:
    plan = LayerPlan(skip_attention=frozenset({0, 2}), skip_mlp=frozenset({1}))
    logits = []
    for lean in (True, False):
        model = subject(name, lean)
        sequence = opened(model)
        logits.append(model.forward_part([Feed(sequence, *TREE)], plan)[0].logits)
        model.release(sequence)
    assert close(logits[0], logits[1])


def test_a_layer_without_both_sublayers_hands_its_input_on(subject: Subject) -> None:
    """Skipping both sublayers of the last layer is an exit before it."""
    model = subject("llama", False)
    last = model.num_layers - 1
    sequence = opened(model)
    skipped = model.forward_part(
        [Feed(sequence, *TREE)], LayerPlan(skip_attention=frozenset({last}), skip_mlp=frozenset({last}))
    )[0]
    model.commit(sequence, ())
    window = model.forward_part([Feed(sequence, *TREE)], LayerPlan(stop=last))[0]
    model.release(sequence)
    assert close(skipped.logits, window.logits)


def test_modules_are_restored_after_an_error() -> None:
    model = new_model("llama")
    layers = decoder_layers(model)
    own = layers[0].forward
    layers[0].__dict__["forward"] = own  # as a library that wraps modules leaves it
    with pytest.raises(RuntimeError), running(model, LayerPlan(stop=1, skip_mlp=frozenset({0})), torch.zeros(1)):
        assert "forward" in layers[1].__dict__ and "forward" in layers[0].mlp.__dict__
        raise RuntimeError
    assert layers[0].__dict__["forward"] is own
    assert all("forward" not in m.__dict__ for layer in layers for m in layer.modules() if m is not layers[0])


def test_layers_that_return_more_than_a_state_are_refused() -> None:
    """A passed-over layer could not hand on what the decoder expects: an error, not a wrong text."""
    model = new_model("llama")
    for layer in decoder_layers(model):
        inner = layer.forward
        layer.__dict__["forward"] = lambda *args, run=inner, **kwargs: (run(*args, **kwargs), None)
    with (
        running(model, LayerPlan(stop=1)),
        pytest.raises(CapabilityError, match="LlamaDecoderLayer layers return more"),
    ):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_a_failed_forward_leaves_no_provisional_nodes(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject("llama", True)
    sequence = opened(model)
    model.forward_part([Feed(sequence, [7])], LayerPlan(stop=1))

    def broken(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.forwards.fast, "run_all", broken)
        model.forward([Feed(sequence, [7, 8])])
    assert not sequence.scratch_tokens and not sequence.provisional
    model.forward([Feed(sequence, [7, 8])])
    model.release(sequence)


def test_looking_at_a_text_again(subject: Subject) -> None:
    """``after`` hangs nodes from an earlier place: with all layers run they repeat what is there."""
    for name in ("llama", "mistral_sliding"):
        model = subject(name, True)
        sequence = opened(model, 14)
        text = prompt_of(14)
        whole = LayerPlan(stop=model.num_layers)
        again = model.forward_part([Feed(sequence, text[9:], after=9)], whole)[0].logits
        model.commit(sequence, ())
        other = opened(model, 9)
        expected = model.forward([Feed(other, text[9:])])[0].logits
        assert close(again, expected)
        model.release(other)
        # The committed cache is as it was.
        follow = model.forward([Feed(sequence, [5])])[0].logits
        fresh = opened(model, 14)
        assert close(follow, model.forward([Feed(fresh, [5])])[0].logits)
        model.release(fresh)
        model.release(sequence)


def test_wrong_plans_are_refused(subject: Subject) -> None:
    model = subject("llama", True)
    sequence = opened(model)
    everything = frozenset(range(model.num_layers))
    for plan, words in (
        (LayerPlan(stop=9), "out of range"),
        (LayerPlan(stop=0), "out of range"),
        (LayerPlan(skip_mlp=frozenset({7})), "layer 7"),
        (LayerPlan(skip_attention=everything, skip_mlp=everything), "leaves no sublayer"),
    ):
        with pytest.raises(ValueError, match=words):
            model.forward_part([Feed(sequence, [1])], plan)
    model.forward([Feed(sequence, [1])])
    with pytest.raises(ValueError, match="other layers"):
        model.forward_part([Feed(sequence, [1])], LayerPlan(stop=1))
    model.commit(sequence, [0])
    model.forward_part([Feed(sequence, [1])], LayerPlan(stop=1))
    with pytest.raises(ValueError, match="only some layers were run"):
        model.commit(sequence, [0])
    model.release(sequence)


def test_models_that_cannot_are_named(subject: Subject) -> None:
    opt = subject("opt", False)
    sequence = opened(opt)
    with pytest.raises(CapabilityError, match="OPTDecoderLayer"):
        opt.forward_part([Feed(sequence, [1])], LayerPlan(skip_mlp=frozenset({0})))
    opt.release(sequence)
    table: LanguageModel = TableModel(lambda _: [0.5, 0.5], 2)
    with pytest.raises(CapabilityError, match="no layers"):
        table.forward_part([Feed(table.open(), [1])], LayerPlan(stop=1))
