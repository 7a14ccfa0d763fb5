"""Nothing in the library can run code that came with data: pickles, evaluated text, checks that ``-O`` removes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import foretoken

ROOT = Path(foretoken.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "code"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "torch.load",
    "torch.jit.load",
    "torch.package",
    "torch.hub.load",
    "torch.save",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "pandas.read_pickle",
    "pd.read_pickle",
}
"""Also ``torch.save``: what it writes is a pickle, which somebody would have to load."""


def offences(tree: ast.AST) -> list[str]:
    """The forbidden operations in a file."""
    messages: list[str] = []
    for node in ast.walk(tree):
        at = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Import):
            messages += [at + name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            messages += [at + node.module] if node.module.split(".")[0] in MODULES else []
            messages += [
                at + f"{node.module}.{name.name}" for name in node.names if f"{node.module}.{name.name}" in METHODS
            ]
        elif isinstance(node, ast.Call):
            messages += [at + name for name in (ast.unparse(node.func),) if name in CALLS | METHODS]
            for word in node.keywords:
                if not isinstance(word.value, ast.Constant):
                    continue
                risky = {"trust_remote_code": True, "shell": True, "weights_only": False, "allow_pickle": True}
                if word.arg in risky and word.value.value is risky[word.arg]:
                    messages.append(at + f"{word.arg}={word.value.value}")
        elif isinstance(node, ast.Assert):
            messages.append(at + "assert, which python -O removes: raise an error")
        elif isinstance(node, ast.Name) and node.id == "__debug__":
            messages.append(at + "__debug__, which is another thing under python -O")
    return messages


def test_no_file_runs_code_that_came_with_data() -> None:
    by_file = {str(file.relative_to(ROOT)): offences(ast.parse(file.read_text(encoding="utf-8"))) for file in FILES}
    assert {file: wrong for file, wrong in by_file.items() if wrong} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "model(x, trust_remote_code=True)",
        "run('ls', shell=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "assert x",
        "if __debug__:\n    check(x)",
        "yaml.load(text)",
    ],
)
def test_what_is_banned_is_seen(text: str) -> None:
    assert offences(ast.parse(text))


@pytest.mark.parametrize("text", ["model.eval()", "yaml.safe_load(x)", "re.compile('x')", "load('builtin')", "x: int"])
def test_what_is_harmless_is_let_through(text: str) -> None:
    assert offences(ast.parse(text)) == []


def test_every_checkpoint_is_loaded_without_the_code_that_comes_with_it() -> None:
    """``trust_remote_code=False`` is said and not left to a default, which a library has changed before."""
    silent = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "from_pretrained" and (owner := ast.unparse(node.func.value)).startswith("Auto"):
                words = {word.arg: word.value for word in node.keywords}
                if not (isinstance(words.get("trust_remote_code"), ast.Constant) or None in words):
                    silent.append(f"{file.relative_to(ROOT)}:{node.lineno} {owner}")
    assert silent == []
