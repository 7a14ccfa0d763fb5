"""The multi-token prediction head in a target's own checkpoint: its network, its layouts, and what it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foretoken as ft
from foretoken.loading import load_model, read_head
from foretoken.models.base import Feed
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.mtp import TargetLayerModule, target_layer_module
from foretoken.models.forward.heads.stacked import StackedModel, StackedModules
from foretoken.models.forward.parts import TargetParts
from native_checkpoints import (
    FAMILIES,
    SIZE,
    VOCAB,
    add_tensors,
    published,
    save_family,
    save_target,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TREES = {"glm4_moe": "float64", "deepseek_v3": "float32"}  # Transformers' products of experts know no float64


def states_of(network: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        states: Tensor = network.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return states


# -- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_was_published_is_what_is_loaded(family: str, tmp_path: Path) -> None:
    """Every family's module comes back bit for bit, experts stacked again, and computes the same."""
    _, (module,) = save_family(tmp_path, family)
    target = load_model(tmp_path, dtype="float32")
    (head,) = read_head(TargetParts(target).network)
    loaded = target_layer_module(TargetParts(target).network, head)
    assert loaded.state_dict().keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    embeddings, states = torch.randn(2, 5, SIZE), torch.randn(2, 5, SIZE)
    with torch.no_grad():
        places = torch.arange(5).expand(2, 5)
        # Weights at other addresses are summed in another order.
        assert torch.allclose(loaded(embeddings, states, places), module(embeddings, states, places), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "glm4_moe"])
def test_the_norms_are_the_targets_own_class(family: str, tmp_path: Path) -> None:
    network = save_target(tmp_path, family)
    module = TargetLayerModule(network, experts=True)
    assert type(module.norm) is type(network.model.norm)
    module.norm.weight.data.fill_(0.5)
    x = torch.randn(4, SIZE)
    scale = 1.5 if family.startswith("qwen") else 0.5  # Qwen's are centred at zero
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + network.config.rms_norm_eps) * scale
    assert torch.allclose(module.norm(x), expected, atol=1e-6)


def test_the_layer_is_like_the_last_full_attention_layer(tmp_path: Path) -> None:
    network = save_target(tmp_path, "qwen3_5_text")  # recurrent, full, recurrent
    module = TargetLayerModule(network)
    assert module.layer_index == 1
    assert hasattr(module.layer, "self_attn") and not hasattr(module.layer, "linear_attn")


@pytest.mark.parametrize("feed", ["post_norm", "pre_norm"])
def test_an_oracle_reproduces_the_targets_head(feed: str, tmp_path: Path) -> None:
    """fc = [0, I] and a layer that adds nothing: the logits are lm_head(norm(norm_h(h)))."""
    network = save_target(tmp_path, "qwen3_5_text")
    module = TargetLayerModule(network, feed=feed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()  # zero-centred norms then only normalise
        module.eh_proj.weight.copy_(torch.cat([torch.zeros(SIZE, SIZE), torch.eye(SIZE)], 1))
        module.norm.load_state_dict(network.model.norm.state_dict())
        h = states_of(network, PROMPT)
        output = module(torch.randn(1, 8, SIZE), h[None], torch.arange(8)[None])[0]
        got = network.lm_head(module.head_state(output))
        expected = network.lm_head(network.model.norm(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)))
    assert torch.allclose(got, expected, atol=1e-4)


def by_hand(module: TargetLayerModule, network: Any, embeddings: Tensor, states: Tensor, places: Tensor) -> Tensor:
    """[n, D] outputs of a whole text, written from the equations and Transformers' eager attention."""
    n = len(states)
    x = torch.cat([module.enorm(embeddings), module.hnorm(states)], -1) @ module.eh_proj.weight.T
    rotary = network.model.rotary_emb(x[None], places[None])
    mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
    out = module.layer(x[None], position_embeddings=rotary, attention_mask=mask, position_ids=places[None])
    hidden: Tensor = module.norm(out[0] if isinstance(out, tuple) else out)[0]
    return hidden


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_text"])
def test_the_first_draft_equals_a_computation_by_hand(family: str, tmp_path: Path) -> None:
    """One draft token after a text: pairs of token t + 1 and the state of t, read in two pieces through the cache."""
    network, (module,) = save_family(tmp_path, family)
    states = states_of(network, PROMPT)
    parts = TargetParts(load_model(tmp_path, dtype="float32"))
    model = FeatureModel(target_layer_module(parts.network, read_head(parts.network)[0]), parts, load_model(tmp_path))
    tokens = [*PROMPT[1:], 7]
    with torch.no_grad():
        expected = by_hand(
            module, network, network.get_input_embeddings()(torch.tensor(tokens)), states, torch.arange(8)
        )
    sequence = model.open()
    first = model.forward([Feed(sequence, tokens[:5], states=states[:5])])[0]
    model.commit(sequence, range(5))
    rest = model.forward([Feed(sequence, tokens[5:], states=states[5:])])[0]
    got = torch.cat([first.taps["state"], rest.taps["state"]])
    assert torch.allclose(got, expected, atol=1e-4)
    logits = network.lm_head(expected[-1])
    assert float((rest.logits[-1] - logits).detach().abs().max()) < 0.05 * float(logits.detach().std())
    # Planted: the state of the place before gives another answer.
    with torch.no_grad():
        late = by_hand(module, network, network.get_input_embeddings()(torch.tensor(tokens)), states.roll(1, 0),
                       torch.arange(8))  # fmt: skip
    assert float((late[-1] - expected[-1]).abs().max()) > 0.1


# -- what it drafts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TREES)
@pytest.mark.parametrize("spec", ["mtp", "mtp,width=2,nodes=6,depth=3", "mtp,feed=pre_norm"])
def test_greedy_text_is_that_of_plain_decoding(family: str, spec: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    prompts, dtype = [PROMPT, [7], PROMPT[::-1] * 2], TREES[family]
    plain = ft.load(tmp_path, None, dtype=dtype).generate(prompts, max_new_tokens=20)
    out = ft.load(tmp_path, spec, controller="constant", dtype=dtype).generate(prompts, max_new_tokens=20)
    assert [o.token_ids for o in out] == [o.token_ids for o in plain]
    assert all(o.stats.num_draft_tokens for o in out)


@pytest.mark.parametrize(("family", "count"), [("qwen3_5_text", 1), ("qwen3_5_text", 2), ("qwen3_next", 1)])
def test_hybrid_targets_draft_chains_with_their_own_head(family: str, count: int, tmp_path: Path) -> None:
    """Text and seeded samples are those of plain decoding, in a ragged batch and alone."""
    save_family(tmp_path, family, count=count)
    prompts, dtype = [PROMPT, [7]], "float64" if family == "qwen3_5_text" else "float32"
    plain = ft.load(tmp_path, None, dtype=dtype)
    llm = ft.load(tmp_path, "mtp,nodes=3,depth=3", controller="constant", dtype=dtype)
    for more in ({}, {"temperature": 1.0, "seed": [3, 4]}):
        out = llm.generate(prompts, max_new_tokens=12, **more)
        assert [o.token_ids for o in out] == [o.token_ids for o in plain.generate(prompts, max_new_tokens=12, **more)]
        assert all(o.stats.num_draft_tokens for o in out)
    assert llm.generate(PROMPT, max_new_tokens=12).token_ids == plain.generate(PROMPT, max_new_tokens=12).token_ids
    if count == 1:
        with pytest.raises(ValueError, match="linear_attention"):
            ft.load(tmp_path, "mtp,width=2", dtype=dtype)


def oracle(folder: Path, network: Any) -> None:
    """A module that hands on what the target knew: right where the target's next token depends on the state alone."""
    module = TargetLayerModule(network, experts=False)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.zero_()
        module.eh_proj.weight.copy_(torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], 1))
    add_tensors(folder, published("glm4_moe", 0, network.config.num_hidden_layers, module.state_dict()))


def test_a_perfect_head_is_always_accepted_and_one_of_the_wrong_place_is_not(tmp_path: Path) -> None:
    """A target that only looks at its last token, and a module that computes the same from the embedding it is given.

    Fed with the embedding of the token before, an off-by-one, the same module is hardly ever right.
    """
    network = save_target(tmp_path, "glm4_moe", tie_word_embeddings=False)
    with torch.no_grad():
        for layer in network.model.layers:
            for name, weight in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    weight.zero_()
    network.save_pretrained(tmp_path)
    oracle(tmp_path, network)
    out = ft.load(tmp_path, "mtp", controller="constant", dtype="float64").generate(PROMPT, max_new_tokens=40)
    assert out.stats.mean_acceptance_length > 4.4
    llm = ft.load(tmp_path, "mtp", controller="constant", dtype="float64")
    model: Any = llm.drafter.model  # type: ignore[union-attr]
    embedding = model.parts.embedding
    model.parts.embedding = lambda tokens: embedding((torch.as_tensor(tokens) + 1) % VOCAB)
    late = llm.generate(PROMPT, max_new_tokens=40)
    assert late.token_ids == out.token_ids
    assert late.stats.mean_acceptance_length < 2.0


# -- several modules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_several_modules_draft_one_token_each(family: str, tmp_path: Path) -> None:
    """Module k reads the states of module k - 1 over the whole text; the last one goes on alone.

    The engine's chain, read and drafted in pieces, equals whole passes of all modules over text and drafts.
    """
    network, modules = save_family(tmp_path, family, count=3)
    parts = TargetParts(load_model(tmp_path, dtype="float32"))
    loaded = [target_layer_module(parts.network, head) for head in read_head(parts.network)]
    model = StackedModel(StackedModules(loaded), parts, load_model(tmp_path))
    states = states_of(network, PROMPT)
    tokens = [*PROMPT[1:], 7]
    sequence = model.open()
    model.forward([Feed(sequence, tokens[:3], states=states[:3])])
    model.commit(sequence, range(3))
    row = model.forward([Feed(sequence, tokens[3:], states=states[3:])])[0]
    model.commit(sequence, range(5))
    got = [row.logits[-1]]
    for draft in (11, 12, 13):
        row = model.forward([Feed(sequence, [draft], states=row.taps["state"][-1:])])[0]
        got.append(row.logits[-1])
    for step, logits in enumerate(got):
        expected = network.lm_head(whole_passes(modules, network, states, [*tokens, 11, 12, 13], step)).detach()
        assert float((logits - expected).abs().max()) < 0.05 * float(expected.std()), step


def test_a_tree_of_several_modules_equals_whole_passes_along_its_paths(tmp_path: Path) -> None:
    """Level k of a tree is the k-th module's, on the states of each node's own path; siblings do not see each other."""
    network, modules = save_family(tmp_path, "glm4_moe", count=3)
    parts = TargetParts(load_model(tmp_path, dtype="float32"))
    loaded = [target_layer_module(parts.network, head) for head in read_head(parts.network)]
    model = StackedModel(StackedModules(loaded), parts, load_model(tmp_path))
    states, tokens = states_of(network, PROMPT), [*PROMPT[1:], 7]
    sequence = model.open()
    row = model.forward([Feed(sequence, tokens, states=states)])[0]
    model.commit(sequence, range(8))
    paths: list[list[int]] = [[]]
    outputs = [row.taps["state"][-1]]
    levels = [[(11, -1), (12, -1)], [(13, 0), (14, 1), (15, 1)], [(16, 3), (17, 2)], [(18, 5)]]
    for step, level in enumerate(levels, 1):
        fed = torch.stack([outputs[parent + 1] for _, parent in level])
        feed = Feed(sequence, [token for token, _ in level], [parent for _, parent in level], states=fed)
        row = model.forward([feed])[0]
        for (token, parent), logits, state in zip(level, row.logits, row.taps["state"], strict=True):
            paths.append([*paths[parent + 1], token])
            outputs.append(state)
            expected = network.lm_head(whole_passes(modules, network, states, [*tokens, *paths[-1]], step)).detach()
            assert float((logits - expected).abs().max()) < 0.05 * float(expected.std()), paths[-1]
    with pytest.raises(ValueError, match=r"level by level, not the steps \[1, 4\] at once"):
        model.forward([Feed(sequence, [1, 2], [-1, 6], states=torch.stack(outputs[:2]))])


@torch.no_grad()
def whole_passes(
    modules: list[TargetLayerModule], network: Any, states: Tensor, tokens: list[int], step: int
) -> Tensor:
    """[D] what the head reads at a step, from the definition: module k sees the text from token k on.

    Behind the last module its own output is its next state; what it sees of the text stays.
    """
    embed = network.get_input_embeddings()
    last = min(step, len(modules) - 1)
    x = states
    for number, module in enumerate(modules[: last + 1]):
        fed = torch.tensor(tokens[number : number + len(x)])
        places = torch.arange(number, number + len(x))
        inputs, x = x, by_hand(module, network, embed(fed), x, places)
    for extra in range(last, step):
        inputs = torch.cat([inputs, x[-1:]])
        fed = torch.tensor(tokens[last : last + len(inputs)])
        x = by_hand(modules[last], network, embed(fed), inputs, torch.arange(last, last + len(inputs)))
        assert extra >= last
    return x[-1]


def test_several_modules_keep_the_text(tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe", count=2)
    prompts = [PROMPT, [7], PROMPT[::-1] * 2]
    plain = ft.load(tmp_path, None, dtype="float64").generate(prompts, max_new_tokens=20)
    llm = ft.load(tmp_path, "mtp", controller="constant", dtype="float64")
    assert isinstance(llm.drafter.model, StackedModel)  # type: ignore[union-attr]
    assert [o.token_ids for o in llm.generate(prompts, max_new_tokens=20)] == [o.token_ids for o in plain]
    wide = ft.load(tmp_path, "mtp,width=2,nodes=6,depth=3", controller="constant", dtype="float64")
    outputs = wide.generate(prompts, max_new_tokens=20)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert all(o.stats.num_draft_tokens > 3 * o.stats.num_drafts for o in outputs)
