"""One recipe per trained drafter: its network, its loss, and how a drafter is made from it."""

from __future__ import annotations

import importlib

from foretoken.core.names import unknown
from foretoken.training.recipes.base import Recipe

RECIPES = {
    "medusa": "MedusaRecipe",
    "hydra": "HydraRecipe",
    "eagle": "EagleRecipe",
    "pass_tokens": "PassTokensRecipe",
    "mtp": "MtpRecipe",
    "eagle3": "Eagle3Recipe",
    "peagle": "PeagleRecipe",
    "kangaroo": "KangarooRecipe",
    "jump": "JumpRecipe",
    "early_exit": "EarlyExitRecipe",
    "bpd": "BpdRecipe",
    "dflash": "DflashRecipe",
    "dflash2": "Dflash2Recipe",
    "dspark": "DsparkRecipe",
    "jacobi": "JacobiRecipe",
    "uno": "UnoRecipe",
}
"""Method -> class in the module of the same name."""


def find_recipe(method: str) -> type[Recipe]:
    """The recipe of a method.

    Raises:
        ValueError: unknown method; the message lists the valid ones.
    """
    if method not in RECIPES:
        raise unknown(f"nothing is trained for {method!r}", method, list(RECIPES))
    found: type[Recipe] = getattr(importlib.import_module(f"foretoken.training.recipes.{method}"), RECIPES[method])
    return found
