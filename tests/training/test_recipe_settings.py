"""What ``foretoken train METHOD --set`` takes: the listed defaults are those of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.main import main
from foretoken.loading import load_model
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes import RECIPES, find_recipe, settings_of
from foretoken.training.recipes.blocks import BlockRecipe


def test_a_method_that_is_not_trained_has_none() -> None:
    assert settings_of("ngram") == []


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model("builtin")


@pytest.mark.parametrize("method", RECIPES)
def test_defaults_are_those_of_training(method: str, target: Any) -> None:
    """A setting has a default unless the target determines it, and training then uses that default."""
    kind = find_recipe(method)
    recipe = kind(target, TargetParts(target), {})
    from_target = set(recipe.from_target()) - set(kind.fixed)
    assert {setting.name for setting in settings_of(method) if setting.default is None} == from_target
    resolved = {"uno": {"mask_token": 0}}.get(method, {})  # -1 stands for it
    for setting in settings_of(method):
        if setting.default is not None:
            assert getattr(recipe.config, setting.name) == resolved.get(setting.name, setting.default)


def test_an_unknown_setting_names_the_command(target: Any) -> None:
    with pytest.raises(ValueError, match=r"valid ones: heads.*; `foretoken methods medusa` explains them"):
        find_recipe("medusa")(target, TargetParts(target), {"depth": "2"})


@pytest.mark.parametrize("method", RECIPES)
def test_only_who_trains_the_target_updates_it_by_a_rank(method: str, target: Any) -> None:
    """``rank`` of dflash2, dspark and uno is the size of matrices of their own."""
    kind = find_recipe(method)
    settings = {"rank": "4"} if "rank" in kind.settings() else {}
    settings |= {"medusa": {"mode": "joint"}, "bpd": {"mode": "finetune"}}.get(method, {})
    recipe = kind(target, TargetParts(target), settings)
    assert recipe.update_rank == (4 if settings and recipe.trains_target else 0)
    assert recipe.trains_target == (method in ("medusa", "bpd", "early_exit", "jacobi"))


@pytest.mark.parametrize("method", RECIPES)
def test_the_guide_names_the_drafters_of_frequent_tokens(method: str, target: Any) -> None:
    kind = find_recipe(method)
    guide = (Path(__file__).resolve().parents[2] / "docs/training.md").read_text(encoding="utf-8")
    paragraph = guide.partition("**Vocabulary.**")[2].partition("**Optimizer")[0].partition("For targets with")[2]
    named = f"`{method}`" in paragraph or issubclass(kind, BlockRecipe)
    assert kind(target, TargetParts(target), {}).reduces == named and "the block drafters" in paragraph


@pytest.mark.parametrize("method", ["medusa", "lm", "distill", "boost", "specdec_pp"])
@pytest.mark.parametrize("seed", ["-1", str(2**31)])
def test_a_seed_out_of_range(method: str, seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 50)
    command = ["train", method, "--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    assert main([*command, "--seed", seed]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Invalid value for '--seed'") and error.count("\n") == 1
