"""Values of a ``config.json`` from another project: of the expected kind, or refused by the key's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 2**31
"""Upper bound of a network's sizes."""


def number(config: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    """The value of the first of these keys in a configuration.  Raises ``ValueError`` unless it is a finite number, and
    if there is none and no ``default``."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{key} in config.json is {value!r}, which is not a number")
            if not math.isfinite(value) if isinstance(value, float) else abs(value) > 2**63:
                raise ValueError(f"{key} in config.json is not a number that a network can have")
            return value
    if default is None:
        raise ValueError(f"config.json lacks {keys[0]}")
    return default


def whole(config: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    """The same for a size; ``default`` need not be within the bounds.  Raises ``ValueError`` for a missing value, and
    for anything but a whole number from ``least`` to ``most``."""
    value = number(config, *keys, default=default)
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is not None and not (value == int(value) and least <= value <= most):
        raise ValueError(f"{key} in config.json must be a whole number from {least} to {most}, not {value:g}")
    return int(value)


def positive(config: Mapping[str, Any], *keys: str, default: float) -> float:
    """The same for a number above 0.  Raises ``ValueError`` for others."""
    value = float(number(config, *keys, default=default))
    if value <= 0:
        raise ValueError(f"{keys[0]} in config.json must be above 0, not {value:g}")
    return value


def flag(config: Mapping[str, Any], *keys: str) -> bool | None:
    """The value of the first of these switches in a configuration; ``None`` if there is none.  Raises ``ValueError``
    unless it is true or false."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if value not in (True, False):
                raise ValueError(f"{key} in config.json must be true or false, not {value!r}")
            return bool(value)
    return None


def listed(config: Mapping[str, Any], key: str) -> list[Any] | None:
    """A list; ``None`` if there is none.  Raises ``ValueError`` for other values."""
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{key} in config.json must be a list, not {value!r}")
    return value


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both configurations, those of ``over`` first; its nulls give way, as they mean the default."""
    return {**under, **{key: value for key, value in over.items() if value is not None or key not in under}}


def class_of(config: Mapping[str, Any]) -> str:
    """The name of the network's class; empty if ``architectures`` does not give it."""
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, Sequence) and classes and not isinstance(classes, str) else classes
    return first if isinstance(first, str) else ""
