"""HTML and SVG elements with escaped text."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is already markup and must not be escaped again."""

    __slots__ = ()


def safe(child: object) -> Markup:
    """``child`` as markup; plain text is escaped."""
    return child if isinstance(child, Markup) else Markup(escape(str(child), quote=False))


def join(*children: object) -> Markup:
    """Concatenated children."""
    return Markup("".join(map(safe, children)))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element.  ``class_`` sets the attribute class, ``_`` in names becomes ``-``, ``None`` omits an attribute."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in ("br", "input", "meta") else f"</{name}>"
    return Markup(f"<{name}{rendered}>{join(*children)}{end}")
