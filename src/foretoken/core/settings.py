"""Dataclass fields with command-line options."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

_KEY = "setting"


@dataclass(frozen=True)
class About:
    """Metadata of an option.

    Attributes:
        help: one sentence; empty if the name suffices.
        low, high: bounds of the number; ``None`` without one.
        is_flag: whether the option takes no value and turns something on, without an inverse.
    """

    help: str = ""
    low: float | None = None
    high: float | None = None
    is_flag: bool = False


def setting(
    default: Any, help: str = "", low: float | None = None, high: float | None = None, *, shown: bool = True
) -> Any:
    """A dataclass field with an option, which commands derive from it (:mod:`foretoken.cli.settings`).

    Args:
        help, low, high: see :class:`About`.
        shown: whether the value is part of the object's ``repr``.
    """
    return field(default=default, metadata={_KEY: About(help, low, high)}, repr=shown)


def flag(help: str) -> Any:
    """A switch that is off by default, with an option to turn it on."""
    return field(default=False, metadata={_KEY: About(help, is_flag=True)})


def settings_of(config: type) -> dict[Field[Any], About]:
    """The fields of a dataclass made by :func:`setting`, in order."""
    return {item: item.metadata[_KEY] for item in fields(config) if _KEY in item.metadata}
