"""Kangaroo: the adapter and its cache, what a round costs, when a chain ends, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.kangaroo import KangarooDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.kangaroo import KangarooConfig, KangarooNet
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.models.base import CapabilityError, Feed, Rows
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import LayerPlan
from foretoken.models.network.taps import decoder_layers
from foretoken.training.recipes.kangaroo import KangarooRecipe
from models.checkpoints import new_model, prompt_of
from toys import engine, layer_runs, llamas, outputs, serve, tables

LAYERS, EXIT = 5, 2
PROMPTS = [prompt_of(9), prompt_of(1, seed=1), prompt_of(17, seed=2), prompt_of(4, seed=3)]


def model(name: str = "llama", lean: bool = True, silent_from: int | None = None) -> HuggingFaceModel:
    """A deep toy; layers from ``silent_from`` on add nothing to the residual stream."""
    network = new_model(name, num_hidden_layers=LAYERS).double()
    for layer in decoder_layers(network)[silent_from:] if silent_from is not None else ():
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return HuggingFaceModel(network, lean=lean)


def config_for(target: HuggingFaceModel, layer: int = EXIT) -> KangarooConfig:
    return KangarooConfig(**asdict(LayerConfig.of_target(target.config)), layer=layer)


def net_for(target: HuggingFaceModel, layer: int = EXIT, idle: bool = False) -> KangarooNet:
    """A lively adapter; an idle one adds nothing and ends with the target's own final norm."""
    net = KangarooNet(config_for(target, layer))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        if idle:
            net.attention.o_proj.weight.zero_()
            net.norm.weight.copy_(target.model.model.norm.weight)
    return net.eval()


def drafter_for(target: HuggingFaceModel, net: KangarooNet | None = None, **options: Any) -> KangarooDrafter:
    """With the projection in float32, so that distributions can be compared."""
    parts = TargetParts(target)
    adapter = FeatureModel(net_for(target) if net is None else net, parts, target, project=parts.logits)
    return KangarooDrafter(target, adapter, **options)


def exit_states(target: HuggingFaceModel, tokens: Sequence[int], layer: int = EXIT) -> Tensor:
    """[n, D] of a whole text, from an empty cache."""
    sequence = target.open()
    states = target.prefill(sequence, tokens, [f"layer:{layer}"])[f"layer:{layer}"]
    target.release(sequence)
    return states.float()


class Sometimes(Controller):
    """Drafts in every third round only."""

    rounds = 0

    def budget(self, context: Context, batch_size: int) -> Budget:
        self.rounds += 1
        return Budget(4, 8) if self.rounds % 3 == 0 else Budget(0, 0)


# -- the network -----------------------------------------------------------------------------------------------------


def test_place_by_place_equals_the_whole_text() -> None:
    """Reading in pieces through the cache, also behind a dropped branch, gives the outputs of one causal pass."""
    target = llamas()[0]
    net = net_for(target, 1)
    states = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = net(None, states[None], torch.arange(6)[None])[0]
        first, second = (
            net(None, states[None, :1], torch.zeros(1, 1))[0],
            net(None, states[None, 3:4], torch.ones(1, 1)),
        )
    adapter = FeatureModel(net, TargetParts(target), target)
    sequence = adapter.open()
    head = adapter.forward([Feed(sequence, [1, 2, 3], states=states[:3])])[0]
    adapter.commit(sequence, range(3))
    adapter.forward([Feed(sequence, [7, 8], [-1, -1], states=states[:2])])  # a branch that is not kept
    adapter.commit(sequence, ())
    tail = adapter.forward([Feed(sequence, [4, 5, 6], states=states[3:])])[0]
    assert torch.allclose(torch.cat([head.taps["state"], tail.taps["state"]]), whole, atol=1e-5)
    # It does look back: alone, a later place has another output, and the first one has not.
    assert torch.allclose(first[0], whole[0], atol=1e-5) and not torch.allclose(second[0, 0], whole[3], atol=1e-2)


def test_one_attention_and_two_norms() -> None:
    """q, k, v, o and the norms in front of and behind them: no MLP."""
    target = llamas()[0]
    sizes = {name: tuple(weight.shape) for name, weight in net_for(target, 1).named_parameters()}
    assert sizes == {
        "input_layernorm.weight": (16,),
        "attention.q_proj.weight": (16, 16),
        "attention.k_proj.weight": (8, 16),
        "attention.v_proj.weight": (8, 16),
        "attention.o_proj.weight": (16, 16),
        "norm.weight": (16,),
    }


@pytest.mark.parametrize("options", [{"k": 3}, {"tree": "2x2x1"}, {"tree": "3x1", "draw": "iid"}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_adapter_that_adds_nothing_is_an_early_exit(options: dict[str, Any], temperature: float) -> None:
    """Same drafts, same acceptance, token for token."""
    requests = [
        Request(prompt, SamplingParams(temperature=temperature), 16, seed=i, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    runs = []
    for build in (
        lambda target: EarlyExitDrafter(target, layer=EXIT, **options),
        lambda target: drafter_for(target, net_for(target, idle=True), eta=0.0, **options),
        lambda target: drafter_for(target, eta=0.0, **options),
    ):
        target = model()
        runs.append(serve(engine(target, build(target), max_batch=3), requests))
    early, idle, lively = (
        [(run.output, run.stats.num_draft_tokens, run.stats.num_accepted_tokens_per_pos) for run in each]
        for each in runs
    )
    assert early == idle != lively


def test_distributions_of_an_idle_adapter_are_those_of_the_exit() -> None:
    target = model()
    trees = []
    for drafter in (
        EarlyExitDrafter(target, layer=EXIT, tree="2x2"),
        drafter_for(target, net_for(target, idle=True), tree="2x2"),
    ):
        context = started(target, drafter, PROMPTS[0], SamplingParams(temperature=1.0))
        trees.append(drafter.propose(context, Budget(4, 16)))
        target.release(context.sequence)
    early, idle = trees
    assert early.tokens == idle.tokens and early.q_rows == idle.q_rows and early.kind == idle.kind
    assert early.q is not None and idle.q is not None
    assert torch.allclose(early.q.double(), idle.q.double(), atol=1e-5)


def started(target: HuggingFaceModel, drafter: Any, prompt: Sequence[int], params: SamplingParams) -> Context:
    """A context whose prompt the target and the drafter have read."""
    context = Context(0, list(prompt), len(prompt), Sampler(params), Rng(1))
    context.sequence = target.open()
    context.hidden = target.prefill(context.sequence, prompt[:-1], drafter.taps)
    drafter.start(context)
    return context


def test_the_distribution_is_the_one_that_was_drawn_from() -> None:
    """Every stored row is the adapter's distribution after the text and the path above, computed from nothing."""
    target = model()
    net = net_for(target)
    for options, kind in (({"k": 4}, Kind.IID), ({"tree": "2x2x1"}, Kind.WITHOUT_REPLACEMENT)):
        drafter = drafter_for(target, net, eta=0.0, **options)
        context = started(target, drafter, PROMPTS[2], SamplingParams(temperature=0.8, top_k=20))
        tree = drafter.propose(context, Budget(8, 64))
        assert tree.kind is kind is drafter.traits.kind and tree.q is not None and tree.num_drafts >= 4
        for node in range(1, len(tree)):
            above = [tree.tokens[n] for n in tree.path(tree.parents[node])[1:]]
            text = [*context.tokens, *above]
            with torch.no_grad():
                output = net(None, exit_states(target, text)[None], torch.arange(len(text))[None])
                logits = drafter.adapter.parts.logits(net.head_state(output[0, -1]))
            assert torch.allclose(
                tree.q[tree.q_rows[node]], context.sampler.distribution(logits, text).to(tree.q), atol=1e-5
            )
        target.release(context.sequence)
    greedy = drafter_for(target, net, k=3, draw="greedy")
    assert greedy.traits.kind is Kind.POINT and drafter_for(target, net).traits.kind is Kind.IID


# -- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", [None, Sometimes], ids=["always", "sometimes"])
@pytest.mark.parametrize("options", [{"k": 3}, {"tree": "2x2x1"}], ids=["chain", "tree"])
def test_the_adapter_has_read_the_true_state_of_every_token(options: dict[str, Any], controller: Any) -> None:
    """Between rounds: read and unread states are all tokens but the last; what is read is as if read in one go."""
    target = model()
    drafter = drafter_for(target, eta=0.0, **options)
    propose, kept = drafter.propose_batch, []

    def watched(contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        begun = [context for context in contexts if drafter.reader in context.state]
        kept.extend(len(context.state[drafter.reader, "pending"]) for context in begun)
        trees = propose(contexts, budgets)
        for context, tree in zip(contexts, trees, strict=True):
            sequence = context.state[drafter.reader]
            assert sequence.tokens == context.tokens[:-1] and not len(context.state[drafter.reader, "pending"])
            # The states of the deepest drafts are not made before the verification.
            fed = [node for node in range(len(tree)) if tree.children[node]] or ([0] if len(tree) > 1 else [])
            assert set(fed) <= set(range(len(sequence.scratch_tokens))) and len(sequence.scratch_tokens) < len(tree)
        return trees

    drafter.propose_batch = watched  # type: ignore[method-assign]
    speculative = engine(target, drafter, controller=controller() if controller else None, max_batch=3)
    for seed, prompt in enumerate(PROMPTS):
        speculative.add(Request(prompt, SamplingParams(temperature=seed % 2), 8 + 3 * seed, seed=seed, ignore_eos=True))
    checked = 0
    while speculative.busy:
        speculative.step()
        for run in speculative.requests.running:
            sequence, unread = run.context.state.get(drafter.reader), run.context.state[drafter.reader, "pending"]
            text = run.context.tokens[:-1]
            if sequence is None:  # no draft was asked for yet
                assert controller is not None and len(unread) == len(text)
                continue
            assert not sequence.scratch_tokens and sequence.tokens == text[: len(sequence.tokens)]
            assert len(sequence.tokens) + len(unread) == len(text)
            states = exit_states(target, text)
            if len(unread):
                (rows,) = unread.first(len(unread)).values()
                assert torch.allclose(rows.float(), states[len(sequence.tokens) :], atol=1e-5)
            check_cache(drafter.adapter, sequence, states[: len(sequence.tokens)])
            checked += len(sequence.tokens)
    assert checked > 200
    # A round leaves at most its last draft unread; rounds without drafts leave their tokens.
    assert max(kept) <= 1 if controller is None else max(kept) > 1


def check_cache(adapter: FeatureModel, sequence: Any, states: Tensor) -> None:
    count = len(states)
    if not count:
        return
    cached = [store[0][sequence.row, :, :count].clone() for store in (adapter.cache.keys, adapter.cache.values)]  # type: ignore[index]
    net = adapter.model
    _, keys, values = net.attention.heads_of(net.input_layernorm(states[None]), torch.arange(count)[None])
    assert torch.allclose(cached[0], keys[0], atol=1e-4) and torch.allclose(cached[1], values[0], atol=1e-4)


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model()
    distributions, calls = [], []
    monkeypatch.setattr("foretoken.methods.drafters.texts.BESIDE", 0)
    for chunk in (512, 3):
        monkeypatch.setattr("foretoken.methods.drafters.reading.PREFILL_CHUNK", chunk)
        drafter = drafter_for(target)
        forward = drafter.adapter.forward
        drafter.adapter.forward = lambda feeds, run=forward: calls.append(len(feeds[0].tokens)) or run(feeds)  # type: ignore
        context = started(target, drafter, PROMPTS[0], SamplingParams(temperature=1.0))
        distributions.append(drafter.propose(context, Budget(1, 1)).q)
        target.release(context.sequence)
    assert calls == [7, 1, 1, 3, 3, 1, 1, 1]
    assert (
        distributions[0] is not None
        and distributions[1] is not None
        and torch.allclose(distributions[0], distributions[1], atol=1e-5)
    )


def test_a_draft_that_was_broken_off_is_forgotten() -> None:
    """The rows that target and adapter read of it are dropped before the next draft."""
    target = model()
    drafter = drafter_for(target, eta=0.0)
    context = started(target, drafter, PROMPTS[0], SamplingParams())
    first = drafter.propose(context, Budget(4, 8))
    assert drafter.propose(context, Budget(4, 8)).tokens == first.tokens
    drafter.finish(context)
    assert not context.state and not drafter.adapter._sequences


# -- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize(
    ("options", "controller"),
    [({"k": 3, "eta": 0.0}, None), ({"k": 6, "eta": 0.0}, ConfidenceController(0.005)), ({"tree": "2x2x1"}, None)],
    ids=["chain", "confidence-stop", "tree"],
)
def test_layers_run_in_a_round(lean: bool, options: dict[str, Any], controller: Controller | None) -> None:
    """E per level, E for the last drafts, and the other layers once: nothing runs twice, though states are handed out.

    The adapter runs once per level, and once more when a token was left unread.
    """
    target = model(lean=lean)
    drafter = drafter_for(target, net_for(target), **options)
    speculative = engine(target, drafter, controller=controller)
    speculative.add(Request(PROMPTS[0], SamplingParams(temperature=1.0), 40, seed=0, ignore_eos=True))
    speculative.step()
    (run,) = speculative.requests.running
    levels_seen = set()
    propose = drafter.propose_batch

    def watched(contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        unread = len(contexts[0].state[drafter.reader, "pending"]) > 0
        before = layer_runs(drafter.adapter)
        trees = propose(contexts, budgets)
        levels = max(trees[0].depths)
        counts.append(levels)
        assert layer_runs(drafter.adapter) - before == levels + unread
        return trees

    drafter.propose_batch = watched  # type: ignore[method-assign]
    while speculative.busy:
        counts: list[int] = []
        layers, drafts = layer_runs(target), run.stats.num_draft_tokens
        speculative.step()
        levels = counts[0] if counts else 0
        assert (run.stats.num_draft_tokens > drafts) == (levels > 0)
        assert layer_runs(target) - layers == EXIT * levels + EXIT + (LAYERS - EXIT)
        levels_seen.add(levels)
    assert max(levels_seen) >= 3


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gemma2"])
def test_states_of_the_exit_layer_are_handed_out_without_running_it_again(name: str, lean: bool) -> None:
    tokens, parents = [7, 5, 6, 5, 5], [-1, 0, 0, 1, 2]
    target = HuggingFaceModel(new_model(name, num_hidden_layers=4).double(), lean=lean)
    taps = ["layer:2", "layer:3", "last"]
    plain, sequence = target.open(), target.open()
    for each in (plain, sequence):
        target.prefill(each, PROMPTS[0])
    whole = target.forward([Feed(plain, tokens, parents)], taps)[0]
    target.forward_part([Feed(sequence, tokens[:3], parents[:3])], LayerPlan(stop=2))
    before = layer_runs(target)
    rest = target.forward([Feed(sequence, tokens, parents)], taps)[0]
    assert layer_runs(target) - before == 2 + 2
    for tap in taps:
        assert torch.allclose(rest.taps[tap], whole.taps[tap], atol=1e-8), tap
    for each in (plain, sequence):
        target.commit(each, ())
    # A state before the exit was not kept: all layers run, and it is right.
    target.forward_part([Feed(sequence, tokens[:3], parents[:3])], LayerPlan(stop=2))
    before = layer_runs(target)
    early = target.forward([Feed(sequence, tokens, parents)], ["layer:1"])[0]
    assert layer_runs(target) - before == 4
    assert torch.allclose(
        early.taps["layer:1"], target.forward([Feed(plain, tokens, parents)], ["layer:1"])[0].taps["layer:1"]
    )


def test_what_a_draft_token_costs() -> None:
    target = model()
    drafter = drafter_for(target)
    assert drafter.limits.relative_cost == pytest.approx((EXIT + 0.5) / LAYERS)


# -- acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exit_that_misses_nothing_is_always_right(temperature: float) -> None:
    """Every round is accepted to its end, so that every round leaves one token unread."""
    target = model(silent_from=3)
    request = Request(PROMPTS[0], SamplingParams(temperature=temperature), 40, seed=1, ignore_eos=True)
    drafter = drafter_for(target, net_for(target, 3, idle=True), k=3, eta=0.0)
    (run,) = serve(engine(target, drafter), [request])
    assert (run.stats.num_drafts, run.stats.num_accepted_tokens) == (10, 30)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "olmo2"])
def test_families_write_what_they_write_alone(name: str) -> None:
    """Ragged batches of one to four requests give the tokens of plain decoding."""
    target = model(name)
    requests = [Request(prompt, max_new_tokens=18 + i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    plain = outputs(engine(target), requests)
    for batch, options in ((1, {"k": 3}), (4, {"k": 3, "eta": 0.0}), (3, {"tree": "2x2"})):
        assert outputs(engine(target, drafter_for(target, **options), max_batch=batch), requests) == plain
    assert len({tuple(tokens) for tokens in plain}) == len(plain)


def test_in_a_router() -> None:
    """Rounds of other members are read too."""
    target = model()
    requests = [Request(prompt, max_new_tokens=24, ignore_eos=True) for prompt in PROMPTS]
    plain = outputs(engine(target), requests)
    kangaroo = drafter_for(target, net_for(target, idle=True))
    router = RouterDrafter([NgramDrafter(n=1, k=2), kangaroo, ModelDrafter(model(), k=2)])
    assert outputs(engine(target, router, max_batch=2), requests) == plain
    assert not kangaroo.adapter._sequences
    with pytest.raises(ValueError, match="cannot be in an ensemble"):
        EnsembleDrafter([kangaroo, NgramDrafter()])


# -- the threshold ---------------------------------------------------------------------------------------------------


class Fading(FeatureModel):
    """The best token of draft place i has the probability ``best[i]``; all others share the rest."""

    best = (0.9, 0.7, 0.5, 0.3, 0.1)

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ("state",)) -> list[Rows]:
        rows = super().forward(feeds, taps)
        out = []
        for feed, row in zip(feeds, rows, strict=True):
            depth = min(feed.sequence.scratch_depths[-1], 4)  # the prompt asks for no distributions
            distribution = torch.full((self.vocab_size,), (1 - self.best[depth]) / (self.vocab_size - 1))
            distribution[5] = self.best[depth]
            out.append(Rows(distribution.log().expand(len(row.logits), -1), row.taps))
        return out


@pytest.mark.parametrize(
    ("eta", "controller", "drafts"),
    [(None, 0.0, 4), (0.0, 0.0, 5), (0.6, 0.0, 3), (1.0, 0.0, 1), (0.0, 0.8, 2), (0.6, 0.4, 3), (0.4, 0.95, 1)],
)
def test_the_unsure_token_is_the_last_one(eta: float | None, controller: float, drafts: int) -> None:
    """Probabilities .9 .7 .5 .3 .1: with 0.4 the token of .3 is still drafted, and nothing after it."""
    target = model()
    parts = TargetParts(target)
    drafter = KangarooDrafter(target, Fading(net_for(target), parts, target), k=5, eta=eta)
    context = started(target, drafter, PROMPTS[0], SamplingParams())
    tree = drafter.propose(context, Budget(5, 64, min_confidence=controller))
    assert tree.tokens == (context.root, *[5] * drafts)


def test_trees_have_no_threshold_by_default() -> None:
    target = model()
    assert (drafter_for(target).eta, drafter_for(target, tree="2x2").eta) == (0.4, 0.0)
    assert drafter_for(target, tree="2x2", eta=0.1).eta == 0.1
    assert (drafter_for(target).max_depth, drafter_for(target, k=3).max_depth) == (6, 3)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox"])
def test_a_new_adapter_is_an_early_exit(name: str) -> None:
    """With the target's own final norm where that is an RMS norm (gemma's adds one to its weight)."""
    target = HuggingFaceModel(new_model(name))
    parts = TargetParts(target)
    recipe = KangarooRecipe(target, parts, {})
    states = exit_states(target, PROMPTS[2], recipe.config.layer)
    with torch.no_grad():
        normed = recipe.net.head_state(recipe.net(None, states[None], torch.arange(len(states))[None])[0])
        same = torch.allclose(normed, parts.normed(states), atol=1e-4)
    assert same == (name != "gpt_neox")


def test_settings_of_the_recipe() -> None:
    deep = HuggingFaceModel(new_model("llama", num_hidden_layers=8))
    recipe = KangarooRecipe(deep, TargetParts(deep), {})
    assert (recipe.config.layer, recipe.config.ffn, recipe.taps) == (1, 0, ("layer:1", "last"))
    target = model()
    parts = TargetParts(target)
    assert KangarooRecipe(target, parts, {"layer": "3"}).net.config.layer == 3
    for layer in ("0", "5"):
        with pytest.raises(ValueError, match="kangaroo needs an exit layer"):
            KangarooRecipe(target, parts, {"layer": layer})
    with pytest.raises(ValueError, match="valid ones: layer"):
        KangarooRecipe(target, parts, {"heads": "2"})


# -- what is refused -------------------------------------------------------------------------------------------------


def test_bad_options() -> None:
    target = model()
    for options, words in (
        ({"k": 0}, "kangaroo needs k >= 1"),
        ({"eta": 1.5}, "eta in \\[0, 1\\], not 1.5"),
        ({"eta": -0.1}, "eta in \\[0, 1\\]"),
        ({"draw": "best"}, "draw must be"),
        ({"tree": "2y2"}, "child counts"),
    ):
        with pytest.raises(ValueError, match=words):
            drafter_for(target, **options)
    with pytest.raises(ValueError, match="exit layer from 1 to 4, not 5"):
        drafter_for(target, net_for(target, LAYERS))
    with pytest.raises(ValueError, match="exit layer >= 1, not 0"):
        config_for(target, 0)
    adapter = drafter_for(target).adapter
    with pytest.raises(CapabilityError, match="layers can be run one by one"):
        KangarooDrafter(tables()[0], adapter)


def test_folders(tmp_path: Path) -> None:
    target = model()
    config, net, fingerprint = asdict(config_for(target)), net_for(target), TargetParts(target).fingerprint()
    save_drafter(tmp_path / "good", "kangaroo", config, net, fingerprint)
    loaded: Any = build_drafter(f"kangaroo:{tmp_path / 'good'},k=3,eta=0.5", target, target_source=target)
    assert (loaded.layer, loaded.taps, loaded.max_depth, loaded.eta) == (2, ("layer:2",), 3, 0.5)
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.adapter.model.state_dict()[name], value.bfloat16().float())
    save_drafter(tmp_path / "deep", "kangaroo", {**config, "layer": 7}, net, fingerprint)
    save_drafter(tmp_path / "other", "kangaroo", config, net, replace(fingerprint, weights="0"))
    save_drafter(tmp_path / "mtp", "mtp", config, net, fingerprint)
    for folder, words in (
        ("none", "not a folder"),
        ("deep", "exit layer from 1 to 4, not 7"),
        ("other", "another target"),
        ("mtp", "trained as 'mtp'"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            build_drafter(f"kangaroo:{tmp_path / folder}", target, target_source=target)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="needs a folder for this target"):
        build_drafter("kangaroo", target, target_source=target)
