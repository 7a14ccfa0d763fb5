"""A quantised GGUF file as the target of every drafter: its text is that of plain decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import load_model
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.native import why_not
from gguf_writer import write_model
from toys import engine, outputs

VOCAB = 32
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [7, 7, 2]]


@cache
def network(noise: float) -> Any:
    """A random llama whose rows fill blocks; ``noise`` makes another one near it."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        eos_token_id=None,
        bos_token_id=None,
    )
    generator = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
                weight.add_(torch.randn(weight.shape) * 0.3 * noise)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, LanguageModel]:
    """Target and draft model, of files in 4 and 8 bits."""
    folder = tmp_path_factory.mktemp("gguf")
    kinds = (("Q4_0", 0.0), ("Q8_0", 0.2))
    files = [write_model(folder / f"{kind}.gguf", network(noise), kind) for kind, noise in kinds]
    # Our kernels give a row the same bits in any company; PyTorch's do where it is asked for.
    exact = "bitwise" if why_not() else "distribution"
    target, draft = (load_model(file, backend="native", exact=exact) for file in files)
    return target, draft


@pytest.fixture(scope="module")
def plain(models: tuple[LanguageModel, LanguageModel]) -> list[list[int]]:
    return outputs(engine(models[0]), requests())


def requests() -> list[Request]:
    """Greedy and seeded."""
    seeded = SamplingParams(temperature=1.0)
    greedy = [Request(prompt, SamplingParams(), 16) for prompt in PROMPTS]
    return [*greedy, *(Request(prompt, seeded, 16, seed=5) for prompt in PROMPTS)]


def first_cases() -> list[Any]:
    """One case of every drafter but for that which trains its draft model."""
    return [pytest.param(cases[0], id=name) for name, cases in CASES.items() if cases and name != "online"]


@pytest.mark.parametrize("case", first_cases())
def test_texts_are_those_of_plain_decoding(
    models: tuple[LanguageModel, LanguageModel], plain: list[list[int]], case: Case
) -> None:
    target, draft = models
    assert target.exactness == "bitwise" and outputs(engine(target), requests()) == plain
    drafting = engine(target, case.build(target, draft))
    assert outputs(drafting, requests()) == plain


def test_only_full_weights_are_learnt(
    models: tuple[LanguageModel, LanguageModel], plain: list[list[int]], tmp_path: Path
) -> None:
    target, quantised = models
    case = CASES["online"][0]
    with pytest.raises(CapabilityError, match=r"online learns the weights of .* neither packed nor quantised"):
        case.build(target, quantised)
    file = write_model(tmp_path / "full.gguf", network(0.2))
    assert outputs(engine(target, case.build(target, load_model(file, pack=False))), requests()) == plain
