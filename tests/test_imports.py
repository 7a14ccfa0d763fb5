"""The dependency rule of the layers, read from the imports themselves."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import foretoken

ROOT = Path(foretoken.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "registry": {"core"},
    "models": {"core"},
    "methods": {"core", "registry", "models"},
    "engine": {"core", "registry", "models", "methods"},
    "options": {"core", "engine"},
    "loading": {"core", "registry", "models", "methods", "engine", "options"},
    "llm": {"core", "registry", "models", "methods", "engine", "options", "loading"},
    "hub": {"core", "registry", "models", "methods", "engine", "options", "loading", "llm"},
    "training": {"core", "registry", "models", "methods", "engine", "options", "loading", "llm"},
    "server": {"core", "registry", "models", "methods", "engine", "options", "loading", "llm"},
    "lab": {"core", "registry", "models", "methods", "engine", "options", "loading", "llm", "training"},
    "cli": {
        "core",
        "registry",
        "models",
        "methods",
        "engine",
        "options",
        "loading",
        "llm",
        "training",
        "server",
        "lab",
    },
    "__init__": {"_moved", "core", "registry", "models", "methods", "engine", "llm", "hub"},
    "__main__": {"cli"},
    "_moved": set(),
}
"""Room -> what it may import besides itself and the package, which imports nothing until a name of it is used."""

INSIDE_METHODS: dict[str, set[str]] = {
    "trees": set(),
    "verifiers": {"trees"},
    "controllers": {"trees"},
    "drafters": {"trees"},
}
"""Folder of ``methods/`` -> what of ``methods/`` it may import besides itself."""

MODELLESS = {"trees", "verifiers", "controllers"}
"""Methods that see distributions and counts, and no model."""

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

INSIDE = {"models": INSIDE_MODELS, "methods": INSIDE_METHODS}

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
        """The folder of ``models/`` or ``methods/`` that holds the file, if one does."""
        parts = self.file.relative_to(ROOT).parts
        return parts[1] if parts[0] in INSIDE and len(parts) > 2 else None

    @property
    def inside(self) -> str | None:
        """The module below ``foretoken`` that is imported; ``None`` for other libraries, "" for the package itself."""
        head, _, rest = self.module.partition(".")
        return rest if head == "foretoken" else None


@functools.cache
def imports_of(file: Path, source: str | None = None) -> tuple[Import, ...]:
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

    return tuple(walk(ast.parse(file.read_text() if source is None else source), False))


def objection(statement: Import) -> str | None:
    """What is wrong with an import, if anything."""
    package, inside = statement.package, statement.inside
    if inside is None:
        return outside_objection(statement)
    target, *below = inside.split(".")
    folder = statement.folder
    if target == package and below and folder and below[0] not in {folder, *INSIDE[package][folder]}:
        return f"{package}/{folder} must not import foretoken.{inside}"
    if target == "models" and folder in MODELLESS:
        return f"methods/{folder} must not import foretoken.{inside}"
    if target in {"", package} or target in MAY_IMPORT[package]:
        return None
    return f"{package} must not import foretoken.{inside}"


def outside_objection(statement: Import) -> str | None:
    library = statement.module.split(".")[0]
    if statement.folder in {"trees", "verifiers"} and library in {"transformers", "tokenizers", "numpy", "safetensors"}:
        return f"{statement.folder} is pure tensor code: no {library}"
    if statement.package == "models":
        return None
    if statement.module.startswith(TRANSFORMERS_INSIDES) or (
        library == "transformers" and any("Cache" in n for n in statement.names)
    ):
        return "only models/ touches a Transformers forward or cache"
    return None


def test_imports_follow_the_layers() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {statement.module}: {reason}"
        for file in FILES
        for statement in imports_of(file)
        if (reason := objection(statement))
    ]
    assert not wrong


def test_every_package_has_a_rule() -> None:
    assert {statement.package for file in FILES for statement in imports_of(file)} <= set(MAY_IMPORT)
    for room, table in INSIDE.items():
        assert {file.parent.name for file in ROOT.glob(f"{room}/*/__init__.py")} == set(table)


def files_of(statement: Import, known: set[Path]) -> Iterator[Path]:
    """The files that an import of ours runs, packages above them left out."""
    for name in statement.names or ("",):
        place = ROOT.parent.joinpath(*statement.module.split("."))
        candidates = (
            place / f"{name}.py",
            place / name / "__init__.py",
            place.with_suffix(".py"),
            place / "__init__.py",
        )
        yield from [file for file in candidates if file in known][:1]


def cycle_of(imports: dict[Path, set[Path]]) -> list[Path]:
    """Files that import each other in a circle; empty where none do."""
    left = {file: set(needed) for file, needed in imports.items()}
    while leaves := [file for file, needed in left.items() if not needed & left.keys()]:
        for file in leaves:
            del left[file]
    return sorted(left)


def imports_of_files() -> dict[Path, set[Path]]:
    """Every file with the files that it imports, at once or later."""
    known = set(FILES)
    return {
        file: {other for statement in imports_of(file) for other in files_of(statement, known)} - {file}
        for file in FILES
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycle_of(imports_of_files()) == []


def test_a_circle_is_seen() -> None:
    imports = imports_of_files()
    runner, layers = ROOT / "models/runner.py", ROOT / "models/network/layers.py"
    (statement,) = imports_of(layers, "def f():\n    from foretoken.models.runner import TreeRunner")
    imports[layers] |= set(files_of(statement, set(imports)))
    assert {runner, layers} <= set(cycle_of(imports))


def test_whoever_uses_the_library_imports_no_laboratory() -> None:
    """Loading a model, drafting with it and writing a text need nothing of benchmarks, servers and training."""
    code = """
import sys
import foretoken as ft
llm = ft.load("builtin", drafter="ngram")
assert len(llm.generate("def f(", max_new_tokens=4).token_ids) == 4
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("foretoken.")}
print(*sorted(rooms))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rooms = set(result.stdout.split())
    assert {"core", "engine", "loading", "methods", "models"} <= rooms
    assert not rooms & {"cli", "lab", "server", "training"}


def test_the_protocol_of_models_imports_nothing_heavy() -> None:
    """Code that only names its types does not wait for another library."""
    modules = {statement.module for statement in imports_of(ROOT / "models/base.py")}
    others = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    assert others == {"foretoken.models.refusals"}
    roots = {statement.module.split(".")[0] for statement in imports_of(ROOT / "models/refusals.py")}
    assert roots <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("place", "source", "words"),
    [
        (
            "methods/verifiers/x.py",
            "from foretoken.models.base import LanguageModel",
            "must not import foretoken.models",
        ),
        ("methods/verifiers/x.py", "import numpy as np", "pure tensor code"),
        (
            "methods/trees/x.py",
            "def f():\n    import foretoken.methods.verifiers.base",
            "methods/trees must not import foretoken.methods.verifiers.base",
        ),
        ("methods/drafters/x.py", "from foretoken.engine.loop import Engine", "must not import foretoken.engine"),
        (
            "methods/drafters/x.py",
            "def f():\n    from foretoken.methods.verifiers.block import B",
            "methods/drafters must not import foretoken.methods.verifiers",
        ),
        ("methods/drafters/x.py", "from foretoken.loading import load_model", "must not import foretoken.loading"),
        (
            "methods/drafters/x.py",
            "def build():\n    from foretoken.loading import load_model",
            "must not import foretoken.loading",
        ),
        (
            "methods/controllers/x.py",
            "def build():\n    import foretoken.methods.drafters.nets.store",
            "methods/controllers must not import foretoken.methods.drafters",
        ),
        ("methods/drafters/x.py", "from transformers import DynamicCache", "only models/"),
        ("engine/x.py", "from transformers.cache_utils import Cache", "only models/"),
        ("engine/x.py", "from foretoken.cli.main import main", "must not import foretoken.cli"),
        (
            "loading/x.py",
            "def f():\n    from foretoken.lab.prompts import load_prompts",
            "must not import foretoken.lab",
        ),
        ("lab/bench/x.py", "def f():\n    import foretoken.server.app", "must not import foretoken.server.app"),
        ("training/x.py", "from foretoken.lab.prompts import load_prompts", "must not import foretoken.lab"),
        ("core/x.py", "from foretoken.models.base import Feed", "must not import foretoken.models.base"),
        (
            "models/cache/x.py",
            "def f():\n    from foretoken.models.forward.lean import LeanForward",
            "models/cache must not import foretoken.models.forward",
        ),
    ],
)
def test_wrong_imports_are_seen(place: str, source: str, words: str) -> None:
    (statement,) = imports_of(ROOT / place, source)
    assert words in str(objection(statement))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        (
            "methods/verifiers/x.py",
            "import torch\nfrom foretoken.core import Kind\nfrom foretoken.methods.trees.operations import merge",
        ),
        (
            "methods/drafters/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foretoken.engine.loop import Engine",
        ),
        ("models/x.py", "from transformers.cache_utils import Cache"),
        ("cli/x.py", "def f():\n    from foretoken.server.app import serve\n    from foretoken import __version__"),
    ],
)
def test_right_imports_pass(place: str, source: str) -> None:
    assert [objection(statement) for statement in imports_of(ROOT / place, source) if objection(statement)] == []
