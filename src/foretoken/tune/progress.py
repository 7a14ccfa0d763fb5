"""The state of a tuning run, kept beside its result so that an interrupted one can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from foretoken.io.files import write_json

T = TypeVar("T")


@dataclass
class State:
    """What was measured so far, by name; every addition is on disk before the next measurement begins.

    Attributes:
        file: where it is kept.
        settings: what must not change between the parts of one run.
        found: name -> what was measured, as JSON has it.
    """

    file: Path
    settings: Mapping[str, Any]
    found: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path, settings: Mapping[str, Any], resume: bool) -> State:
        """Begin, or go on with what is in ``file``.

        Raises:
            ValueError: there is something and ``resume`` was not asked for, it is of another run, or it is damaged.
        """
        if not file.exists():
            return cls(file, settings)
        if not resume:
            raise ValueError(f"{file} holds an interrupted run: add --resume to go on, or delete it to begin anew")
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            theirs, found = stored["settings"], dict(stored["found"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} is damaged: delete it to begin anew") from None
        mine = json.loads(json.dumps(settings))
        other = [key for key in mine if not isinstance(theirs, dict) or theirs.get(key) != mine[key]]
        if other:
            raise ValueError(f"{file} is of a run with another {other[0]}: delete it to begin anew")
        return cls(file, settings, found)

    def put(self, name: str, value: Any) -> None:
        """Keep a measurement."""
        self.found[name] = value
        write_json(self.file, {"settings": self.settings, "found": self.found})

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """What was measured under a name, measured now if it was not; must be what JSON can hold."""
        if name not in self.found:
            self.put(name, measure())
        value: T = self.found[name]
        return value

    def close(self) -> None:
        """The run is complete: its result stands for it."""
        self.file.unlink(missing_ok=True)
