"""LayerSkip's training: its formulas, the dropped layers, the rotation of exits."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.training.config import LmConfig
from foretoken.training.lm import build_model
from foretoken.training.recipes.early_exit import (
    EarlyExitRecipe,
    EarlyExitSettings,
    dropout_rates,
    dropped_layers,
    exit_weights,
)


def llama(layers: int) -> LanguageModel:
    """A small untrained target."""
    torch.manual_seed(0)
    config = LmConfig(hidden=16, layers=layers, heads=2, kv_heads=1, ffn=24, context=32, vocab=300)
    return wrap(build_model(config, 0), lean=False)


def test_dropout_grows_from_nothing_to_its_highest_rate() -> None:
    rates = dropout_rates(5, 0.2)
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.2)
    assert rates[2] == pytest.approx(0.2 * (math.sqrt(2) - 1))
    assert dropout_rates(1, 0.2) == [0.0]


def test_exit_weights_by_hand() -> None:
    """4 layers, scale 1: e = 0, 1, 3 for the exits after layers 1 to 3, and 3 + 3 = 6 for the last."""
    assert exit_weights(4, 1.0, [1, 2, 3]) == pytest.approx({1: 0.0, 2: 0.1, 3: 0.3, 4: 0.6})
    assert exit_weights(4, 1.0, [2]) == pytest.approx({2: 1 / 7, 4: 6 / 7})
    assert exit_weights(4, 0.0, [2, 3]) == pytest.approx({2: 0.0, 3: 0.0, 4: 1.0})
    assert exit_weights(1, 1.0, []) == {1: 1.0}


def test_every_exit_has_its_turn() -> None:
    model = llama(6)
    recipe = EarlyExitRecipe(model, TargetParts(model), {"every": "3"})
    assert [recipe.exits(step) for step in range(4)] == [[3], [1, 4], [2, 5], [3]]


def test_one_exit_is_trained_in_every_step() -> None:
    model = llama(6)
    recipe = EarlyExitRecipe(model, TargetParts(model), {"exits": "layer", "layer": "2", "scale": "0.5"})
    assert [recipe.exits(step) for step in range(3)] == [[2], [2], [2]]
    assert recipe.weights([2]) == pytest.approx({2: 1 / 3, 6: 2 / 3})
    assert recipe.spec("x") == "early_exit,layer=2"


def test_dropped_layers_hand_a_texts_states_on() -> None:
    model = llama(3)
    parts = TargetParts(model)
    tokens = torch.arange(12).view(2, 6) % parts.vocab_size
    names = [f"layer:{i}" for i in range(4)]
    whole = parts.features(tokens, names)
    kept = torch.tensor([[True, True], [False, True], [True, True]])
    with dropped_layers(parts.network, kept):
        features = parts.features(tokens, names)
    assert torch.equal(features["layer:2"][0], features["layer:1"][0])  # the first text passes by the second layer
    assert not torch.equal(features["layer:3"][0], whole["layer:3"][0])
    for name in names:
        assert torch.equal(features[name][1], whole[name][1])
    assert torch.equal(parts.features(tokens, names)["layer:3"], whole["layer:3"])  # and nothing stays behind


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer": 4}, "from 1 to 3, not 4"),
        ({"dropout": 1.0}, "dropout"),
        ({"labels": "none"}, "labels must be"),
        ({"exits": "some"}, "exits must be all or layer, not 'some'"),
        ({"rank": -1}, "rank must be 0, or above 0"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EarlyExitSettings(num_layers=4, **settings)  # type: ignore[arg-type]
