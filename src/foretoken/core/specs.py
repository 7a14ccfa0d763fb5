"""Parsing of spec strings ``name[:path][,key=value...]``, and conversion of their values."""

from __future__ import annotations

import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any

from foretoken.core.docstrings import meaning_of
from foretoken.core.names import unknown
from foretoken.core.outside import is_code


@dataclass(frozen=True)
class Spec:
    """A parsed spec string ``name[:path][,key=value...]``."""

    name: str
    path: str | None
    options: dict[str, str]


@dataclass(frozen=True)
class Option:
    """An option of a method, or a setting of its training.

    Attributes:
        name: key in a spec string or of ``--set``.
        type: ``int``, ``float``, ``bool`` or ``str``.
        default: ``None`` if it depends on the model or the machine, as the meaning then says.
        meaning: Markdown in one line, empty if the docstrings have none.
    """

    name: str
    type: str
    default: int | float | str | None
    meaning: str

    @property
    def shown_default(self) -> str:
        """The default as a spec string has it; empty without one."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "" if self.default is None else str(self.default)


def parse_spec(text: str) -> Spec:
    """Split a spec string into name, path and options.

    Commas inside parentheses do not split, so an option may hold specs: ``cascade:./d,inner=(ngram,n=3,k=6)``. A value
    wrapped in parentheses loses the outer pair. A name may be a class in a file, ``file.py:Class``. Raises
    ``ValueError`` for anything else.
    """
    head, *rest = split_outside(text, ",")
    name, _, path = (part.strip() for part in head.partition(":"))
    if is_code(name):
        cls, _, path = (part.strip() for part in path.partition(":"))
        name = f"{name}:{cls}"
    options = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{item!r} in {text!r} is not key=value; a spec is name[:path][,key=value...]")
        if key.strip() in options:
            raise ValueError(f"{text!r} gives {key.strip()} twice: give every option once")
        options[key.strip()] = _unwrap(value.strip())
    if not name:
        raise ValueError(f"{text!r} has no method name; a spec is name[:path][,key=value...]")
    return Spec(name, path or None, options)


def split_specs(text: str) -> list[str]:
    """The specs of a list such as ``model:./a,k=4|ngram|(suffix,k=8)``, split outside parentheses. Raises
    ``ValueError`` for an empty entry or unbalanced parentheses."""
    specs = [_unwrap(part.strip()) for part in split_outside(text, "|")]
    if not all(specs):
        raise ValueError(
            f"{text!r} has an empty item in its list: write specs joined by |, for example model,k=4|ngram"
        )
    return specs


def split_outside(text: str, separator: str) -> list[str]:
    """Split at separators outside parentheses. Raises ``ValueError`` for unbalanced parentheses."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            break
        if sign == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    if depth:
        raise ValueError(f"{text!r} has unbalanced parentheses: close every ( with a )")
    return parts


def _unwrap(text: str) -> str:
    """The text without a single pair of parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:  # the first one closes here
            return text[1:-1].strip() if index == len(text) - 1 else text
    return text


def options_of(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Options of the constructor, and of ``build`` if there is one, of a plain type.

    Plain types are str, int, float and bool, and each of them or None.
    """
    options: dict[str, inspect.Parameter] = {}
    for function in filter(None, (cls.__init__, getattr(cls, "build", None))):
        hints = typing.get_type_hints(function)
        options |= {
            name: parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(function).parameters.items()
            if name in hints and _plain_type(hints[name]) is not None and name != "path"
        }
    return options


def described_options(cls: type[Any]) -> list[Option]:
    """The options of a class with their meanings, from its docstrings."""
    described = []
    for name, parameter in options_of(cls).items():
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        described.append(Option(name, _type_name(parameter.annotation), default, meaning_of(cls, name)))
    return described


def convert_options(role: str, name: str, cls: type[Any], options: dict[str, str]) -> dict[str, Any]:
    """Convert a spec's strings to the constructor's types. Raises ``ValueError`` for an unknown key (lists the valid
    ones), or a value of another type."""
    valid = options_of(cls)
    result = {}
    for key, text in options.items():
        if key not in valid:
            subject = f"unknown option {key!r} of {role} {name!r}"
            more = f"; `foretoken methods {name}` explains them" if valid else ""
            raise unknown(subject, key, list(valid) or ["it has none"], lead="valid ones:", more=more)
        kind = _plain_type(valid[key].annotation)
        try:
            result[key] = _convert(text, kind)
        except ValueError:
            type_name = _type_name(valid[key].annotation)
            raise ValueError(f"option {key}={text!r} of {role} {name!r} must be of type {type_name}") from None
    return result


def _plain_type(annotation: Any) -> type[Any] | None:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _plain_type(inner[0]) if len(inner) == 1 else None
    return annotation if annotation in (str, int, float, bool) else None


def _type_name(annotation: Any) -> str:
    kind = _plain_type(annotation)
    return kind.__name__ if kind else "value"


def _convert(text: str, kind: type[Any] | None) -> Any:
    if kind is bool:
        lowered = text.lower()
        if lowered not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(text)
        return lowered in ("true", "1", "yes")
    return kind(text) if kind else text
