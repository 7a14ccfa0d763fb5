"""The files around the code say what is so: versions, commands, targets of make, and the hosted workflow."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import foretoken

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    assert foretoken.__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+)", changes, re.M)
    assert version in versions
    assert versions == sorted(versions, reverse=True)


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", "help"], capture_output=True, text=True)
    listed = set(re.findall(r"^make ([a-z-]+) ", shown.stdout, re.M))
    assert listed == TARGETS, f"give it a ## line: {sorted(TARGETS ^ listed)}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "AGENTS.md", ".ci/run", ".github/workflows/ci.yml"])
def test_named_targets_of_make_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`|run: )make ([a-z-]+)", text, re.M))
    assert named and named <= TARGETS, named - TARGETS


def test_hosted_ci_runs_what_we_run() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = [step.get("run") for job in flow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in steps and "make docs" in steps
    lowest = re.search(r">=\s*(3\.\d+)", PROJECT["requires-python"])
    assert lowest is not None and lowest.group(1) in flow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_forms_and_hooks_are_valid() -> None:
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text(encoding="utf-8"))
        if file.name != "config.yml":
            assert form["name"] and form["description"] and form["body"]
            assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {"ruff", "ruff-format", "mypy"} <= {hook["id"] for hook in hooks}


def test_extras_are_made_of_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    for needed in extras.values():
        for requirement in needed:
            match = re.fullmatch(r"foretoken\[(.*)\]", requirement)
            assert match is None or set(match[1].split(",")) <= set(extras), requirement
