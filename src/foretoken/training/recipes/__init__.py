"""Recipes of trained drafters: the network, the loss, and the drafter made from it."""

from __future__ import annotations

import importlib

from foretoken.core.names import unknown
from foretoken.core.specs import Option
from foretoken.training.recipes.base import Recipe

RECIPES = {
    "medusa": "medusa:MedusaRecipe",
    "hydra": "hydra:HydraRecipe",
    "eagle": "eagle:EagleRecipe",
    "pass_tokens": "pass_tokens:PassTokensRecipe",
    "mtp": "mtp:MtpRecipe",
    "eagle3": "eagle3:Eagle3Recipe",
    "peagle": "peagle:PeagleRecipe",
    "kangaroo": "kangaroo:KangarooRecipe",
    "jump": "jump:JumpRecipe",
    "early_exit": "early_exit:EarlyExitRecipe",
    "bpd": "bpd:BpdRecipe",
    "dflash": "dflash:DflashRecipe",
    "dflash2": "dflash:Dflash2Recipe",
    "dspark": "dflash:DsparkRecipe",
    "jacobi": "jacobi:JacobiRecipe",
    "uno": "uno:UnoRecipe",
}
"""``module:Class`` below this package, by method."""
STOP_HEAD = {"specdec_pp": "specdec_pp:SpecdecPpRecipe"}
"""The controller that is trained."""


def find_recipe(method: str) -> type[Recipe]:
    """The recipe of a method.  Raises ``ValueError``, listing the valid methods, for an unknown one."""
    if method not in RECIPES:
        raise unknown(f"{method!r} is not a method with a training recipe", method, list(RECIPES))
    return _load(RECIPES[method])


def settings_of(method: str) -> list[Option]:
    """What ``foretoken train METHOD --set`` takes; empty for a method that is not trained."""
    target = (RECIPES | STOP_HEAD).get(method)
    return [] if target is None else _load(target).described_settings()


def _load(target: str) -> type[Recipe]:
    module, _, name = target.partition(":")
    recipe: type[Recipe] = getattr(importlib.import_module(f"foretoken.training.recipes.{module}"), name)
    return recipe
