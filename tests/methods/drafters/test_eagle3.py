"""EAGLE-3: fused depths, the reduced vocabulary, and training that computes what drafting does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.eagle3 import Eagle3Drafter, draft_logits
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net, default_layers
from foretoken.models.base import Feed
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.eagle import EagleRecipe
from foretoken.training.recipes.eagle3 import Eagle3Recipe, most_frequent
from foretoken.training.recipes.features import FeatureRecipe, some_rows
from foretoken.training.recipes.mtp import MtpRecipe
from toys import engine, llama, serve

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHOSEN = torch.tensor([1, 2, 5, 9, 14, 15, 20, 31])
STEPS = 4


def random_net(target: HuggingFaceModel, share_head: bool = False, scale: float = 0.3) -> Eagle3Net:
    shape = asdict(LayerConfig.of_target(target.config))
    config = Eagle3Config(**shape, vocab_size=32, draft_vocab=len(CHOSEN), layers="0,1,2", share_head=share_head)
    net = Eagle3Net(config)
    fill(net, scale)
    net.choose(CHOSEN)
    return net.eval()


def fill(net: torch.nn.Module, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def new_drafter(target: HuggingFaceModel, share_head: bool = False, **options: Any) -> Eagle3Drafter:
    return Eagle3Drafter.of(random_net(target, share_head), TargetParts(target), target, **options)


def toy_recipe(kind: type[FeatureRecipe], **settings: str) -> FeatureRecipe:
    target = HuggingFaceModel(llama(dtype=torch.float32))
    recipe = kind(target, TargetParts(target), settings)
    fill(recipe.net)
    recipe.net.eval()
    return recipe


def toy_batch(recipe: FeatureRecipe, length: int = 12, texts: int = 2) -> Batch:
    tokens = torch.randint(32, (texts, length + 1), generator=torch.Generator().manual_seed(5))
    return Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)


# -- training computes what drafting does ------------------------------------------------------------------------------


VARIANTS = {
    "norms": {"norm_before_residual": "true", "norm_output": "true", "fc_norm": "true", "head_norms": "true"},
    "several layers": {"num_layers": "3", "norm_before_fc": "true"},
    "last state": {"layers": "last", "own_embedding": "true"},
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in (Eagle3Recipe, EagleRecipe, MtpRecipe)),
        *((Eagle3Recipe, variant) for variant in VARIANTS.values()),
    ],
    ids=["eagle3", "eagle", "mtp", *VARIANTS],
)
@torch.no_grad()
def test_a_step_of_training_is_a_step_of_drafting(kind: type[FeatureRecipe], settings: dict[str, str]) -> None:
    """Every row commits the true features before it and drafts on its own outputs, token by token."""
    recipe = toy_recipe(kind, **settings)
    batch = toy_batch(recipe)
    features = true_features(recipe, batch)
    n = batch.length
    rows = torch.arange(n - STEPS).expand(2, -1)
    steps = torch.stack(list(recipe.unrolled(batch, features, rows, STEPS)))  # [steps, b, R, D]
    model = FeatureModel(recipe.net, recipe.parts, recipe.target)
    for text in range(2):
        for row in rows[text].tolist():
            tokens = batch.tokens[text].tolist()
            sequence = model.open()
            out = model.forward([Feed(sequence, tokens[1 : row + 2], states=features[text, : row + 1])])[0]
            model.commit(sequence, range(row + 1))
            assert torch.allclose(out.taps["state"][-1], steps[0, text, row], atol=1e-4)
            for step in range(1, STEPS):
                state = out.taps["state"][-1:]
                out = model.forward([Feed(sequence, [tokens[row + 1 + step]], states=state)])[0]
                assert torch.allclose(out.taps["state"][-1], steps[step, text, row], atol=1e-4)
            model.release(sequence)


def true_features(recipe: FeatureRecipe, batch: Batch) -> Tensor:
    if isinstance(recipe, Eagle3Recipe):
        return recipe.net.fuse([batch.taps[tap] for tap in recipe.config.taps])
    return batch.taps["last"]


@pytest.mark.parametrize("kind", [Eagle3Recipe, EagleRecipe])
@torch.no_grad()
def test_top_k_distillation_by_hand(kind: type[FeatureRecipe]) -> None:
    """HASS adds the cross-entropy over the target's two most likely tokens, not renormalised, to the loss."""
    plain, with_top = toy_recipe(kind), toy_recipe(kind, top_k="2", top_weight="0.5")
    batch = toy_batch(plain)
    rows = torch.tensor([[0, 3], [2, 5]])
    labels = with_top.labels(batch, rows, 1)
    output = torch.randn(2, 2, plain.parts.hidden_size, generator=torch.Generator().manual_seed(3))
    logits = with_top.draft_logits(output.flatten(0, 1))
    expected = []
    for i, (text, row) in enumerate([(0, 0), (0, 3), (1, 2), (1, 5)]):
        (target,), counted = labels.of(torch.tensor([text]), torch.tensor([row + 1]))
        if counted is None or bool(counted):
            first, second = target.argsort(descending=True)[:2].tolist()
            log_draft = logits[i].log_softmax(-1)
            expected.append(-float(target[first] * log_draft[first] + target[second] * log_draft[second]))
    added = with_top.agreement(labels, output, rows + 1) - plain.agreement(labels, output, rows + 1)
    assert len(expected) > 1
    assert float(added) == pytest.approx(0.5 * sum(expected) / len(expected), rel=1e-4)
    seeds = (torch.Generator().manual_seed(0) for _ in range(2))
    assert float(with_top.loss(batch, next(seeds))) > float(plain.loss(batch, next(seeds)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_learn(variant: str) -> None:
    """Every weight has a part in the loss, but for the embedding's rows of other tokens."""
    recipe = toy_recipe(Eagle3Recipe, **VARIANTS[variant])
    recipe.loss(toy_batch(recipe), torch.Generator().manual_seed(0)).backward()
    for name, weight in recipe.net.named_parameters():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0, name


def test_the_drafter_reads_the_features_of_training() -> None:
    for variant in VARIANTS.values():
        recipe = toy_recipe(Eagle3Recipe, **variant)
        batch = toy_batch(recipe, texts=1)
        drafter = recipe.drafter({})
        assert isinstance(drafter, Eagle3Drafter)
        read = drafter.features({tap: batch.taps[tap][0] for tap in drafter.taps})
        assert torch.allclose(read, true_features(recipe, batch)[0], atol=1e-5)
        if variant.get("layers") == "last":
            assert drafter.taps == ("last",) and torch.equal(read, batch.taps["last"][0])


@torch.no_grad()
def test_rows_see_nothing_of_each_other_nor_of_what_follows() -> None:
    recipe = toy_recipe(Eagle3Recipe)
    batch = toy_batch(recipe)
    features = true_features(recipe, batch)
    every = torch.arange(8).expand(2, -1)
    some = torch.tensor([[0, 3, 7], [2, 3, 5]])
    whole = list(recipe.unrolled(batch, features, every, STEPS))
    part = list(recipe.unrolled(batch, features, some, STEPS))
    for output, other in zip(whole, part, strict=True):
        assert torch.allclose(output[torch.arange(2)[:, None], some], other, atol=1e-5)
    later = features.clone()
    later[:, 4:] += 1
    changed = list(recipe.unrolled(batch, later, every, STEPS))
    for output, other in zip(whole, changed, strict=True):
        assert torch.allclose(output[:, :4], other[:, :4], atol=1e-5)
        assert not torch.allclose(output[:, 4:], other[:, 4:], atol=1e-2)
    earlier = features.clone()
    earlier[:, 0] += 1
    for output, other in zip(whole, recipe.unrolled(batch, earlier, every, STEPS), strict=True):
        assert float((output[:, 1:] - other[:, 1:]).abs().amax(-1).min()) > 1e-4  # true places are seen at every step


def test_the_gradient_flows_through_the_steps() -> None:
    recipe = toy_recipe(Eagle3Recipe)
    batch = toy_batch(recipe)
    features = true_features(recipe, batch).detach().requires_grad_()
    rows = torch.tensor([[6], [6]])
    *_, last = recipe.unrolled(batch, features, rows, STEPS)
    last.sum().backward()
    assert features.grad is not None
    assert float(features.grad[:, :7].abs().amax(-1).min()) > 0 and float(features.grad[:, 7:].abs().max()) == 0


def test_rows_leave_room_for_all_steps() -> None:
    recipe = toy_recipe(Eagle3Recipe)
    generator = torch.Generator().manual_seed(0)
    rows = some_rows(toy_batch(recipe, 12), 4, generator)
    assert rows.tolist() == [list(range(8))] * 2
    few = some_rows(toy_batch(recipe, 12), 4, generator, 3)
    assert few.shape == (2, 3) and bool((few.diff() > 0).all()) and int(few.max()) < 8
    with pytest.raises(ValueError, match="4 tokens are too short for 4 steps"):
        some_rows(toy_batch(recipe, 4), 4, generator)


# -- the loss ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_loss_is_the_distance_from_the_target_within_the_draft_vocabulary() -> None:
    recipe = toy_recipe(Eagle3Recipe, draft_vocab="16", unroll="1")
    assert isinstance(recipe, Eagle3Recipe)
    recipe.net.choose(torch.arange(16) * 2)
    batch = toy_batch(recipe)
    columns = torch.arange(1, 12).expand(2, -1)
    output = true_features(recipe, batch)[:, :-1].detach()
    loss = recipe.agreement(recipe.labels(batch, columns - 1, 1), output, columns)
    parts, total, count = recipe.parts, 0.0, 0
    for text in range(2):
        for i, column in enumerate(columns[0].tolist()):
            distribution = torch.softmax(parts.logits(batch.taps["last"][text, column]), -1)
            if int(distribution.argmax()) % 2:  # only even tokens can be guessed
                continue
            within = distribution[::2] / distribution[::2].sum()
            guess = torch.log_softmax(draft_logits(recipe.net, parts, recipe.net.head_state(output[text, i])), -1)
            total, count = total - float((within * guess).sum()), count + 1
    assert 0 < count < 22 and abs(float(loss) - total / count) < 1e-4
    batch.learned = torch.zeros_like(batch.tokens, dtype=torch.bool)
    nothing = recipe.agreement(recipe.labels(batch, columns - 1, 1), output, columns)
    assert float(nothing) == 0  # and no division by zero


# -- the draft vocabulary ----------------------------------------------------------------------------------------------


def test_ids_go_there_and_back() -> None:
    net = random_net(HuggingFaceModel(llama()))
    assert net.d2t.tolist() == [1, 1, 3, 6, 10, 10, 14, 24]  # offsets: the target's id is i + d2t[i]
    assert net.vocabulary.tolist() == CHOSEN.tolist()
    assert net.t2d.nonzero()[:, 0].tolist() == CHOSEN.tolist() and net.t2d.dtype == torch.bool
    assert net.target_ids(torch.tensor([[7], [0]])).tolist() == [[31], [1]]
    for wrong in (CHOSEN[1:], CHOSEN.flip(0), CHOSEN + 1, CHOSEN - 2, CHOSEN.clamp_min(2)):
        with pytest.raises(ValueError, match="8 ascending ids below 32"):
            net.choose(wrong)


def test_the_most_frequent_tokens_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.array([7, 7, 7, 2, 2, 5, 5, 9, 1, 1, 1, 1], np.uint16)
    assert most_frequent(text, 32, 3).tolist() == [1, 2, 7]  # 2 before 5: both occur twice
    assert most_frequent(text, 32, 7).tolist() == [0, 1, 2, 3, 5, 7, 9]
    monkeypatch.setattr("foretoken.training.recipes.base.COUNTED", 5)
    assert most_frequent(text, 32, 3).tolist() == [1, 2, 7]
    recipe = toy_recipe(Eagle3Recipe, draft_vocab="3")
    recipe.prepare(text)
    assert isinstance(recipe.net, Eagle3Net) and recipe.net.vocabulary.tolist() == [1, 2, 7]
    assert recipe.net.lm_head is not None
    assert torch.equal(recipe.net.lm_head.weight, recipe.parts.head.weight[[1, 2, 7]])


@pytest.mark.parametrize("share_head", [False, True])
def test_only_tokens_of_the_draft_vocabulary_are_guessed(share_head: bool) -> None:
    """And what is kept of the tree is closed: a parent is kept before its child, which scores no better."""
    target = HuggingFaceModel(llama())
    drafter = new_drafter(target, share_head, nodes=12, depth=4, width=3)
    context = started(drafter, target)
    tree = drafter.propose(context, Budget(8, 64))
    assert len(tree) == 13 and set(tree.tokens[1:]) <= set(CHOSEN.tolist())
    assert all(tree.parents[node] < node for node in range(len(tree)))
    assert max(tree.depths) <= 4 and max(map(len, tree.children)) <= 3
    row, state = context.state[drafter, "head"]
    logits, exact = row.logits, draft_logits(drafter.net, drafter.model.parts, drafter.net.head_state(state))
    assert logits.shape == (1, len(CHOSEN)) and torch.allclose(logits, exact.float(), rtol=0.02, atol=0.1)
    best = CHOSEN[exact[0].argmax()]
    assert tree.tokens[1] == int(best)
    drafter.finish(context)


def started(drafter: Eagle3Drafter, target: HuggingFaceModel) -> Context:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
    sequence = target.open()
    context.hidden = target.prefill(sequence, PROMPT[:-1], drafter.taps)
    target.release(sequence)
    drafter.start(context)
    return context


def test_a_shared_head_is_the_targets_own_and_owns_nothing() -> None:
    target = HuggingFaceModel(llama())
    parts = TargetParts(target)
    net = random_net(target, share_head=True)
    states = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(draft_logits(net, parts, states), parts.logits(states)[:, CHOSEN])
    assert not any("lm_head" in name for name in net.state_dict())


# -- drafting ----------------------------------------------------------------------------------------------------------


def test_the_cache_holds_fused_features_only() -> None:
    """Before every draft: one place per committed token but the last, each from the target's own states."""
    target = HuggingFaceModel(llama())
    drafter = new_drafter(target, nodes=6, depth=3, width=2)
    checked = 0
    propose = drafter.propose_batch

    def watched(contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        nonlocal checked
        trees = propose(contexts, budgets)
        for context in contexts:
            assert context.state[drafter].tokens == context.tokens[1:]
            if len(context.tokens) > 1:
                row, _ = context.state[drafter, "head"]
                assert torch.allclose(row.logits[-1], fresh_head(drafter, target, context.tokens), atol=0.05)
                checked += 1
        return trees

    drafter.propose_batch = watched  # type: ignore[method-assign]
    serve(engine(target, drafter), [Request(PROMPT[:n], SamplingParams(), 12, seed=n) for n in (1, 4, 8)])
    assert checked > 6


def fresh_head(drafter: Eagle3Drafter, target: HuggingFaceModel, tokens: Sequence[int]) -> Tensor:
    """[V_d] logits at the root from a new cache and the target's own states of the whole text."""
    sequence = target.open()
    taps = target.prefill(sequence, tokens[:-1], drafter.taps)
    target.release(sequence)
    fresh = drafter.model.open()
    with torch.no_grad():
        states = drafter.net.fuse([taps[tap].float() for tap in drafter.net.config.taps])
    row = drafter.model.forward([Feed(fresh, tokens[1:], wanted=1, states=states)])[0]
    drafter.model.release(fresh)
    return row.logits[-1]


@pytest.mark.parametrize("share_head", [False, True])
def test_random_weights_keep_the_greedy_text(share_head: bool) -> None:
    target = HuggingFaceModel(llama())
    requests = [Request(PROMPT[: n + 1], SamplingParams(), 16, seed=n) for n in range(4)]
    plain = serve(engine(target), requests)
    runs = serve(engine(target, new_drafter(target, share_head, width=2)), requests)
    assert [run.output for run in runs] == [run.output for run in plain]
    assert all(run.stats.num_draft_tokens for run in runs)


# -- options -----------------------------------------------------------------------------------------------------------


def test_default_depths() -> None:
    assert default_layers(32) == "2,16,29"
    assert default_layers(8) == "2,4,5"
    assert [default_layers(n) for n in (1, 2, 3, 4, 6)] == ["1,1,1", "1,2,2", "1,2,3", "2,3,4", "2,4,6"]


def test_depths_that_fall_together_are_read_once() -> None:
    drafter = new_drafter(HuggingFaceModel(llama()))
    assert drafter.taps == ("layer:0", "layer:1", "layer:2")
    recipe = toy_recipe(Eagle3Recipe, layers="1,2,2")
    assert recipe.taps == ("layer:1", "layer:2", "last")
    assert recipe.net.fc.weight.shape == (16, 48)
    toy_batch(recipe)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_vocab": "33"}, "draft_vocab from 0"),
        ({"layers": "1,x"}, "joined by commas"),
        ({"layers": ""}, "joined by commas"),
        ({"layers": "0,1,3"}, "reach to 3, and the target has 2"),
        ({"unroll": "0"}, "unroll >= 1"),
        ({"decay": "0"}, "decay > 0"),
        ({"vocab_size": "5"}, "unknown setting"),
    ],
)
def test_bad_settings(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy_recipe(Eagle3Recipe, **settings)
