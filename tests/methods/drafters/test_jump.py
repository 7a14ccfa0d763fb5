"""Jump: what a draft is computed from, what the verification keeps of it, how it learns, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.drafters.jump import JumpDrafter
from foretoken.methods.drafters.nets.jump import JumpConfig, JumpNet
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models import runner
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear import packing
from foretoken.models.network.layers import LayerPlan
from foretoken.models.network.taps import recording
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.jump import JumpRecipe
from models.checkpoints import new_model, prompt_of
from toys import engine, layer_runs, llama, llamas, outputs, serve, tables

LAYERS = 5
PROMPTS = [prompt_of(9), prompt_of(1, seed=1), prompt_of(17, seed=2), prompt_of(4, seed=3)]
WINDOWS = [(2, 3, 3), (2, 4, 3), (2, 4, 2), (3, 5, 5), (1, 5, 1), (0, 2, 1), (0, 5, 0)]
"""(start, stop, state)"""
SHAPES: list[dict[str, Any]] = [
    {}, {"inner": 5}, {"readout": False}, {"width": 6}, {"width": 4, "inner": 3}, {"inner": 3}, {}
]  # fmt: skip


def model(name: str = "llama", lean: bool = True) -> HuggingFaceModel:
    return HuggingFaceModel(new_model(name, num_hidden_layers=LAYERS).double(), lean=lean)


def net_for(target: HuggingFaceModel, window: tuple[int, int, int] = (2, 3, 3), **shape: Any) -> JumpNet:
    """A lively predictor."""
    net = JumpNet(JumpConfig(TargetParts(target).hidden_size, *window, **shape))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return net.eval()


def drafter_for(target: HuggingFaceModel, net: JumpNet | None = None, **options: Any) -> JumpDrafter:
    return JumpDrafter(target, net_for(target) if net is None else net, **options)


class Oracle(torch.nn.Module):
    """Predicts what is behind ``start`` without fault: it reads the text."""

    def __init__(self, target: HuggingFaceModel, config: JumpConfig) -> None:
        super().__init__()
        self.target, self.config = target, config
        self.text: list[int] = []
        self.node = 0

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        table = self.target.model.get_input_embeddings().weight
        for row in embeddings:
            self.text.append(int((table - row).abs().sum(-1).argmin()))
        name = f"layer:{self.config.start}"
        with recording(self.target.model, (name,)) as inputs, torch.no_grad():
            self.target.model(input_ids=torch.tensor([self.text]), use_cache=False)
        return inputs[name][0, -len(embeddings) :]

    def read_out(self, states: Tensor) -> Tensor:
        return states


def started(target: HuggingFaceModel, drafter: Any, prompt: Sequence[int], params: SamplingParams) -> Context:
    """A context whose prompt the target has read."""
    context = Context(0, list(prompt), len(prompt), Sampler(params), Rng(1))
    context.sequence = target.open()
    context.hidden = target.prefill(context.sequence, prompt[:-1], drafter.taps)
    drafter.start(context)
    return context


# -- what a draft is computed from -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
def test_states_in_place_of_embeddings(lean: bool) -> None:
    """The first layers on given states: those of other tokens make these tokens of the fed ones."""
    target, text = model(lean=lean), prompt_of(9)
    sequence = target.open()
    target.prefill(sequence, text[:6])
    whole = target.forward([Feed(sequence, text[6:])], ("layer:0",))[0]
    target.commit(sequence, ())
    feed = Feed(sequence, [0] * (len(text) - 6), states=whole.taps["layer:0"])
    part = target.forward_part([feed], LayerPlan(stop=LAYERS))[0]
    assert torch.allclose(whole.logits, part.logits, atol=1e-10)
    assert sequence.exit_layer == 0 and not sequence.exit_states
    target.commit(sequence, ())
    target.forward_part([feed], LayerPlan(stop=2))
    assert sequence.exit_layer == 0 and not sequence.exit_states, "guessed states are no place to go on from"


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
def test_a_window_on_true_states_is_the_whole_network(lean: bool) -> None:
    """Layers 2 to the end, on what the first two make of the tokens, beside another request."""
    target, text = model(lean=lean), prompt_of(9)
    sequences = [target.open() for _ in range(2)]
    for sequence, end in zip(sequences, (6, 4), strict=True):
        target.prefill(sequence, text[:end])
    whole = target.forward([Feed(s, text[len(s.tokens) :]) for s in sequences], ("layer:2",))
    for sequence in sequences:
        target.commit(sequence, ())
    feeds = [
        Feed(s, text[len(s.tokens) :], states=row.taps["layer:2"]) for s, row in zip(sequences, whole, strict=True)
    ]
    parts = target.forward_part(feeds, LayerPlan(start=2), ("layer:4",))
    for row, part in zip(whole, parts, strict=True):
        assert torch.allclose(row.logits, part.logits, atol=1e-10)
    for states in (None, whole[0].taps["layer:2"][:1]):
        with pytest.raises(ValueError, match="layers from 2 on need their input states, one per token"):
            target.forward_part([replace(feeds[0], states=states)], LayerPlan(start=2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", [(1, 2, 2), (0, 2, 0), (0, 2, 1)], ids=str)
def test_a_predictor_without_fault_drafts_what_the_target_writes(
    window: tuple[int, int, int], temperature: float
) -> None:
    """With all later layers, and the states before them known, no draft is ever rejected.  From layer 0 on, the states
    are the embeddings, and a draft step is the target's own."""
    target = HuggingFaceModel(llama())
    oracle: Any = Oracle(target, JumpConfig(16, *window))
    drafter = JumpDrafter(target, oracle, k=3)
    begin = drafter._begin

    def reset(context: Context, *rest: Any) -> Any:
        oracle.text = list(context.tokens[:-1])
        return begin(context, *rest)

    drafter._begin = reset  # type: ignore[method-assign]
    request = Request([3, 1, 4, 1, 5], SamplingParams(temperature=temperature), 20, seed=1, ignore_eos=True)
    run = serve(engine(target, drafter), [request])[0]
    assert run.stats.num_draft_tokens == run.stats.num_accepted_tokens >= 12


@pytest.mark.parametrize(("window", "shape"), list(zip(WINDOWS, SHAPES, strict=True)), ids=str)
def test_the_distribution_is_the_one_that_was_drawn_from(
    window: tuple[int, int, int], shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stored row, computed by the recipe's own rollout: what is trained is what drafts."""
    monkeypatch.setattr(packing, "pays_packed", lambda weight: False)  # bfloat16 is not what is looked at
    target = model()
    net = net_for(target, window, **shape)
    parts = TargetParts(target)
    recipe = JumpRecipe(target, parts, {"start": str(window[0]), "stop": str(window[1]), "state": str(window[2])})
    recipe.net = net
    for options, kind in (({"k": 4}, Kind.IID), ({"tree": "2x2x1"}, Kind.WITHOUT_REPLACEMENT)):
        drafter = JumpDrafter(target, net, head=DraftHead(parts, torch.arange(parts.vocab_size)), **options)
        context = started(target, drafter, PROMPTS[2], SamplingParams(temperature=0.8, top_k=20))
        tree = drafter.propose(context, Budget(8, 64))
        assert tree.kind is kind is drafter.traits.kind and tree.q is not None and tree.num_drafts >= 4
        root = len(context.tokens) - 1
        for node in range(1, len(tree)):
            above = [tree.tokens[n] for n in tree.path(tree.parents[node])[1:]]
            text = [*context.tokens, *above]
            tokens = torch.tensor([[*text, 0]])
            batch = Batch(tokens, parts.features(tokens[:, :-1], recipe.taps), parts)
            recipe.config = replace(recipe.config, steps=len(above) + 1)
            with torch.no_grad():
                states = recipe.rollout(batch, torch.tensor([[root]]))[-1][1]
                logits = recipe.draft_logits(states[0])
            expected = context.sampler.distribution(logits[0], text)
            assert torch.allclose(tree.q[tree.q_rows[node]], expected.to(tree.q), atol=1e-5)
        target.release(context.sequence)


def test_the_verification_rewrites_what_was_drafted() -> None:
    """After every round the cache is that of a fresh reading."""
    target = model()
    speculative = engine(target, drafter_for(target, k=3), max_batch=2)
    for seed, prompt in enumerate(PROMPTS):
        speculative.add(Request(prompt, SamplingParams(), 8 + 3 * seed, seed=seed, ignore_eos=True))
    rounds = 0
    while speculative.busy:
        speculative.step()
        for running in speculative.requests.running:
            sequence = running.context.sequence
            fresh = target.open()
            target.prefill(fresh, sequence.tokens)
            kept, read = (target.snapshot(s, len(sequence.tokens)) for s in (sequence, fresh))
            target.release(fresh)
            if kept is None or read is None:
                continue
            for layer, again in zip(kept.layers, read.layers, strict=True):
                assert layer is not None and again is not None
                assert torch.allclose(layer[0], again[0], atol=1e-9) and torch.allclose(layer[1], again[1], atol=1e-9)
            rounds += 1
    assert rounds > 10


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "olmo2"])
@pytest.mark.parametrize("window", [(2, 3, 3), (3, 5, 5), (0, 2, 0)], ids=str)
def test_families_write_what_they_write_alone(name: str, window: tuple[int, int, int]) -> None:
    network = new_model(name, num_hidden_layers=LAYERS).double()
    requests = [Request(p, SamplingParams(), 14, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    plain = outputs(engine(HuggingFaceModel(network), max_batch=3), requests)
    target = HuggingFaceModel(network)
    runs = serve(engine(target, drafter_for(target, net_for(target, window), tree="2x1x1"), max_batch=3), requests)
    assert [run.output for run in runs] == plain and sum(run.stats.num_draft_tokens for run in runs) > 0


def test_going_on_from_guesses_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: the verification goes on from where the draft ended, as it does behind an early exit."""
    monkeypatch.setattr(runner, "layer_reached", lambda plan, num_layers: plan.end(num_layers))
    requests = [Request(p, SamplingParams(), 14, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    target = model()
    plain = outputs(engine(target, max_batch=2), requests)
    assert outputs(engine(target, drafter_for(target, k=3), max_batch=2), requests) != plain


def test_a_round_costs_one_layer_a_draft() -> None:
    target = model()
    speculative = engine(target, drafter_for(target, k=3))
    speculative.add(Request(PROMPTS[0], SamplingParams(), 12, seed=0, ignore_eos=True))
    speculative.step()
    (run,) = speculative.requests.running
    while speculative.busy:
        layers, drafts = layer_runs(target), run.stats.num_draft_tokens
        speculative.step()
        assert layer_runs(target) - layers == LAYERS + run.stats.num_draft_tokens - drafts
    assert run.stats.num_draft_tokens > 6


# -- learning --------------------------------------------------------------------------------------------------------


def recipe_for(settings: dict[str, str]) -> JumpRecipe:
    target = HuggingFaceModel(llama(dtype=torch.float32))
    recipe = JumpRecipe(target, TargetParts(target), settings)
    recipe.parts.network.requires_grad_(False)
    return recipe


@pytest.mark.parametrize("settings", [{"steps": "3"}, {"inner": "8", "state": "1"}, {"width": "4"}], ids=str)
def test_every_weight_is_trained(settings: dict[str, str]) -> None:
    recipe = recipe_for(settings)
    tokens = torch.randint(32, (2, 13), generator=torch.Generator().manual_seed(3))
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)
    recipe.loss(batch, torch.Generator().manual_seed(0)).backward()
    assert [name for name, weight in recipe.net.named_parameters() if weight.grad is None] == []
    assert all(weight.grad is None for weight in recipe.parts.network.parameters())


def test_layers_by_default_and_by_setting() -> None:
    assert (recipe_for({}).config.start, recipe_for({}).config.stop, recipe_for({}).config.state) == (1, 2, 2)
    target = model()
    config = JumpRecipe(target, TargetParts(target), {"start": "2", "stop": "4"}).config
    assert (config.start, config.stop, config.state) == (2, 4, 4)
    with pytest.raises(ValueError, match="reads the output of layer 6, and the target has 5"):
        JumpRecipe(target, TargetParts(target), {"start": "5"})
    for settings, words in (
        ({"start": "3", "stop": "3"}, "0 <= start < stop, not start=3 and stop=3"),
        ({"state": "1"}, "state from start=3 to stop=4, not 1"),
        ({"steps": "0"}, "steps >= 1"),
        ({"inner": "-1"}, "inner >= 0, not -1"),
        ({"width": "3"}, "an even width from 0 on, not 3"),
        ({"hidden_size": "4"}, "unknown setting"),
    ):
        with pytest.raises(ValueError, match=words):
            JumpRecipe(target, TargetParts(target), settings)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_options_and_targets() -> None:
    target = model()
    for options, words in (({"k": 0}, "k"), ({"draw": "best"}, "draw must be"), ({"tree": "2y2"}, "child counts")):
        with pytest.raises(ValueError, match=words):
            drafter_for(target, **options)
    with pytest.raises(ValueError, match="reads the output of layer 7, and the target has 5"):
        drafter_for(target, JumpNet(JumpConfig(TargetParts(target).hidden_size, 6, 7, 7)))
    with pytest.raises(ValueError, match="jump has width 8, and the target's embeddings have"):
        drafter_for(target, JumpNet(JumpConfig(8, 2, 3, 3)))
    with pytest.raises(CapabilityError, match="layers can be run one by one"):
        JumpDrafter(tables()[0], net_for(target))


def test_folders(tmp_path: Path) -> None:
    target = model()
    net, fingerprint = net_for(target, inner=3), TargetParts(target).fingerprint()
    config = asdict(net.config)
    save_drafter(tmp_path / "good", "jump", config, net, fingerprint)
    loaded: Any = build_drafter(f"jump:{tmp_path / 'good'},k=3", target, target_source=target)
    assert (loaded.plan, loaded.taps, loaded.max_depth) == (LayerPlan(2, 3), ("layer:3",), 3)
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.net.state_dict()[name], value.bfloat16().float())
    save_drafter(tmp_path / "deep", "jump", {**config, "start": 5, "stop": 6, "state": 6}, net, fingerprint)
    save_drafter(tmp_path / "order", "jump", {**config, "state": 1}, net, fingerprint)
    save_drafter(tmp_path / "other", "jump", config, net, replace(fingerprint, weights="0"))
    save_drafter(tmp_path / "narrow", "jump", {**config, "hidden_size": 8}, net, fingerprint)
    save_drafter(tmp_path / "parts", "jump", config, net_for(target), fingerprint)
    save_drafter(tmp_path / "mtp", "mtp", config, net, fingerprint)
    for folder, words in (
        ("none", "not a folder"),
        ("deep", "output of layer 6, and the target has 5"),
        ("order", "state from start=2 to stop=3, not 1"),
        ("other", "another target"),
        ("narrow", "must be"),
        ("parts", "lacks the tensor"),
        ("mtp", "trained as 'mtp'"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            build_drafter(f"jump:{tmp_path / folder}", target, target_source=target)
        assert "\n" not in str(error.value)


def test_a_prompt_of_one_token_is_drafted_for_from_the_second_round_on() -> None:
    target = llamas()[0]
    net = net_for(target, (1, 2, 2))
    run = serve(engine(target, JumpDrafter(target, net, k=2)), [Request([3], SamplingParams(), 12, ignore_eos=True)])
    assert run[0].stats.num_draft_tokens > 0
