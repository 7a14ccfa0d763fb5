"""The dependency rule of the layers, read from the imports themselves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import foretoken

ROOT = Path(foretoken.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

BASE = {"core", "sampling", "costs", "names"}
AXES = {*BASE, "registry", "trees", "verifiers", "models", "drafters", "controllers"}
LIBRARY = {
    *AXES,
    "bos",
    "constraints",
    "conversation",
    "options",
    "prompts",
    "engine",
    "loading",
    "llm",
    "hub",
    "hub_inputs",
    "hub_params",
    "io",
    "theory",
    "measure",
    "tune",
    "parity",
    "training",
    "formats",
    "bench",
    "config",
}

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": LIBRARY,
    "core": set(),
    "names": set(),
    "specs": {"names"},
    "costs": set(),
    "registry": {"names", "specs"},
    "config": {"registry"},
    "sampling": {"core"},
    "trees": {*BASE, "registry"},
    "bos": set(),
    "conversation": {"core"},
    "prompts": {"bos", "conversation", "core"},
    "io": set(),
    "verifiers": {*BASE, "trees", "registry"},
    "models": {*BASE, "trees", "io"},
    "controllers": {*BASE, "trees"},
    "drafters": {*BASE, "trees", "models", "io"},
    "constraints": {"sampling"},
    "options": {"constraints", "core", "prompts", "sampling", "engine"},
    "grammar": {"constraints"},
    "engine": {*AXES, "constraints"},
    "loading": {*AXES, "config", "io"},
    "llm": {*AXES, "engine", "loading", "options", "constraints", "conversation", "prompts", "measure"},
    "hub": {*AXES, "engine", "loading", "llm", "hub_inputs", "hub_params"},
    "hub_inputs": {"hub_params"},
    "hub_params": {"sampling"},
    "training": {*BASE, "conversation", "trees", "models", "drafters", "loading", "registry", "io"},
    "theory": {"costs", "io"},
    "measure": {*AXES, "engine", "loading", "options", "conversation", "prompts"},
    "tune": LIBRARY - {"hub", "bench", "parity"},
    "parity": LIBRARY - {"hub", "bench", "tune"},
    "formats": {*BASE, "trees", "models", "drafters", "loading", "registry", "io"},
    "bench": LIBRARY,
    "show": LIBRARY - {"hub"},
    "jobs": {"engine", "llm", "conversation"},
    "server": {*LIBRARY, "grammar"},
    "cli": {*LIBRARY, "show", "jobs", "server", "grammar"},
    "__main__": {"cli"},
}
"""Package -> what it may import besides itself."""

INSIDE_MODELS: dict[str, set[str]] = {
    "cache": {"base"},
    "network": {"base", "cache"},
    "native": {"linear"},
    "linear": {"base", "machine", "native", "network"},
    "checks": {"base", "cache", "linear", "machine", "network"},
    "gguf": {"checks", "linear", "native"},
    "forward": {"base", "cache", "checks", "clock", "huggingface", "linear", "native", "network", "refusals", "runner"},
    "variants": {"base", "cache", "forward", "huggingface", "linear", "machine", "network", "runner"},
    "other": {"base", "gguf", "huggingface", "runner"},
}
"""Folder of ``models/`` -> what of ``models/`` it may import besides itself."""

TRANSFORMERS_INSIDES = ("transformers.cache_utils", "transformers.masking_utils", "transformers.modeling_")


@dataclass(frozen=True)
class Import:
    """One imported module."""

    file: Path
    module: str
    names: tuple[str, ...]
    lazy: bool

    @property
    def package(self) -> str:
        """The package (or single module) below ``foretoken`` that holds the file."""
        parts = self.file.relative_to(ROOT).parts
        return parts[0] if len(parts) > 1 else self.file.stem

    @property
    def folder(self) -> str | None:
        """The folder of ``models/`` that holds the file, if one does."""
        parts = self.file.relative_to(ROOT).parts
        return parts[1] if parts[0] == "models" and len(parts) > 2 else None

    @property
    def inside(self) -> str | None:
        """The module below ``foretoken`` that is imported; ``None`` for other libraries, "" for the package itself."""
        head, _, rest = self.module.partition(".")
        return rest if head == "foretoken" else None


def imports_of(file: Path, source: str | None = None) -> Iterator[Import]:
    """Every import of a file that runs (what is under ``TYPE_CHECKING`` does not)."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, alias.name, (), lazy)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield Import(file, node.module or "", tuple(alias.name for alias in node.names), lazy)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    yield from walk(ast.parse(file.read_text() if source is None else source), False)


def objection(found: Import) -> str | None:
    """What is wrong with an import, if anything."""
    package, inside = found.package, found.inside
    if inside is None:
        return outside_objection(found)
    wanted, *below = inside.split(".")
    folder = found.folder
    if wanted == "models" and below and folder and below[0] not in {folder, *INSIDE_MODELS[folder]}:
        return f"models/{folder} must not import foretoken.{inside}"
    if wanted in {"", package} or wanted in MAY_IMPORT[package]:
        return None
    return f"{package} must not import foretoken.{inside}"


def outside_objection(found: Import) -> str | None:
    library = found.module.split(".")[0]
    if found.package in {"trees", "verifiers"} and library in {"transformers", "tokenizers", "numpy", "safetensors"}:
        return f"{found.package} is pure tensor code: no {library}"
    if found.package == "models":
        return None
    if found.module.startswith(TRANSFORMERS_INSIDES) or (
        library == "transformers" and any("Cache" in n for n in found.names)
    ):
        return "only models/ touches a Transformers forward or cache"
    return None


def test_imports_follow_the_layers() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {found.module}: {reason}"
        for file in FILES
        for found in imports_of(file)
        if (reason := objection(found))
    ]
    assert not wrong


def test_every_package_has_a_rule() -> None:
    assert {found.package for file in FILES for found in imports_of(file)} <= set(MAY_IMPORT)
    assert {file.parent.name for file in ROOT.glob("models/*/__init__.py")} == set(INSIDE_MODELS)


def files_of(found: Import, known: set[Path]) -> Iterator[Path]:
    """The files that an import of ours runs, packages above them left out."""
    for name in found.names or ("",):
        place = ROOT.parent.joinpath(*found.module.split("."))
        candidates = (
            place / f"{name}.py",
            place / name / "__init__.py",
            place.with_suffix(".py"),
            place / "__init__.py",
        )
        yield from [file for file in candidates if file in known][:1]


def cycle_of(imports: dict[Path, set[Path]]) -> list[Path]:
    """Files that import each other in a circle; empty where none do."""
    left = {file: set(wanted) for file, wanted in imports.items()}
    while leaves := [file for file, wanted in left.items() if not wanted & left.keys()]:
        for file in leaves:
            del left[file]
    return sorted(left)


def models_imports() -> dict[Path, set[Path]]:
    known = {file for file in FILES if file.is_relative_to(ROOT / "models")}
    return {file: {other for found in imports_of(file) for other in files_of(found, known)} - {file} for file in known}


def test_no_files_of_models_import_each_other_in_a_circle() -> None:
    assert cycle_of(models_imports()) == []


def test_a_circle_is_seen() -> None:
    imports = models_imports()
    runner, layers = ROOT / "models/runner.py", ROOT / "models/network/layers.py"
    (found,) = imports_of(layers, "def f():\n    from foretoken.models.runner import TreeRunner")
    imports[layers] |= set(files_of(found, set(imports)))
    assert {runner, layers} <= set(cycle_of(imports))


def test_the_protocol_of_models_imports_nothing_heavy() -> None:
    """Whoever only names its types waits for no other library."""
    modules = {found.module for found in imports_of(ROOT / "models/base.py")}
    others = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    assert others == {"foretoken.models.refusals"}
    ours = {found.module.split(".")[0] for found in imports_of(ROOT / "models/refusals.py")}
    assert ours <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("place", "source", "words"),
    [
        ("verifiers/x.py", "from foretoken.models.base import LanguageModel", "must not import foretoken.models.base"),
        ("verifiers/x.py", "import numpy as np", "pure tensor code"),
        (
            "trees/x.py",
            "def f():\n    import foretoken.methods.verifiers.base",
            "must not import foretoken.methods.verifiers.base",
        ),
        ("drafters/x.py", "from foretoken.engine.loop import Engine", "must not import foretoken.engine"),
        (
            "drafters/x.py",
            "def f():\n    from foretoken.methods.verifiers.block import B",
            "must not import foretoken.methods.verifiers",
        ),
        ("drafters/x.py", "from foretoken.loading import load_model", "must not import foretoken.loading"),
        (
            "drafters/x.py",
            "def build():\n    from foretoken.loading import load_model",
            "must not import foretoken.loading",
        ),
        (
            "controllers/x.py",
            "def build():\n    import foretoken.methods.drafters.nets.store",
            "must not import foretoken.methods.drafters",
        ),
        ("drafters/x.py", "from transformers import DynamicCache", "only models/"),
        ("engine/x.py", "from transformers.cache_utils import Cache", "only models/"),
        ("engine/x.py", "from foretoken.cli.main import main", "must not import foretoken.cli"),
        ("bench/x.py", "def f():\n    import foretoken.server.app", "must not import foretoken.server.app"),
        ("core/x.py", "from foretoken.core.sampling import Sampler", "must not import foretoken.core.sampling"),
        (
            "models/cache/x.py",
            "def f():\n    from foretoken.models.forward.lean import LeanForward",
            "models/cache must not import foretoken.models.forward",
        ),
    ],
)
def test_wrong_imports_are_seen(place: str, source: str, words: str) -> None:
    (found,) = imports_of(ROOT / place, source)
    assert words in str(objection(found))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        (
            "verifiers/x.py",
            "import torch\nfrom foretoken.core import Kind\nfrom foretoken.methods.trees.operations import merge",
        ),
        (
            "drafters/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foretoken.engine.loop import Engine",
        ),
        ("models/x.py", "from transformers.cache_utils import Cache"),
        ("cli/x.py", "def f():\n    from foretoken.server.app import serve\n    from foretoken import __version__"),
    ],
)
def test_right_imports_pass(place: str, source: str) -> None:
    assert [objection(found) for found in imports_of(ROOT / place, source) if objection(found)] == []
