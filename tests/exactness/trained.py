"""Drafters whose weights were really trained for a toy target: right more often than by chance, and often wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.pard import PardDrafter
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import Fingerprint, TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.config import DistillConfig
from foretoken.training.distill import Distiller
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch, Recipe

STEPS, TEXTS, LENGTH = 30, 4, 40

_STEPS: ContextVar[int] = ContextVar("steps of training", default=STEPS)


@contextmanager
def only_built() -> Iterator[None]:
    """Drafters made inside this context learn nothing: for tests that read traits and decode nothing."""
    before = _STEPS.set(0)
    yield
    _STEPS.reset(before)


_RECIPES: dict[tuple[str, Fingerprint, tuple[tuple[str, str], ...], int], Recipe] = {}


def _train(method: str, target: LanguageModel, settings: dict[str, str]) -> Recipe:
    generator = torch.Generator().manual_seed(1)
    recipe = find_recipe(method)(target, TargetParts(target), settings, seed=1)
    texts = torch.randint(target.vocab_size, (STEPS, TEXTS, LENGTH + 1), generator=generator)
    recipe.prepare(texts.flatten().numpy())
    recipe.parts.network.requires_grad_(False)
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=2e-2)
    recipe.net.train()
    for step, tokens in enumerate(texts[: _STEPS.get()]):
        with torch.enable_grad():
            batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts, step, STEPS)
            recipe.loss(batch, generator).backward()
        torch.nn.utils.clip_grad_norm_(recipe.net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    recipe.net.eval()
    return recipe


_TAUGHT: dict[tuple[Fingerprint, int], PreTrainedModel] = {}


def taught(target: LanguageModel, draft: LanguageModel) -> PardDrafter:
    """A draft model that has learned to fill masks with what the target says behind random texts."""
    key = TargetParts(target).fingerprint(), _STEPS.get()
    if key not in _TAUGHT:
        student = copy.deepcopy(draft.model).float()  # type: ignore[attr-defined]
        for weight in student.parameters():
            weight.requires_grad_(True)
        config = DistillConfig(context=LENGTH, places=3, mask_token=target.vocab_size - 1)
        shop = SimpleNamespace(
            target=target, parts=TargetParts(target), config=config, tokenizer=range(target.vocab_size),
            source=lambda student: None,
        )  # fmt: skip
        worker = Distiller(shop, student, Path())  # type: ignore[arg-type]
        texts = torch.randint(target.vocab_size, (STEPS, TEXTS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
        for step, tokens in enumerate(texts[: _STEPS.get()]):
            with torch.enable_grad():
                worker.mask_loss(tokens, torch.ones(TEXTS, LENGTH), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        _TAUGHT[key] = student.to(next(target.model.parameters()).dtype)  # type: ignore[attr-defined]
    return PardDrafter(HuggingFaceModel(_TAUGHT[key]), k=3, nodes=5, target=target)


def trained(method: str, target: LanguageModel, **settings: str) -> Drafter:
    """A drafter over weights that were trained on the target's distributions behind random texts, with settings as of
    ``--set``.

    Toy targets are made anew for every test, always with the same weights: what was trained for one fits all of them.
    """
    key = method, TargetParts(target).fingerprint(), tuple(sorted(settings.items())), _STEPS.get()
    if key not in _RECIPES:
        _RECIPES[key] = _train(method, target, settings)
    recipe = _RECIPES[key].beside(target)
    tokens = torch.randint(target.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)
    return recipe.drafter(recipe.measure([batch]))
