"""A tiny target and draft model on disk, and a way to run the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_models import TEXT, save_model
from transformers import AutoTokenizer

from foretoken.cli.main import main
from foretoken.training.corpus import train_tokenizer


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
        document: dict[str, Any] = json.loads(lines[0])
        return document


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
