"""A network that is changed after ``ft.load``: the next request gets the text of the network as it is now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import new_model, prompt_of, save
from seq2seq import t5
from torch import nn
from transformers import LlamaForCausalLM

import foretoken as ft
from foretoken.llm import Llm
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models import wrap
from test_hub import llama

PROMPT = [5, 3, 9, 5, 3, 8, 1, 4, 9, 9, 2, 7, 5, 3, 9, 11, 12, 13, 5, 3]  # long enough to be kept
SHORT: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
DRAFTERS = [None, "ngram,n=2,k=3", "early_exit,layer=1", "quantized,bits=8,k=3"]


def truth(model: Any) -> list[int]:
    """The greedy answer of the network's own forward over the whole text, as it is now."""
    text = list(PROMPT)
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(SHORT["max_new_tokens"]):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    model.train(training)
    return text[len(PROMPT) :]


def answer(llm: Llm) -> list[int]:
    return list(llm.generate(PROMPT, **SHORT).token_ids)


def steps(model: Any) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.tensor([PROMPT])
    for _ in range(3):
        model(ids, labels=ids.flip(1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def other_weights(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: weight + 0.2 * torch.randn_like(weight) for name, weight in model.state_dict().items()}


def new_state(model: Any) -> None:
    model.load_state_dict(other_weights(model))


def assigned_state(model: Any) -> None:
    model.load_state_dict(other_weights(model), assign=True)
    model.tie_weights()


def merged(model: Any) -> None:
    """A low-rank update, merged as PEFT does it: through ``weight.data``, which PyTorch does not count."""
    torch.manual_seed(6)
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


class LowRank(nn.Module):
    """An adapter that can be switched on."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def adapter(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)


def hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * -2.0)


def pre_hook_of_a_linear(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda module, args: (args[0] * -3.0,))


def round_trip(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def wider(model: Any) -> None:
    new_state(model)
    model.double()


def forward_of_an_mlp(model: Any) -> None:
    model.model.layers[0].mlp.forward = lambda x: x * 0


def forward_of_a_layer(model: Any) -> None:
    model.model.layers[1].forward = lambda x, *args, **kwargs: x


def forward_of_the_head(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: -own(x)


def forward_of_the_model(model: Any) -> None:
    own = model.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = -out.logits
        return out

    model.forward = forward


def scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 3.0


def epsilon(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.1)


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.1


def other_class(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Nothing", (type(mlp),), {"forward": lambda self, x: x * 0})


CHANGES = [
    steps, new_state, assigned_state, merged, adapter, hook, pre_hook_of_a_linear, round_trip, wider,
    forward_of_an_mlp, forward_of_a_layer, forward_of_the_head, forward_of_the_model, scaling, epsilon, frequencies,
    other_frequencies, other_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_next_text_is_that_of_the_changed_network(change: Callable[[Any], None], tied: bool) -> None:
    model = llama(eos=None)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    llms = [ft.load(model, drafter=drafter) for drafter in DRAFTERS]
    before = truth(model)
    assert all(answer(llm) == before for llm in llms)
    change(model)
    after = truth(model)
    assert after != before or change is round_trip, "a change that changes nothing shows nothing"
    training = model.training
    for llm in llms:
        again = llm.generate(PROMPT, **SHORT)
        assert list(again.token_ids) == after
        assert again.stats.num_prompt_tokens_computed == len(PROMPT), "what was kept is worth nothing now"
        assert llm.generate(PROMPT, **SHORT).stats.num_prompt_tokens_computed < len(PROMPT)
    assert model.training == training


@pytest.mark.parametrize("drafter", ["quantized,bits=8,k=3", "sparse_kv,k=3"])
def test_drafts_with_the_targets_own_weights_are_those_of_the_changed_ones(drafter: str) -> None:
    model = llama(eos=None)
    llm = ft.load(model, drafter=drafter, controller="constant,k=3")
    answer(llm)
    new_state(model)
    for each in (llm, ft.load(model, drafter=drafter, controller="constant,k=3")):
        assert each.generate(PROMPT, **SHORT).stats.acceptance_rate > 0.9


def test_a_quantised_draft_goes_on_when_its_target_is_unpacked(tmp_path: Path) -> None:
    llm = ft.load(save(new_model("llama"), tmp_path), drafter="quantized,bits=8,k=3", controller="constant,k=3")
    before = llm.generate(PROMPT, **SHORT)
    llm.target.unpack()
    after = llm.generate(PROMPT, **SHORT)
    assert after.token_ids == before.token_ids and after.stats.acceptance_rate == before.stats.acceptance_rate


def test_a_forward_that_is_put_on_a_class_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models loaded before, new loads and ``generate`` run it, and the old one again once that is put back."""
    model, ids = llama(eos=None), torch.tensor([PROMPT])
    llm, kept = ft.load(model, drafter="ngram"), ft.CustomGenerate(drafter="ngram")

    def check(expected: list[int]) -> None:
        assert answer(llm) == answer(ft.load(model, drafter="ngram")) == expected
        for hook in (kept, ft.custom_generate):
            output = model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=hook)
            assert output[0, len(PROMPT) :].tolist() == expected

    before = truth(model)
    check(before)
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x * 0)
        assert truth(model) != before
        check(truth(model))
    check(before)


def late(attention: Any) -> Callable[..., Any]:
    """A forward whose effect begins at position 32, behind the texts of the check at load."""
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out, weights = own(*args, **kwargs)
        return out * torch.where(kwargs["position_ids"] >= 32, -3.0, 1.0)[..., None], weights

    return forward


def own_forwards(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = late(layer.self_attn)


def own_classes(model: Any) -> None:
    for layer in model.model.layers:
        plain = type(layer.self_attn)
        forward = late(SimpleNamespace(forward=plain.forward))
        layer.self_attn.__class__ = type("Late", (plain,), {"forward": forward})


@pytest.mark.parametrize("change", [own_forwards, own_classes])
def test_code_with_an_effect_on_long_texts_only_is_run(change: Callable[[Any], None]) -> None:
    model, ids = llama(eos=None), torch.tensor([PROMPT * 3])

    def written(**options: Any) -> list[int]:
        output = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
        return output[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    llms = [ft.load(model, drafter=None), ft.load(model, drafter="ngram", exact="bitwise")]
    before = written()
    assert all(llm.generate(ids[0].tolist(), **SHORT).token_ids == before for llm in llms)
    change(model)
    after = written()
    assert after != before and written(custom_generate=ft.custom_generate) == after
    for llm in (*llms, ft.load(model, drafter=None)):
        assert llm.generate(ids[0].tolist(), **SHORT).token_ids == after
        [refused] = [each["why"] for each in llm.describe()["refused"] if each["path"] == "lean forward"]
        assert "model.layers.0.self_attn" in refused and "another forward than its Transformers class" in refused


class Extended(LlamaForCausalLM):
    """A subclass that a user may write around a model: nothing that a forward runs is another."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.note = "mine"

    def num_own_layers(self) -> int:
        return len(self.model.layers)


class Handed(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(("kind", "lean"), [(Extended, True), (Handed, False)])
def test_a_subclass_is_lean_unless_it_overrides_something(kind: Any, lean: bool) -> None:
    model = llama(eos=None)
    model.__class__ = kind
    llm = ft.load(model, drafter=None)
    assert answer(llm) == truth(model) and llm.target.is_lean == lean  # type: ignore[attr-defined]


def test_experts_with_code_of_their_own_are_called_by_the_lean_forward() -> None:
    model = new_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.forward = partial(lambda own, x: -own(x), layer.mlp.forward)
    llm = ft.load(model, drafter=None)
    assert llm.target.is_lean and answer(llm) == truth(model)  # type: ignore[attr-defined]


def test_a_hook_that_is_taken_away_gives_the_lean_forward_back() -> None:
    model = llama(eos=None)
    llm = ft.load(model, drafter=None)
    before = truth(model)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * -2.0)
    assert answer(llm) == truth(model) != before and not llm.target.is_lean  # type: ignore[attr-defined]
    handle.remove()
    assert answer(llm) == before and llm.target.is_lean  # type: ignore[attr-defined]


def test_hooks_that_are_there_from_the_beginning_are_called() -> None:
    model, calls = llama(eos=None), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: calls.append(1))
    llm = ft.load(model, drafter=None)
    calls.clear()
    assert answer(llm) == truth(model) and calls
    assert not llm.target.is_lean  # type: ignore[attr-defined]


def test_hidden_states_that_were_asked_for_once_cost_nothing_later() -> None:
    """Transformers leaves hooks of its own on a model then."""
    model = llama(eos=None)
    llm = ft.load(model, drafter=None)
    model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True)
    answer(llm)
    assert llm.target.is_lean and llm.target.weights_version == 0  # type: ignore[attr-defined]
    assert ft.load(model, drafter=None).target.is_lean  # type: ignore[attr-defined]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_are_loaded_and_packed_here(tied: bool, dtype: str, tmp_path: Path) -> None:
    """Their linear layers are ours and may hold no weights; norms, embeddings and hooks are within reach."""
    path = save(new_model("llama", tie_word_embeddings=tied), tmp_path / "model")
    llm = ft.load(path, drafter="ngram", dtype=dtype)
    network, ids = llm.target.model, prompt_of(24)  # type: ignore[attr-defined]
    before = llm.generate(ids, **SHORT).token_ids
    torch.manual_seed(3)
    with torch.no_grad():
        network.get_input_embeddings().weight.copy_(torch.randn_like(network.get_input_embeddings().weight))
        network.model.norm.weight.mul_(torch.linspace(0.2, 3.0, len(network.model.norm.weight)))
    after = llm.generate(ids, **SHORT).token_ids
    network.save_pretrained(tmp_path / "changed", state_dict=unpacked(network))
    assert after == ft.load(tmp_path / "changed", drafter=None, dtype=dtype).generate(ids, **SHORT).token_ids != before
    calls: set[Any] = set()
    hooked = {network.model.layers[0].self_attn.q_proj, network.model.layers[1].mlp}
    for module in hooked:
        module.register_forward_hook(lambda module, args, out: calls.add(module))
    again = llm.generate(ids, **SHORT).token_ids
    assert calls == hooked
    assert again == after or dtype == "bfloat16", "near-ties: this is the public forward"


def unpacked(network: Any) -> dict[str, torch.Tensor]:
    """All weights, those of packed layers included."""
    weights = dict(network.state_dict())
    for name, module in network.named_modules():
        if hasattr(module, "projection"):
            weights[f"{name}.weight"] = module.weight
    return weights


def test_requests_that_run_while_the_model_changes_end_with_an_error() -> None:
    """Not with a text of neither; the next one has the text of the new weights."""
    model = llama(eos=None)
    llm = ft.load(model, drafter="ngram")
    stream = llm.stream(PROMPT, **SHORT)
    next(stream)
    new_state(model)
    assert answer(llm) == truth(model)
    with pytest.raises(ValueError, match=r"the model was changed .* while this request ran: submit it again"):
        list(stream)
    stream = llm.stream(PROMPT, **SHORT)
    next(stream)
    steps(model)
    with pytest.raises(ValueError, match="the model was changed"):  # noticed when it ends
        list(stream)
    assert answer(llm) == truth(model)


def test_the_hook_ends_a_call_whose_model_changes() -> None:
    model = llama(eos=None)

    def late(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPT) + 5:
            new_state(model)
        return scores

    with pytest.raises(ValueError, match="the model was changed"):
        model.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, logits_processor=[late], custom_generate=ft.custom_generate
        )


def test_a_draft_model_that_is_handed_in_and_trained_is_followed() -> None:
    model, draft = llama(eos=None), llama(eos=None, seed=1)
    llm = ft.load(model, drafter=ModelDrafter(wrap(draft), k=3), controller="constant,k=3")
    expected = truth(model)
    assert answer(llm) == expected
    draft.load_state_dict(model.state_dict())
    again = llm.generate(PROMPT, **SHORT)
    assert list(again.token_ids) == expected
    assert again.stats.num_accepted_tokens == again.stats.num_draft_tokens > 0, "it is the target now"


@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
def test_a_resized_vocabulary_is_told(family: str) -> None:
    model = t5() if family == "t5" else new_model(family)
    size = model.config.vocab_size
    llm = ft.load(model, drafter=None)
    llm.generate([5, 6, 7], **SHORT)
    model.resize_token_embeddings(size + 9, mean_resizing=False)
    for prompt in ([size + 2, 5], [5, 6, 7]):
        with pytest.raises(ValueError, match=f"^the vocabulary has changed from {size} to {size + 9}: load the model"):
            llm.generate(prompt, **SHORT)
    assert ft.load(model, drafter=None).generate([size + 2, 5], **SHORT).token_ids


def test_a_draft_model_whose_vocabulary_is_resized_is_told() -> None:
    draft = llama(eos=None, seed=1)
    llm = ft.load(llama(eos=None), drafter=ModelDrafter(wrap(draft), k=3), controller="constant,k=3")
    answer(llm)
    draft.resize_token_embeddings(draft.config.vocab_size + 9, mean_resizing=False)
    with pytest.raises(ValueError, match=r"the vocabulary has changed from .* load the model again"):
        answer(llm)


@pytest.mark.parametrize("family", ["bloom", "qwen3_next"])
def test_models_without_trees(family: str) -> None:
    """ALiBi and recurrent layers: nothing is fused, what their caches hold is still another network's."""
    from hybrids import hybrid

    model = new_model("bloom") if family == "bloom" else hybrid(family)
    ids = prompt_of(24)
    llm = ft.load(model, drafter="ngram,n=2,k=3")
    llm.generate(ids, **SHORT)
    stream = llm.stream(ids, **SHORT)
    next(stream)
    new_state(model)
    after = llm.generate(ids, **SHORT).token_ids
    assert after == ft.load(model, drafter=None).generate(ids, **SHORT).token_ids
    with pytest.raises(ValueError, match="the model was changed"):
        list(stream)
