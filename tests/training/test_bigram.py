"""DFlash on a target that is a bigram: a short training learns its next tokens, and random weights change no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.constant import ConstantController
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch
from toys import engine, llama, serve

VOCAB, SIZE, DRAFTS = 16, 16, 5


def bigram() -> HuggingFaceModel:
    """The next token depends on the last one alone, and is a certain one with a probability of about .9."""
    network, generator = llama(VOCAB, dtype=torch.float32), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = 4 * torch.nn.functional.normalize(torch.randn(VOCAB, SIZE, generator=generator), dim=1)
        network.model.embed_tokens.weight.copy_(rows)
        network.model.norm.weight.fill_(1.0)
        network.lm_head.weight[torch.randperm(VOCAB, generator=generator)] = 0.4 * rows
    return HuggingFaceModel(network)


def decoded(target: HuggingFaceModel, drafter: Any, count: int, seed: int, temperature: float = 0.0) -> Any:
    prompts = torch.randint(VOCAB, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(temperature=temperature)
    requests = [Request(prompt, params, 46, seed=i) for i, prompt in enumerate(prompts)]
    runs = serve(engine(target, drafter, None, ConstantController(k=DRAFTS) if drafter else None), requests)
    return prompts, runs


def test_a_bigram_is_learnt() -> None:
    target = bigram()
    prompts, runs = decoded(target, None, 96, 1, temperature=1.0)
    texts = torch.tensor([prompt + run.output for prompt, run in zip(prompts, runs, strict=True)])
    recipe: Any = find_recipe("dflash")(target, TargetParts(target), {"block": str(DRAFTS + 1)}, 0)
    recipe.parts.network.requires_grad_(False)
    _, plain = decoded(target, None, 12, 9)

    def length() -> float:
        recipe.net.eval()
        drafter = recipe.drafter({})
        drafter.width = 1
        _, drafted = decoded(target, drafter, 12, 9)
        assert [run.output for run in drafted] == [run.output for run in plain]
        return sum(len(run.output) for run in drafted) / sum(run.stats.num_drafts for run in drafted)

    untrained = length()
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=0.01)
    recipe.net.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(200):
        tokens = texts[torch.randint(len(texts), (8,), generator=generator)]
        with torch.enable_grad():
            batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts, step, 200)
            recipe.loss(batch, generator).backward()
        torch.nn.utils.clip_grad_norm_(recipe.net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert untrained < 1.5
    assert length() > 3.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_weights_change_no_text(temperature: float) -> None:
    target = bigram()
    recipe: Any = find_recipe("dflash")(target, TargetParts(target), {"block": str(DRAFTS + 1)}, 0)
    with torch.no_grad():
        for weight in recipe.net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    _, plain = decoded(target, None, 8, 3, temperature)
    _, drafted = decoded(target, recipe.drafter({}), 8, 3, temperature)
    assert [run.output for run in drafted] == [run.output for run in plain]
    assert sum(run.stats.num_draft_tokens for run in drafted) > 100
