"""Spec strings: ``name[:path][,key=value...]``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """A parsed spec string ``name[:path][,key=value...]``."""

    name: str
    path: str | None
    options: dict[str, str]


def parse_spec(text: str) -> Spec:
    """Split a spec string into name, path and options.

    Commas inside parentheses do not split, so an option may hold specs: ``cascade:./d,inner=(ngram,n=3,k=6)``.  A
    value that is wrapped in parentheses loses the outer pair.

    Raises:
        ValueError: an option without ``=``, an empty name, or parentheses that do not close.
    """
    head, *rest = _split(text, ",")
    name, _, path = head.partition(":")
    options = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{item!r} in {text!r} is not key=value; a spec is name[:path][,key=value...]")
        options[key.strip()] = _unwrap(value.strip())
    if not name.strip():
        raise ValueError(f"{text!r} names no method; a spec is name[:path][,key=value...]")
    return Spec(name.strip(), path.strip() or None, options)


def split_specs(text: str) -> list[str]:
    """The specs of a list such as ``model:./a,k=4|ngram|(suffix,k=8)``: split where no parenthesis is open.

    Raises:
        ValueError: nothing before, after or between two ``|``, or parentheses that do not close.
    """
    specs = [_unwrap(part.strip()) for part in _split(text, "|")]
    if not all(specs):
        raise ValueError(
            f"{text!r} has an empty place in its list: write specs joined by |, for example model,k=4|ngram"
        )
    return specs


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside parentheses."""
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
    """Without the one pair of parentheses around all of it, if there is one."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:  # where the first one closes
            return text[1:-1].strip() if place == len(text) - 1 else text
    return text
