"""Recipes of block drafters: what is trained is what is drafted, and it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.blocks import BlockRecipe, PositionLosses, default_taps, pace, paced_mean
from toys import llama

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
        ({"weights": "pace"}, "weights must be decay or dpace, not 'pace'"),
        ({"smoothing": "1.5"}, "smoothing must be from 0 to 1, not 1.5"),
        ({"block": "1"}, "a block has 2 to 256 rows"),
        ({"hidden_size": "4"}, "unknown setting"),
        ({"mask_token": "32"}, "mask_token must be a token of the target"),
    ],
)
def test_bad_settings(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy_recipe("dflash", settings)


# -- D-PACE ------------------------------------------------------------------------------------------------------------


def test_weights_of_dpace_by_hand() -> None:
    """Confidences .5, .25 and 1 give s = .75, .625 and 1; the prefixes are accepted with .75, .46875 and .46875."""
    weights = pace(torch.tensor([[0.5, 0.25, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), 0.5)
    assert weights.tolist() == [[1.6875, 0.9375, 0.46875], [0.875, 0.375, 0.125], [3.0, 2.0, 1.0]]
    assert pace(torch.tensor([[0.5, 0.25, 1.0]]), 0.0).tolist() == [[0.75, 0.25, 0.125]]
    assert pace(torch.rand(2, 3), 1.0).tolist() == [[3.0, 2.0, 1.0]] * 2


def test_the_loss_of_dpace_by_hand() -> None:
    """Two blocks of two positions with confidences .5 and .25, and .25 and 1, whose last one does not count."""
    losses = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)]
    entropies = [torch.tensor([0.5, 0.25]).log().neg().requires_grad_(), torch.tensor([0.25, 1.0]).log().neg()]
    counted = [None, torch.tensor([1.0, 0.0])]
    mean = paced_mean([PositionLosses(*parts) for parts in zip(losses, entropies, counted, strict=True)], 0.5)
    # s: .75 and .625; .625 and .5.  Weights: 1.21875 and .46875; .9375 and 0
    assert float(mean) == pytest.approx((1.21875 * 1 + 0.46875 * 3 + 0.9375 * 2) / (1.21875 + 0.46875 + 0.9375))
    mean.backward()
    assert losses[0].grad is not None and float(losses[0].grad[0]) == pytest.approx(1.21875 / 2.625)
    assert entropies[0].grad is None  # no gradient through the weights


@pytest.mark.parametrize("method", METHODS)
def test_dpace_weighs_what_the_recipe_computes(method: str) -> None:
    """Equal weights of all positions (smoothing 1) are those of decay without end, up to D-PACE's slope."""
    recipe = toy_recipe(method, {"weights": "dpace", "smoothing": "1"})
    parts = []
    compute = recipe.position_losses
    recipe.position_losses = lambda *given: parts.append(compute(*given)) or parts[-1]
    loss = recipe.loss(toy_batch(recipe), torch.Generator().manual_seed(0))
    assert len(parts) == recipe.config.drafts
    slope = list(range(len(parts), 0, -1))
    means = [float(part.losses.mean()) for part in parts]
    assert float(loss) == pytest.approx(sum(w * m for w, m in zip(slope, means, strict=True)) / sum(slope), rel=1e-5)


@pytest.mark.parametrize(("anchors", "blocks"), [("0", 9), ("4", 4), ("50", 9)])
def test_anchors_of_a_text(anchors: str, blocks: int) -> None:
    """By default as many as there are, up to about 512 positions."""
    recipe = toy_recipe("dflash", {"anchors": anchors})
    seen: list[Any] = []
    compute = recipe.states
    recipe.states = lambda batch, rows: seen.append(rows) or compute(batch, rows)
    recipe.loss(toy_batch(recipe), torch.Generator().manual_seed(0))
    assert seen[0].shape == (2, blocks)


def test_texts_that_are_too_short() -> None:
    recipe = toy_recipe("dflash", {"block": "8"})
    with pytest.raises(ValueError, match="too short for 7 steps: use a larger --context"):
        recipe.loss(toy_batch(recipe, 6), torch.Generator())
