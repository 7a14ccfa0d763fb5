"""HTML and SVG elements whose text is escaped unless it is markup already."""

from __future__ import annotations

from html import escape

VOID = frozenset({"br", "input", "meta"})
"""Elements that have no end tag."""


class Markup(str):
    """Text that is markup already and must not be escaped again."""

    __slots__ = ()


def safe(child: object) -> Markup:
    """``child`` as markup; plain text is escaped."""
    return child if isinstance(child, Markup) else Markup(escape(str(child), quote=False))


def join(*children: object) -> Markup:
    """Children one after another."""
    return Markup("".join(map(safe, children)))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element.  ``class_`` is the attribute class, ``_`` in names becomes ``-``, ``None`` leaves one out."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in VOID else f"</{name}>"
    return Markup(f"<{name}{rendered}>{join(*children)}{end}")
