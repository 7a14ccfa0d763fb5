"""Files and functions stay small enough to be read: 400 lines a file, 60 lines in a function's body.

A function's signature, decorators and docstring do not count.  What is larger today is listed with its size and may
only shrink; whoever splits it takes it off the list.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    file for pattern in ("src/**/*.py", "benchmarks/*.py", "examples/*.py", "docs/*.py") for file in ROOT.glob(pattern)
)
MOST_FILE, MOST_BODY = 400, 60

LARGER_FILES = {}
LARGER_FUNCTIONS: dict[str, int] = {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first, *rest = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    body = rest if is_docstring else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions(source: str) -> dict[str, int]:
    """Body lines of every function of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: body_lines(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}


def test_files_and_functions_are_small() -> None:
    problems = []
    for file in FILES:
        name, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        count = len(source.splitlines())
        if count > LARGER_FILES.get(name, MOST_FILE):
            problems.append(f"{name} has {count} lines: split it by what it is about")
        for function, lines in functions(source).items():
            if lines > LARGER_FUNCTIONS.get(f"{name}:{function}", MOST_BODY):
                problems.append(f"{name}: {function} has {lines} lines: give its parts names")
    assert not problems


def test_the_allowance_only_shrinks() -> None:
    for name, size in LARGER_FILES.items():
        file = ROOT / name
        assert file.exists() and len(file.read_text(encoding="utf-8").splitlines()) > MOST_FILE, f"take {name} off"
        assert size > MOST_FILE
    for name in LARGER_FUNCTIONS:
        file, _, function = name.partition(":")
        assert functions((ROOT / file).read_text(encoding="utf-8"))[function] > MOST_BODY, f"take {name} off"


def test_sizes_are_counted_right() -> None:
    source = (
        'def f(\n    a,\n):\n    """Says.\n\n    More.\n    """\n    b = 1\n\n    return b\n\n\ndef g():\n    "one"\n'
    )
    assert functions(source) == {"f": 3, "g": 0}
