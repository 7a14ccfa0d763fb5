"""Every trained kind learns on a target that it has not seen: 300 steps on what that target writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes import RECIPES, find_recipe
from foretoken.training.recipes.base import Batch
from toys import engine, llama, serve

SETTINGS: dict[str, dict[str, str]] = {
    **{method: {"block": "4"} for method in ("dflash", "dflash2", "dspark")},
    "bpd": {"k": "4"},
    "eagle3": {"draft_vocab": "0", "layers": "0,1,2"},
    "early_exit": {"layer": "1"},
    "medusa": {"own_projection": "true"},
    "peagle": {"places": "3", "num_layers": "1", "draft_vocab": "0"},
    "uno": {"places": "3", "rank": "8", "noise": "random"},
}
"""Settings for a target of two layers."""


def learnt(method: str, steps: int) -> tuple[Any, HuggingFaceModel, list[float]]:
    """A drafter for a random target, trained on what that target writes; and the losses."""
    target = HuggingFaceModel(llama(dtype=torch.float32))
    recipe: Any = find_recipe(method)(target, TargetParts(target), SETTINGS.get(method, {}), 0)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(32, (96, 2), generator=generator).tolist()
    runs = serve(
        engine(target), [Request(p, SamplingParams(temperature=0.3), 46, seed=i) for i, p in enumerate(prompts)]
    )
    texts = torch.tensor([prompt + run.output for prompt, run in zip(prompts, runs, strict=True)])
    trained = recipe.parts.network if recipe.trains_target else recipe.net
    recipe.parts.network.requires_grad_(recipe.trains_target)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=recipe.lr)
    recipe.net.train()
    losses = []
    for step in range(steps):
        with torch.enable_grad():
            tokens = texts[torch.randint(len(texts), (8,), generator=generator)]
            batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts, step, steps)
            loss = recipe.loss(batch, generator)
            loss.backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    recipe.net.eval()
    return recipe.drafter({}), target, losses


def acceptance(drafter: Any, target: HuggingFaceModel) -> float:
    """Mean acceptance length of chains of greedy requests."""
    prompts = torch.randint(32, (12, 2), generator=torch.Generator().manual_seed(9)).tolist()
    if isinstance(drafter, HeadsDrafter):
        drafter = drafter.reshaped([(0,) * depth for depth in (1, 2, 3)])
    drafter.width = 1
    runs = serve(
        engine(target, drafter, None, ConstantController(k=3)),
        [Request(prompt, SamplingParams(), 40, seed=i) for i, prompt in enumerate(prompts)],
    )
    return sum(len(run.output) for run in runs) / sum(run.stats.num_drafts for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(RECIPES.keys() - {"jacobi"}))
def test_it_learns_on_an_unseen_target(method: str) -> None:
    """``jacobi`` trains another target for a drafter without weights (test_jacobi_recipe.py).

    ``pass_tokens`` trains four rows of 16 numbers and leaves the random layers that read them alone: its loss falls,
    and its acceptance stays at 1.42.
    """
    drafter, target, _ = learnt(method, 0)
    fresh = acceptance(drafter, target)
    drafter, target, losses = learnt(method, 300)
    length, gain = acceptance(drafter, target), 0.0 if method == "pass_tokens" else 0.1
    assert length >= max(1.3, fresh + gain), f"{fresh:.3f} -> {length:.3f}"
    assert sum(losses[-30:]) < sum(losses[:30])
