"""Meanings of arguments and attributes, from Google-style docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

SECTIONS = ("Args:", "Options:", "Attributes:")
"""``Options`` are arguments that subclasses share."""
ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
REFERENCE = re.compile(r"as (?:in|for) :class:`~?([\w.]+)`(.*)")
"""An entry that takes the meaning from the docstring of another class: ``as for :class:`X```."""


def meaning_of(cls: type[Any], name: str) -> str:
    """The meaning of an argument of a class, from the docstrings of its ``build`` and ``__init__``, its own, or those
    of its base classes; Markdown in one line, and empty if there is none."""
    for owner in cls.__mro__:
        for docstring in _docstrings(owner):
            if text := _entries(docstring).get(name):
                reference = REFERENCE.fullmatch(text)
                if reference and (other := _class(reference[1], owner)):
                    return meaning_of(other, name) + _plain(reference[2]).removesuffix(".")
                return _plain(text).removesuffix(".")
    return ""


def _docstrings(owner: type[Any]) -> Iterator[str]:
    """Docstrings of one class: of its functions that take options, and its own."""
    members = vars(owner)
    build = getattr(members.get("build"), "__func__", None)
    for described in (build, members.get("__init__"), owner):
        if docstring := getattr(described, "__doc__", None):
            yield docstring


@cache
def _entries(docstring: str) -> dict[str, str]:
    """Entries of all sections of arguments and attributes, each joined to one line."""
    entries: dict[str, str] = {}
    names: list[str] = []
    is_section = False
    for line in inspect.cleandoc(docstring).splitlines():
        if line and not line[0].isspace():
            is_section, names = line in SECTIONS, []
        elif is_section and (entry := ENTRY.fullmatch(line)):
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2])
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def _class(name: str, owner: type[Any]) -> type[Any] | None:
    """A class by its full name, or by its name in the module of ``owner``; ``None`` if there is none."""
    module, _, last = name.rpartition(".")
    try:
        scope = importlib.import_module(module or owner.__module__)
    except ImportError:  # a drafter from outside may refer to anything
        return None
    return getattr(scope, last, None)


def _plain(text: str) -> str:
    """Markdown instead of reStructuredText: names in backticks, values as a spec string has them, without quotes."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"``(.*?)``", lambda code: f"`{code[1]}`".replace('"', ""), text)
    return re.sub(r"\s+", " ", text).strip()
