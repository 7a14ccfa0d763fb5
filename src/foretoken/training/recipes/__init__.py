"""Recipes of trained drafters: the network, the loss, and the drafter made from it."""

from __future__ import annotations

import importlib

from foretoken.core.names import unknown
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


def find_recipe(method: str) -> type[Recipe]:
    """The recipe of a method.  Raises ``ValueError``, listing the valid methods, for an unknown one."""
    if method not in RECIPES:
        raise unknown(f"nothing is trained for {method!r}", method, list(RECIPES))
    module, _, name = RECIPES[method].partition(":")
    return getattr(importlib.import_module(f"foretoken.training.recipes.{module}"), name)
