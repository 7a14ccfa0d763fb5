"""Hydra's heads: what they start as, what they read, the tree they fill, and that they learn what Medusa cannot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.hydra import HydraConfig, HydraHeads
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch, Recipe
from toys import engine, llamas, outputs, serve

PROMPT = [3, 1, 4, 1, 5]
LOOSE = Budget(max_depth=8, max_nodes=64)


def context_with(hidden: Tensor, tokens: list[int] = PROMPT) -> Context:
    context = Context(0, list(tokens), len(tokens), Sampler(SamplingParams()), Rng(0))
    context.hidden = {"last": hidden}
    return context


def heads(parts: TargetParts, seed: int | None = 0, **shape: Any) -> HydraHeads:
    """Heads with random weights, or fresh ones without a seed."""
    layer = asdict(LayerConfig.of_target(parts.config))
    net = HydraHeads(HydraConfig(parts.hidden_size, parts.vocab_size, **{"heads": 3, "layer": layer, **shape}))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in net.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return net


def states(parts: TargetParts, count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, parts.hidden_size, generator=torch.Generator().manual_seed(seed))


def bigram(vocab: int, follower: list[int]) -> HuggingFaceModel:
    """A network that says ``follower[t]`` after token t, whatever came before; its states are one-hot times sqrt(V)."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=vocab, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(follower), torch.arange(vocab)] = 5.0
    model.generation_config.eos_token_id = None
    return HuggingFaceModel(model)


# -- what the heads are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [False, True])
def test_a_fresh_head_says_what_the_target_says(prefix: bool) -> None:
    target = llamas()[0]
    parts = TargetParts(target)
    net = heads(parts, seed=None, prefix=prefix, layers=2)
    rows = target.forward([Feed(target.open(), PROMPT)], ["last"])[0]
    hidden = rows.taps["last"].float()
    if net.prefix is not None:
        hidden = net.prefix(None, hidden[None], torch.arange(len(PROMPT))[None])[0]
    seen = torch.cat([hidden, states(parts, 3).repeat(1, 3)[:1].expand(len(hidden), -1)], -1)
    for head in range(3):
        logits = parts.logits(net(head, seen[:, : (head + 2) * parts.hidden_size]).double())
        assert torch.allclose(logits, rows.logits, atol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_without_embeddings_hydra_is_medusa(own: bool) -> None:
    parts = TargetParts(llamas()[0])
    size = parts.hidden_size
    medusa = MedusaHeads(MedusaConfig(size, parts.vocab_size, 3, layers=2, own_projection=own))
    hydra = heads(parts, layers=2, own_projection=own)
    with torch.no_grad():
        for i in range(3):
            for weight in (hydra.first[i].weight, hydra.residual[i].weight):
                weight[:, size:] = 0
            hydra.residual[i].weight[:, :size] = torch.eye(size)
            for medusa_layer, hydra_layer in zip(medusa.blocks[i], [hydra.first[i], *hydra.blocks[i]], strict=True):
                medusa_layer.bias.copy_(hydra_layer.bias)
                medusa_layer.weight.copy_(hydra_layer.weight[:, :size])
        for medusa_layer, hydra_layer in zip(medusa.projections, hydra.projections, strict=True):
            medusa_layer.weight.copy_(hydra_layer.weight)
    contexts = [context_with(row[None]) for row in states(parts, 5)]
    budgets = [LOOSE] * 5
    hydra_trees = HydraDrafter(hydra, parts, 12).propose_batch(contexts, budgets)
    medusa_trees = MedusaDrafter(medusa, parts, 12).propose_batch(contexts, budgets)
    assert hydra_trees == medusa_trees and len(hydra_trees[0]) == 13
    with torch.no_grad():
        hydra.first[1].weight[:, size:] = 1.0  # head 1 now sees what was drafted
    assert HydraDrafter(hydra, parts, 12).propose_batch(contexts, budgets) != medusa_trees


# -- the tree --------------------------------------------------------------------------------------------------------


def worked_example() -> HydraDrafter:
    """One-hot embeddings, a target that repeats itself, and heads that look at the last token they read only."""
    parts = TargetParts(bigram(4, [0, 1, 2, 3]))
    net = heads(parts, seed=None, heads=2)
    first = torch.tensor([[0, 0, 0, 0], [0, 3, 2, 1], [0, 0, 0, 0], [0, 0, 0, 0]])  # row: the root, column: liking
    second = torch.tensor([[0, 0, 0, 0], [5, 0, 1, 0], [0, 0, 0, 5], [0, 0, 0, 0]])  # row: the token above
    with torch.no_grad():
        for head, table in enumerate((first, second)):
            net.residual[head].weight.zero_()
            net.residual[head].weight[:, -4:] = table.T
    return HydraDrafter(net, parts, nodes=5, accuracies=[[0.5, 0.4], [0.6, 0.3]])


def test_the_worked_example() -> None:
    """By value the shape is (0) .5, (1) .4, (00) .3, (10) .24, (01) .15; below root 1 there are 1 and 2.

    Head 1 goes on with 0 or 2 after 1, and with 3 after 2: other tokens below other parents.
    """
    drafter = worked_example()
    assert drafter.choices == [(0,), (1,), (0, 0), (1, 0), (0, 1)] and drafter.max_depth == 2
    tree = drafter.propose(context_with(torch.ones(1, 4), [0, 1]), LOOSE)
    assert tree.tokens == (1, 1, 2, 0, 3, 2) and tree.parents == (-1, 0, 0, 1, 2, 1)


def test_budgets_cut_the_worked_example() -> None:
    drafter, context = worked_example(), context_with(torch.ones(1, 4), [0, 1])
    cut = drafter.propose(context, Budget(max_depth=2, max_nodes=3))
    assert cut.tokens == (1, 1, 2, 0) and cut.parents == (-1, 0, 0, 1)
    assert drafter.propose(context, Budget(max_depth=1, max_nodes=9)).tokens == (1, 1, 2)
    assert drafter.propose(context, Budget(max_depth=2, max_nodes=1)).tokens == (1, 1)
    for empty in (Budget(max_depth=0), Budget(max_nodes=0)):
        assert drafter.propose(context, empty).tokens == (1,)
    assert drafter.propose(context_with(torch.empty(0, 4), [1]), LOOSE).tokens == (1,)


@pytest.mark.parametrize("own", [False, True])
def test_every_node_is_what_its_head_says_of_its_own_path(own: bool) -> None:
    """Against one plain call per node."""
    parts = TargetParts(llamas()[0])
    drafter = HydraDrafter(heads(parts, layers=2, own_projection=own), parts, nodes=14)
    state = states(parts, 1)
    tree = drafter.propose(context_with(state), LOOSE)
    assert len(tree) == 15
    for node, choice in enumerate(drafter.choices, 1):
        level = len(choice) - 1
        above = [tree.tokens[n] for n in tree.path(node)[:-1]]
        assert len(above) == level + 1
        inputs = torch.cat([state[0], parts.embedding(above).float().flatten()])[None]
        with torch.inference_mode():
            logits = drafter.project(level, drafter.heads(level, inputs))[0]
        assert tree.tokens[node] == int(logits.topk(choice[-1] + 1).indices[-1])
    below = {tuple(tree.tokens[c] for c in tree.children[n]) for n in tree.children[0] if len(tree.children[n]) > 1}
    assert len(below) > 1  # the same ranks are other tokens elsewhere


def test_a_batch_is_its_requests() -> None:
    parts = TargetParts(llamas()[0])
    drafter = HydraDrafter(heads(parts), parts)
    contexts = [context_with(row[None], [*PROMPT, i]) for i, row in enumerate(states(parts, 5))]
    contexts[2].hidden = {}
    budgets = [LOOSE, Budget(2, 9), LOOSE, Budget(1, 64), Budget(8, 0)]
    together = drafter.propose_batch(contexts, budgets)
    assert together == [drafter.propose(c, b) for c, b in zip(contexts, budgets, strict=True)]
    assert [len(tree) for tree in together][2::2] == [1, 1] and together[0].tokens[1:] != together[1].tokens[1:]


def test_more_ranks_than_tokens() -> None:
    parts = TargetParts(bigram(2, [1, 0]))
    tree = HydraDrafter(heads(parts), parts, nodes=30).propose(context_with(torch.ones(1, 2), [0, 1]), LOOSE)
    assert all(len(set(children)) == len(children) <= 2 for children in tree.children) and len(tree) > 5


# -- the prefix layer ------------------------------------------------------------------------------------------------


def test_a_prefix_layer_reads_the_whole_text_round_by_round() -> None:
    """In every round of an engine the heads get the states that one causal pass over the text gives."""
    target = llamas(torch.float32)[0]
    parts = TargetParts(target)
    net = heads(parts, prefix=True)
    drafter = HydraDrafter(net, parts, nodes=6, target=target)
    assert net.prefix is not None
    inputs: list[tuple[list[int], Tensor]] = []
    read = drafter.read_states

    def spied(contexts: Any) -> Tensor:
        rows = read(contexts)
        inputs.extend((list(c.tokens), row) for c, row in zip(contexts, rows, strict=True))
        return rows

    drafter.read_states = spied  # type: ignore[method-assign]
    prompts = [PROMPT, PROMPT[:2], [7], [5, 6, 7, 8, 9, 1, 2]]
    runs = serve(engine(target, drafter, max_batch=3), [Request(prompt, max_new_tokens=9) for prompt in prompts])
    assert all(not run.context.state for run in runs) and len(inputs) > 12
    for tokens, row in inputs:
        text = torch.tensor([tokens[:-1]])
        hidden = parts.features(text, ("last",))["last"]
        with torch.no_grad():
            whole = net.prefix(None, hidden, torch.arange(text.shape[1])[None])[0, -1]
        assert torch.allclose(row, whole, atol=1e-4)
        assert not torch.allclose(row, hidden[0, -1], atol=1e-2)


def test_a_fresh_prefix_layer_changes_no_draft() -> None:
    def drafts(prefix: bool) -> list[tuple[list[int], int]]:
        target = llamas(torch.float32)[0]
        parts = TargetParts(target)
        drafter = HydraDrafter(heads(parts, seed=None, prefix=prefix), parts, nodes=6, target=target)
        runs = serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=12)])
        return [(run.output, run.stats.num_accepted_tokens) for run in runs]

    assert drafts(True) == drafts(False)


def test_a_prompt_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.methods.drafters.reading.PREFILL_CHUNK", 4)
    target = llamas(torch.float32)[0]
    parts = TargetParts(target)
    drafter = HydraDrafter(heads(parts, prefix=True), parts, nodes=6, target=target)
    pieces = outputs(engine(target, drafter), [Request(PROMPT * 3, max_new_tokens=8)])
    assert pieces == outputs(engine(llamas(torch.float32)[0]), [Request(PROMPT * 3, max_new_tokens=8)])


def test_saved_and_loaded_with_its_prefix_layer(tmp_path: Path) -> None:
    target = llamas(torch.float32)[0]
    parts = TargetParts(target)
    net = heads(parts, prefix=True, layers=2).bfloat16().float()
    config = HydraConfig(parts.hidden_size, parts.vocab_size, 3, 2, prefix=True, layer=asdict(net.prefix.layer.config))
    save_drafter(tmp_path, "hydra", asdict(config), net, parts.fingerprint(), {"accuracies": [[0.5, 0.4]] * 3})
    loaded = build_drafter(f"hydra:{tmp_path},nodes=5", target)
    assert isinstance(loaded, HydraDrafter) and loaded.max_nodes == 5
    original = HydraDrafter(net, parts, 5, [[0.5, 0.4]] * 3, target=target)
    runs = [serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=9)])[0] for drafter in (original, loaded)]
    assert runs[0].stats.num_draft_tokens == runs[1].stats.num_draft_tokens > 0
    assert runs[0].stats.num_accepted_tokens_per_pos == runs[1].stats.num_accepted_tokens_per_pos
    assert loaded.heads.state_dict().keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], value)


# -- training --------------------------------------------------------------------------------------------------------


def trained(method: str, target: HuggingFaceModel, steps: int, settings: dict[str, str]) -> tuple[Recipe, Any]:
    """A recipe after some steps on random text, and what it measures on more of it."""
    torch.manual_seed(0)
    parts = TargetParts(target)
    recipe = find_recipe(method)(target, parts, settings)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(recipe.net.parameters(), lr=0.02)

    def batch() -> Batch:
        tokens = torch.randint(parts.vocab_size, (4, 33), generator=generator)
        return Batch(tokens, parts.features(tokens[:, :-1], ("last",)), parts)

    for _ in range(steps):
        recipe.loss(batch(), generator).backward()
        optimizer.step()
        optimizer.zero_grad()
    recipe.net.eval()
    return recipe, recipe.measure([batch()])


@pytest.mark.parametrize("settings", [{}, {"prefix": "true"}, {"own_projection": "true", "layers": "2"}])
def test_a_bigram_target_is_learned_whole(settings: dict[str, str]) -> None:
    """K + 1 tokens per call: on random text only the token before a place says what the target says at it."""
    follower = [7, 4, 1, 10, 8, 0, 9, 3, 5, 11, 6, 2]
    target = bigram(12, follower)
    recipe, measured = trained("hydra", target, 60, {"heads": "3", **settings})
    assert [row[0] for row in measured["accuracies"]] == [1.0] * 3
    run = serve(engine(target, recipe.drafter(measured)), [Request([4, 4], max_new_tokens=20)])[0]
    expected = [4]
    for _ in range(20):
        expected.append(follower[expected[-1]])
    assert run.output == expected[1:]
    assert run.stats.mean_acceptance_length == 4.0 and run.stats.num_drafts == 5


def test_medusa_cannot_learn_it() -> None:
    target = bigram(12, [7, 4, 1, 10, 8, 0, 9, 3, 5, 11, 6, 2])
    _, measured = trained("medusa", target, 60, {"heads": "3"})
    assert all(row[0] < 0.35 for row in measured["accuracies"])


def test_accuracies_are_those_of_every_head_below_a_right_path() -> None:
    """The measured accuracies equal a plain count over the places of a text."""
    target = llamas(torch.float32)[0]
    parts = TargetParts(target)
    recipe: Any = find_recipe("hydra")(target, parts, {"heads": "2"})
    recipe.net = heads(parts, heads=2)
    text = torch.randint(parts.vocab_size, (1, 12), generator=torch.Generator().manual_seed(3))
    batch = Batch(text, parts.features(text[:, :-1], ("last",)), parts)
    accuracies = recipe.measure([batch])["accuracies"]
    tokens, hidden = text[0].tolist(), batch.taps["last"][0]
    for head in range(2):
        hits = torch.zeros(10)
        for place in range(8):  # 11 states, and the target's word two places on for the last head
            read = torch.cat([hidden[place], parts.embedding(tokens[place + 1 : place + 2 + head]).flatten()])
            best = parts.logits(recipe.net(head, read[None])).topk(10).indices[0]
            hits += best == parts.logits(hidden[place + 1 + head]).argmax()
        assert accuracies[head] == pytest.approx((hits / 8).tolist())


def test_dropout_is_drawn_from_the_step() -> None:
    target = llamas(torch.float32)[0]
    parts = TargetParts(target)
    recipe: Any = find_recipe("hydra")(target, parts, {"dropout": "0.5"})
    recipe.net = heads(parts, heads=4)
    tokens = torch.randint(parts.vocab_size, (2, 20), generator=torch.Generator().manual_seed(3))
    batch = Batch(tokens, parts.features(tokens[:, :-1], ("last",)), parts)
    loss = [float(recipe.loss(batch, torch.Generator().manual_seed(seed)).detach()) for seed in (1, 1)]
    assert loss[0] == loss[1]
    place = torch.zeros(1, dtype=torch.long)
    first, second = (recipe.states(batch, place, place, torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    whole = recipe.states(batch, place, place)[0]  # as when accuracies are measured
    assert not torch.equal(first, second) and not torch.equal(first, whole) and not torch.equal(second, whole)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_bad_shapes_and_options() -> None:
    parts = TargetParts(llamas()[0])
    for shape in ({"heads": 0}, {"layers": 0}):
        with pytest.raises(ValueError, match="heads >= 1 and layers >= 1"):
            HydraConfig(4, 4, **shape)
    with pytest.raises(ValueError, match="shape of the layer"):
        HydraConfig(4, 4, prefix=True)
    with pytest.raises(ValueError, match="hydra needs nodes >= 1"):
        HydraDrafter(heads(parts), parts, nodes=0)
    with pytest.raises(ValueError, match="needs the target"):
        HydraDrafter(heads(parts, prefix=True), parts)
    recipe = find_recipe("hydra")
    for settings, words in (
        ({"labels": "x"}, "target or text"),
        ({"decay": "0"}, "decay must be above 0"),
        ({"dropout": "1"}, "dropout must be"),
        ({"layer": "3"}, "unknown setting 'layer'"),
        ({"heads": "many"}, "type int"),
    ):
        with pytest.raises(ValueError, match=words):
            recipe(llamas()[0], parts, settings)


def test_the_networks_own_parts_start_in_place() -> None:
    """The residual path is the state alone, blocks are zero, own projections are the target's."""
    target = llamas(torch.float32)[0]
    parts = TargetParts(target)
    recipe: Any = find_recipe("hydra")(target, parts, {"own_projection": "true", "layers": "2"})
    size = parts.hidden_size
    for i, residual in enumerate(recipe.net.residual):
        assert residual.weight.shape == (size, (i + 2) * size)
        assert torch.equal(residual.weight, torch.eye(size, (i + 2) * size))
    blocks = [*recipe.net.first, *(block for head in recipe.net.blocks for block in head)]
    assert len(blocks) == 8 and all(isinstance(b, nn.Linear) and not b.weight.any() for b in blocks)
    assert all(torch.equal(p.weight, parts.head.weight) for p in recipe.net.projections)
