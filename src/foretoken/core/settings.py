"""Fields of dataclasses that commands have options for."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

_KEY = "setting"


@dataclass(frozen=True)
class About:
    """What an option says of a field.

    Attributes:
        help: a sentence; empty where the name says all.
        low, high: the smallest and the largest number that it takes; ``None`` where there is no such limit.
        is_flag: whether the option stands alone and turns something on, with none that turns it off.
    """

    help: str = ""
    low: float | None = None
    high: float | None = None
    is_flag: bool = False


def setting(
    default: Any, help: str = "", low: float | None = None, high: float | None = None, *, shown: bool = True
) -> Any:
    """A dataclass field with an option, which commands make of it (:mod:`foretoken.cli.settings`).

    Args:
        help, low, high: see :class:`About`.
        shown: whether the value stands in the object's ``repr``.
    """
    return field(default=default, metadata={_KEY: About(help, low, high)}, repr=shown)


def flag(help: str) -> Any:
    """A switch that is off, with an option to turn it on."""
    return field(default=False, metadata={_KEY: About(help, is_flag=True)})


def settings_of(config: type) -> dict[Field[Any], About]:
    """The fields of a dataclass that :func:`setting` has made, in order."""
    return {item: item.metadata[_KEY] for item in fields(config) if _KEY in item.metadata}
