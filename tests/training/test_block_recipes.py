"""Recipes of block drafters: what is trained is what is drafted, and it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.blocks import BlockRecipe, default_taps
from toys import engine, llama, serve

METHODS = ("dflash", "dflash2", "dspark")
SHAPES: list[dict[str, str]] = [{}, {"causal": "1,0", "reach": "0,3"}, {"from_anchor": "true", "own_mask": "false"}]


def toy_recipe(method: str, settings: dict[str, str], seed: int = 0, vocab: int = 32) -> Any:
    target = HuggingFaceModel(llama(vocab, dtype=torch.float32))
    recipe = find_recipe(method)(target, TargetParts(target), {"layers": "2", "block": "4", **settings}, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in recipe.net.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return recipe


def toy_batch(recipe: BlockRecipe, length: int = 12, texts: int = 2) -> Batch:
    tokens = torch.randint(32, (texts, length + 1), generator=torch.Generator().manual_seed(5))
    return Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settings", SHAPES)
@torch.no_grad()
def test_a_block_of_training_is_a_block_of_drafting(method: str, settings: dict[str, str]) -> None:
    """From every anchor, through the cache."""
    recipe = toy_recipe(method, settings)
    recipe.net.eval()
    batch = toy_batch(recipe)
    anchors = torch.arange(1, 9).expand(2, -1)
    states = recipe.states(batch, anchors)
    model = BlockModel(recipe.net, recipe.parts, recipe.target)
    first = 0 if recipe.config.from_anchor else 1
    for text in range(2):
        sequence = model.open()
        places = recipe.net.context([batch.taps[tap][text] for tap in recipe.config.tap_names])
        for index, anchor in enumerate(anchors[text].tolist()):
            model.forward([Feed(sequence, [0], wanted=0, states=places[anchor - 1 : anchor])])
            model.commit(sequence, [0])
            got = model.blocks([sequence], [int(batch.tokens[text, anchor])], 4)[0].taps["state"]
            assert torch.allclose(got[first:], states[text, index], atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_reads_nothing_of_the_anchor_nor_behind_it(method: str) -> None:
    """The gradient at the hidden states is zero from the anchor on, and not before."""
    recipe = toy_recipe(method, {})
    batch = toy_batch(recipe)
    taps = {name: rows.detach().requires_grad_() for name, rows in batch.taps.items()}
    anchors = torch.tensor([[6], [6]])
    recipe.states(Batch(batch.tokens, taps, batch.parts), anchors).sum().backward()
    for name in recipe.config.tap_names:
        gradient = taps[name].grad
        assert gradient is not None
        assert float(gradient[:, :6].abs().amax(-1).min()) > 0 and float(gradient[:, 6:].abs().max()) == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_weight_is_trained(method: str) -> None:
    recipe = toy_recipe(method, {"block": "3"})
    recipe.loss(toy_batch(recipe), torch.Generator().manual_seed(0)).backward()
    still = [name for name, weight in recipe.net.named_parameters() if weight.grad is None]
    assert still == []


def test_default_depths() -> None:
    assert default_taps(36) == "2,10,18,26,34" and default_taps(30) == "2,8,15,22,28"
    assert [default_taps(n) for n in (1, 2, 4, 8)] == ["1", "1", "2,3", "2,3,5,6"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"taps": "1,3"}, "taps=1,3 reach to 3, and the target has 2"),
        ({"gamma": "0"}, "gamma must be above 0"),
        ({"block": "1"}, "a block has 2 to 256 rows"),
        ({"hidden_size": "4"}, "unknown setting"),
        ({"mask_token": "32"}, "mask_token must be a token of the target"),
    ],
)
def test_bad_settings(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy_recipe("dflash", settings)


def test_texts_that_are_too_short() -> None:
    recipe = toy_recipe("dflash", {"block": "8"})
    with pytest.raises(ValueError, match="too short for 7 steps: use a larger --context"):
        recipe.loss(toy_batch(recipe, 6), torch.Generator())


LEARNT = {
    "peagle": {"places": "3", "num_layers": "1", "draft_vocab": "0"},
    "jump": {},
    "uno": {"places": "3", "rank": "8", "noise": "random"},
}
"""Settings of recipes without blocks."""

# -- learning ----------------------------------------------------------------------------------------------------------


def learnt(method: str, settings: dict[str, str], steps: int) -> tuple[Any, HuggingFaceModel]:
    """A drafter for a random target, trained on what that target writes."""
    target = HuggingFaceModel(llama(dtype=torch.float32))
    settings = {**LEARNT.get(method, {"block": "4"}), **settings}
    recipe: Any = find_recipe(method)(target, TargetParts(target), settings, 0)
    recipe.parts.network.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(32, (96, 2), generator=generator).tolist()
    runs = serve(
        engine(target), [Request(p, SamplingParams(temperature=0.3), 46, seed=i) for i, p in enumerate(prompts)]
    )
    texts = torch.tensor([prompt + run.output for prompt, run in zip(prompts, runs, strict=True)])
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=5e-3)
    recipe.net.train()
    for step in range(steps):
        with torch.enable_grad():
            tokens = texts[torch.randint(len(texts), (8,), generator=generator)]
            batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts, step, steps)
            recipe.loss(batch, generator).backward()
        torch.nn.utils.clip_grad_norm_(recipe.net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    recipe.net.eval()
    return recipe.drafter({}), target


def acceptance(drafter: Any, target: HuggingFaceModel) -> float:
    """Mean acceptance length of chains of greedy requests."""
    prompts = torch.randint(32, (12, 2), generator=torch.Generator().manual_seed(9)).tolist()
    drafter.width = 1
    runs = serve(
        engine(target, drafter, None, ConstantController(k=3)),
        [Request(prompt, SamplingParams(), 40, seed=i) for i, prompt in enumerate(prompts)],
    )
    return sum(len(run.output) for run in runs) / sum(run.stats.num_drafts for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, *LEARNT])
def test_it_learns_on_an_unseen_target(method: str) -> None:
    fresh = acceptance(*learnt(method, {}, 0))
    assert acceptance(*learnt(method, {}, 300)) >= max(1.3, fresh + 0.1)
