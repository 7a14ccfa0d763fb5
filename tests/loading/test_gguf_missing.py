"""GGUF files where llama-cpp-python is not installed: one line that names the extra."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

import foretoken as ft
from foretoken.loading import LoadError
from foretoken.loading.gguf import is_gguf
from foretoken.models.other import llama_cpp


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "llama_cpp":
            raise ModuleNotFoundError(f"No module named {name!r}", name="llama_cpp")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    # The library itself stays loaded: llama.cpp goes on calling its log.
    monkeypatch.setattr(llama_cpp, "library", llama_cpp.library.__wrapped__)


@pytest.mark.usefixtures("without")
def test_the_extra_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(
        LoadError,
        match=r"^running .* with llama\.cpp needs llama-cpp-python: pip install 'foretoken\[gguf\]' \(or `make gguf`\)",
    ) as error:
        ft.load(file, backend="llama.cpp")
    assert "\n" not in str(error.value)


def test_files_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "unnamed").write_bytes(b"GGUF\x03")
    assert is_gguf("a/b.gguf") and is_gguf(Path("M.GGUF")) and is_gguf(tmp_path / "unnamed")
    assert not is_gguf("builtin") and not is_gguf(tmp_path) and not is_gguf(object())
