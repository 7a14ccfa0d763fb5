"""The command answers ``--help`` without loading PyTorch, and is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.registry import find, rows

COMMANDS = (
    "generate", "show", "batch", "chat", "methods", "drafters", "parity", "plan", "doctor", "train", "tune", "export",
    "import", "models", "demo",
)  # fmt: skip
EXAMPLES = {"drafter": ("ngram", "model", "eagle3"), "verifier": ("coupled", "block"), "controller": ("goodput",)}
HEAVY = ("torch", "transformers", "numpy", "safetensors", "matplotlib")


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", **env},
    )


def test_no_help_page_imports_anything_heavy() -> None:
    code = f"""
import sys
import foretoken.cli.main
for command in {COMMANDS!r}:
    assert foretoken.cli.main.main([command, "--help"]) == 0, command
assert foretoken.cli.main.main(["train", "lm", "--help"]) == 0
assert foretoken.cli.main.main(["tune", "layer-skip", "--help"]) == 0
assert foretoken.cli.main.main(["tune", "tree", "--help"]) == 0
assert foretoken.cli.main.main(["train", "medusa", "--help"]) == 0
assert foretoken.cli.main.main(["--help"]) == 0
assert foretoken.cli.main.main(["methods", "--json"]) == 0
assert foretoken.cli.main.main(["generate", "--drafter", "nosuch"]) == 2
print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
"""
    result = python(code, COLUMNS="300", TERM="dumb")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "[]"
    for command in COMMANDS:
        assert command in result.stdout
    for option in (
        "target", "drafter", "verifier", "controller", "profile", "dtype", "device", "max-new-tokens", "temperature",
        "top-k", "top-p", "min-p", "seed", "allow-lossy",
    ):  # fmt: skip
        assert result.stdout.count(f"--{option} ") >= 4, option


def test_the_help_gives_examples_of_the_registry_and_says_where_all_are() -> None:
    code = "from foretoken.cli.main import main; main(['generate', '--help']); main(['methods'])"
    page, catalogue = python(code, COLUMNS="600", TERM="dumb").stdout.split("drafters\n", 1)
    lines = {
        role: next(line for line in page.splitlines() if f" --{role} <" in " ".join(line.split())) for role in EXAMPLES
    }
    for role, names in EXAMPLES.items():
        assert "`foretoken methods` lists all" in lines[role]
        assert all(name in lines[role] and find(role, name) for name in names)  # type: ignore[arg-type]
    assert all(f"  {row.name} " in catalogue for row in rows())


def test_the_installed_command_reports_bad_input_in_one_line() -> None:
    command = shutil.which("foretoken", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the console script is not installed beside this Python")
    result = subprocess.run([command, "generate", "--no-such-option"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
