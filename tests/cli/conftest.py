"""A tiny target and draft model on disk, and a way to run the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from foretoken.cli.main import main
from foretoken.training.corpus import train_tokenizer

TEXT = "def add(a, b):\n    return a + b\n\nfor item in items:\n    print(item)\n" * 4
CONTEXT = 160


def save_model(folder: Path, tokenizer: Any, seed: int = 0, noise: float = 0.0, context: int = CONTEXT) -> Path:
    """A random two-layer Llama; ``noise`` moves its weights, so that a copy becomes a fair draft model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer of fewer than 320 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer([TEXT], 300, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """The target's folder."""
    return str(save_model(tmp_path_factory.mktemp("models") / "target", tokenizer))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """A draft model that is often, not always, right."""
    return str(save_model(tmp_path_factory.mktemp("models") / "draft", tokenizer, noise=0.02))


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object, which must be all of stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        found: dict[str, Any] = json.loads(lines[0])
        return found


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``foretoken ...`` in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "NO_COLOR", "FORETOKEN_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
