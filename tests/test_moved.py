"""Names of modules that have moved work as before, and say where the module is now."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import foretoken
from foretoken import _moved


def old_import(name: str) -> object:
    """The module of an old name, as for the first time."""
    for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
        del sys.modules[loaded]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(name)
    messages = [
        str(warning.message)
        for warning in caught
        if warning.category is DeprecationWarning and "is now" in str(warning.message)
    ]
    assert messages[-1] == f"{name} is now {_moved.new_name(name)}"
    return module


def documented_before() -> list[str]:
    """Names that documents of earlier versions import, from a list that the table under test has no part in."""
    lines = (Path(__file__).parent / "old_names.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def gone() -> set[str]:
    """Names below ``foretoken`` that the changelog says no longer exist."""
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    paragraph = changelog.partition("* **Gone**")[2].partition("\n* ")[0]
    return {f"foretoken.{name}" for name in re.findall(r"`(\w+(?:\.\w+)+)`", paragraph)}


def resolves(name: str) -> bool:
    """Whether a module, or a name of one, can be imported as an earlier version had it."""
    module, _, attribute = name.rpartition(".")
    code = f"try:\n    import {name}\nexcept ModuleNotFoundError:\n    from {module} import {attribute}"
    try:
        exec(code, {})  # the statement itself: importlib does not ask a package for a missing name
    except ImportError:
        return False
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", documented_before())
def test_documented_names_work_or_are_gone_by_the_changelog(name: str) -> None:
    assert resolves(name) is (name not in gone())


@pytest.mark.parametrize(
    ("statement", "new"),
    [
        ("from foretoken.models.gguf import GgufModel", "models.other.llama_cpp_model.LlamaCppModel"),
        ("from foretoken.bench.report import write_plots", "lab.report.plots.write_plots"),
        ("from foretoken.models.table import TableModel", "models.other.table"),
        ("from foretoken.jobs import run_jobs", "cli.batch"),
        ("from foretoken.theory.trees import trial_acceptance", "lab.plan.speedup"),
    ],
)
def test_moved_names_say_where_they_are(statement: str, new: str) -> None:
    warns = [sys.executable, "-W", "always::DeprecationWarning:__main__", "-c", statement]
    result = subprocess.run(warns, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"is now foretoken.{new}" in result.stderr


@pytest.mark.parametrize("name", sorted(_moved.PLACES))
def test_every_old_package_is_the_new_one(name: str) -> None:
    new = importlib.import_module(f"foretoken.{_moved.PLACES[name]}")
    spec = new.__spec__
    assert old_import(f"foretoken.{name}") is new
    assert new.__spec__ is spec and new.__name__ == f"foretoken.{_moved.PLACES[name]}"


@pytest.mark.parametrize(
    "name",
    ["drafters.base", "verifiers.rejection", "trees.operations", "controllers.constant", "bench.report.page",
     "measure.prompts", "io.files", "theory.speedup"],
)  # fmt: skip
def test_modules_of_old_packages_are_loaded_once(name: str) -> None:
    new = str(_moved.new_name(f"foretoken.{name}"))
    assert old_import(f"foretoken.{name}") is importlib.import_module(new)


def test_classes_of_old_names_are_the_same() -> None:
    """A process imports the old name first."""
    code = """
from foretoken.drafters.base import Drafter
from foretoken.drafters import ngram
from foretoken.sampling import SamplingParams
from foretoken.constraints import FiniteLanguage
import foretoken as ft
assert Drafter is ft.Drafter and SamplingParams is ft.SamplingParams
assert issubclass(ngram.NgramDrafter, ft.Drafter)
assert FiniteLanguage.__module__ == "foretoken.core.constraints"
"""
    plain = [sys.executable, "-c", code]
    strict = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code]
    refused = subprocess.run(strict, capture_output=True, text=True, timeout=120)
    assert "DeprecationWarning: foretoken.drafters is now foretoken.methods.drafters" in refused.stderr
    result = subprocess.run(plain, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"foretoken\.drafters\.nothing"):
        importlib.import_module("foretoken.drafters.nothing")


def test_our_own_code_uses_new_names_only() -> None:
    """An old name that was forgotten somewhere would warn every user."""
    root = Path(foretoken.__file__).parent
    old = [
        f"{file.relative_to(root)}: {name}"
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in names_of(node)
        if _moved.new_name(name)
    ]
    assert not old


def names_of(node: ast.AST) -> list[str]:
    """The modules that an import statement may mean."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_the_catalogue_and_the_package_of_methods_share_a_name() -> None:
    import foretoken.methods.drafters.ngram as ngram
    from foretoken.registry import methods

    assert foretoken.methods() == methods() and ngram.NgramDrafter.name == "ngram"
