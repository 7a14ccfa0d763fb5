"""Drafters whose weights were really trained for a toy target: right more often than by chance, and often wrong."""

from __future__ import annotations

import torch

from foretoken.drafters.base import Drafter
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import Fingerprint, TargetParts
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch, Recipe

STEPS, TEXTS, LENGTH = 30, 4, 40


_RECIPES: dict[tuple[str, Fingerprint], Recipe] = {}


def _train(method: str, target: LanguageModel) -> Recipe:
    generator = torch.Generator().manual_seed(1)
    recipe = find_recipe(method)(target, TargetParts(target), {}, seed=1)
    texts = torch.randint(target.vocab_size, (STEPS, TEXTS, LENGTH + 1), generator=generator)
    recipe.prepare(texts.flatten().numpy())
    recipe.parts.network.requires_grad_(False)
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=2e-2)
    recipe.net.train()
    for step, tokens in enumerate(texts):
        with torch.enable_grad():
            batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts, step, STEPS)
            recipe.loss(batch, generator).backward()
        torch.nn.utils.clip_grad_norm_(recipe.net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    recipe.net.eval()
    return recipe


def trained(method: str, target: LanguageModel) -> Drafter:
    """A drafter over weights that were trained on the target's distributions behind random texts.

    Toy targets are made anew for every test, always with the same weights: what was trained for one fits all of them.
    """
    key = method, TargetParts(target).fingerprint()
    if key not in _RECIPES:
        _RECIPES[key] = _train(method, target)
    recipe = _RECIPES[key].beside(target)
    tokens = torch.randint(target.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    held = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)
    return recipe.drafter(recipe.measure([held]))
