"""Training of several prediction modules in a row: what is trained is what drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models import wrap
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.stacked import StackedModel, StackedModules
from foretoken.models.forward.parts import TargetParts
from foretoken.models.linear.layouts import usable_layouts
from foretoken.models.linear.packing import Packing, pack_linears
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.training.config import LmConfig
from foretoken.training.lm import build_model
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.mtp import MtpRecipe

LENGTH = 24


def llama() -> LanguageModel:
    """A small untrained target."""
    config = LmConfig(hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, context=64, vocab=300)
    return wrap(build_model(config, 0), lean=False)


def recipe_of(settings: dict[str, str], target: LanguageModel | None = None) -> MtpRecipe:
    model = target or llama()
    recipe = MtpRecipe(model, TargetParts(model), settings, seed=1)
    recipe.parts.network.requires_grad_(False)
    return recipe


def batch_of(recipe: MtpRecipe, texts: int = 2, seed: int = 0) -> Batch:
    tokens = torch.randint(300, (texts, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, recipe.parts.features(tokens[:, :-1], ("last",)), recipe.parts)


@pytest.mark.parametrize("layer", ["own", "target"])
@pytest.mark.parametrize("modules", [1, 2, 3])
def test_a_step_in_training_is_that_step_of_a_draft(layer: str, modules: int) -> None:
    """From every chosen place of a text, 5 steps: outputs and logits equal those of the model that drafts."""
    recipe = recipe_of({"modules": str(modules), "layer": layer, "unroll": "5"})
    recipe.net.eval()
    batch = batch_of(recipe)
    rows = torch.tensor([[3, 10], [7, 15]])
    states = batch.taps["last"]
    with torch.no_grad():
        outputs = list(recipe.unrolled(batch, states.float(), rows, 5))
        trained = [recipe.draft_logits(output.flatten(0, 1), step) for step, output in enumerate(outputs)]
    model: Any = MtpDrafter.model_of(recipe.net, recipe.parts, recipe.target, None)  # type: ignore[arg-type]
    assert type(model) is (StackedModel if modules > 1 else FeatureModel)
    for text in range(2):
        for place in range(2):
            row, tokens = int(rows[text, place]), batch.tokens[text].tolist()
            sequence = model.open()
            got = model.forward([Feed(sequence, tokens[1 : row + 2], states=states[text, : row + 1])])[0]
            model.commit(sequence, range(row + 1))
            for step in range(5):
                expected = trained[step][2 * text + place]
                assert float((got.logits[-1] - expected).abs().max()) < 2e-2 * float(expected.std()) + 1e-4, step
                feed = Feed(sequence, [tokens[row + 2 + step]], states=got.taps["state"][-1:])
                got = model.forward([feed])[0]


def test_every_module_learns_and_the_loss_falls() -> None:
    """On a target that is sure of what it says."""
    target = llama()
    with torch.no_grad():
        target.model.lm_head.weight.mul_(40.0)  # type: ignore[attr-defined]
    recipe = recipe_of({"modules": "2", "unroll": "2", "beta": "1"}, target)
    assert isinstance(recipe.net, StackedModules)
    before = {name: value.clone() for name, value in recipe.net.state_dict().items()}
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        loss = recipe.loss(batch_of(recipe, seed=step % 3), torch.Generator().manual_seed(step))
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and bool(p.grad.any()) for p in recipe.net.parameters()) or not step
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    changed = [name for name, value in recipe.net.state_dict().items() if not torch.equal(value, before[name])]
    assert len(changed) == len(before)


def test_what_was_trained_loads_and_drafts_trees(tmp_path: Path) -> None:
    """A folder with two modules: the text is plain decoding's, as a chain and as a tree."""
    target = llama()
    recipe = recipe_of({"modules": "2"}, target)
    fingerprint = TargetParts(target).fingerprint()
    save_drafter(tmp_path, "mtp", recipe.stored_config(), recipe.net, fingerprint)
    assert recipe.stored_config()["modules"] == 2
    network = recipe.parts.network
    plain = ft.load(network, None, tokenizer=None).generate([5, 6, 7, 8], max_new_tokens=16)
    for options in ("", ",width=2,nodes=6,depth=3"):
        llm = ft.load(network, f"mtp:{tmp_path}{options}", controller="constant", tokenizer=None)
        assert isinstance(llm.drafter.model, StackedModel)  # type: ignore[union-attr]
        out = llm.generate([5, 6, 7, 8], max_new_tokens=16)
        assert out.token_ids == plain.token_ids
        assert out.stats.num_draft_tokens > out.stats.num_drafts


@pytest.mark.parametrize("how", ["packed", "int8"])
def test_a_layer_of_a_packed_or_quantised_target_is_started_from(how: str) -> None:
    """A target that was loaded for decoding: its linear layers have a weight, and are in no state_dict."""
    target, twin = llama(), llama()
    network: Any = target.model  # type: ignore[attr-defined]
    if how == "packed":
        layout = usable_layouts(torch.bfloat16)[-1]
        if layout == "plain":
            pytest.skip("this machine has no packed bfloat16 layers")
        assert pack_linears(network.bfloat16(), Packing(layout))
    else:
        assert quantise_linears(network, "int8")
    weights, expected = (recipe_of({"layer": "target"}, model).net.state_dict() for model in (target, twin))
    for name, value in expected.items():
        assert float((weights[name] - value).abs().max()) <= 0.01 * float(value.abs().max()), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modules": "0"}, "mtp needs modules >= 1, not 0"),
        ({"modules": "4"}, "mtp needs unroll >= 4 \\(a step for each module\\)"),
        ({"modules": "two"}, "setting modules='two' must be of type int"),
    ],
)
def test_bad_settings(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe_of(settings)
