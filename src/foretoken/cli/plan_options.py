"""What the options of ``foretoken plan`` say, or a ``ValueError`` that shows how they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.core.costs import RoundCosts
    from foretoken.lab.plan.assumptions import CallCost

LONGEST = 512
"""Longest draft that is worked out."""
LEAVES = 4096
"""Widest tree."""


def read_costs(file: Path) -> RoundCosts:
    """The measured costs in a profile."""
    from foretoken.core.costs import RoundCosts
    from foretoken.lab.plan.assumptions import Assumptions

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the profile {file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    try:
        stored = json.loads(text)["costs"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} holds no measured costs: make it with `foretoken tune --out {file.name}`") from None
    try:
        costs = RoundCosts.from_dict(stored)
        for spec in costs.drafters:
            Assumptions.measured(costs, spec)
        return costs
    except (ValueError, TypeError) as error:
        raise ValueError(f"the costs in {file} cannot be used: {error}") from None


def curve(text: str) -> CallCost:
    """v(n): ``flat``, ``1:1,8:1.1,...`` or ``roofline,key=value,...``."""
    from foretoken.core.costs import TargetCost
    from foretoken.lab.plan.assumptions import Flat, Measured

    if text.strip() == "flat":
        return Flat()
    if text.partition(",")[0].strip() == "roofline":
        return _roofline(text)
    try:
        pairs = [part.split(":") for part in text.split(",")]
        points = {int(n): float(x) for n, x in pairs}
        right = len(pairs) == len(points) >= 2 and 1 in points and all(0 < x < math.inf for x in points.values())
        right = right and min(points) >= 1
    except ValueError:
        right = False
    if not right:
        raise ValueError(
            f"--v {text!r} must be 'flat', roofline,key=value,... or two or more points n:cost that start at 1, "
            "for example 1:1,8:1.1,32:2"
        )
    return Measured(TargetCost(points))


def _roofline(text: str) -> CallCost:
    from dataclasses import fields

    from foretoken.lab.plan.roofline import Roofline
    from foretoken.registry import parse_spec

    kinds = {f.name: int if f.type == "int" else float for f in fields(Roofline)}
    needed, options = ("parameters", "bandwidth", "flops"), parse_spec(text).options
    if not set(needed) <= set(options) <= set(kinds):
        raise ValueError(f"--v roofline needs {', '.join(needed)} and takes {', '.join(kinds)}; not {text!r}")
    try:
        values = {name: kinds[name](float(value)) for name, value in options.items()}
    except (ValueError, OverflowError):
        raise ValueError(f"--v {text!r}: every option is a number, for example parameters=7e9") from None
    return Roofline(**values)  # type: ignore[arg-type]


def cost(value: float | None, name: str) -> float | None:
    """A finite number >= 0, or none given."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, not {value:g}")
    return value


def chances(text: str, name: str) -> list[float]:
    """``0.8,0.6,0.5``."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be numbers joined by commas, for example 0.8,0.6,0.5; not {text!r}") from None
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{name} must be chances in [0, 1], not {text!r}")
    return values


def counts(text: str, name: str) -> list[int]:
    """``1,4,16``, each once."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} must be whole numbers > 0 joined by commas, for example 1,4,16; not {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def lengths(text: str) -> list[int]:
    """``4`` or ``1-16``."""
    low, dash, high = text.partition("-")
    parts = [low, high] if dash else [low, low]
    if not all(part.strip().isdecimal() for part in parts) or int(parts[0]) > int(parts[1]):
        raise ValueError(f"--k must be a length or a range of lengths, for example 4 or 1-16; not {text!r}")
    if int(parts[1]) > LONGEST:
        raise ValueError(f"--k goes up to {LONGEST}, not {text!r}")
    return list(range(int(parts[0]), int(parts[1]) + 1))


def widths(text: str) -> list[int]:
    """``3x2x1``."""
    parts = text.lower().split("x")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--tree must be positive child counts per level, for example 3x2x1; not {text!r}")
    found = [int(part) for part in parts]
    if math.prod(found) > LEAVES:
        raise ValueError(f"--tree {text!r} has too many nodes: at most {LEAVES} leaves")
    return found


def check_writable(file: Path) -> None:
    """Find out before the work whether the picture can be written."""
    from tempfile import TemporaryFile

    if file.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a PNG file: {file} should end in .png")
    if file.is_dir():
        raise ValueError(f"cannot write the plot {file}: it is a folder")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=file.parent):  # permissions alone do not tell
            pass
    except OSError as error:
        raise ValueError(f"cannot write the plot {file}: {error.strerror}; choose another folder") from None
