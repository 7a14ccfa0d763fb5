"""A class name stands for one thing: no two classes of the package share theirs."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "foretoken"


def shared_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Names that several classes have, nested and private ones included, and the files of those classes."""
    places = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    return {name: files for name, files in places.items() if len(files) > 1}


def test_every_class_has_a_name_of_its_own() -> None:
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    assert len(sources) > 300
    assert not shared_names(sources), "say in each name what the class is, or merge them"


def test_shared_names_are_found() -> None:
    sources = {"a.py": "class Row: ...\nclass Other: ...", "b.py": "def make():\n    class Row: ...\n"}
    assert shared_names(sources) == {"Row": ["a.py", "b.py"]}
    assert not shared_names({"a.py": "class Row: ...", "b.py": "class Rows: ..."})
