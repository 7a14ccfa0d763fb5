"""JSON files with a kind, a version and a checksum.

The checksum detects changes of the file.  It is not a signature: an editor can compute a new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


def checksum_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of a file's JSON without its checksum, independent of the layout."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True)
class Stamp:
    """What a kind of file is called, its version, and the remedy that errors name."""

    kind: str
    version: int
    remedy: str

    def to_json(self, content: Any) -> str:
        """A dataclass instance as file contents.  Raises ``ValueError`` for a number that is not finite."""
        body = {"kind": self.kind, "version": self.version, **asdict(content)}
        return json.dumps({**body, "checksum": checksum_of(body)}, indent=1, ensure_ascii=False) + "\n"

    def read(self, file: Path) -> dict[str, Any]:
        """The fields of a file.  Raises ``ValueError`` for other kinds, other versions and changed files."""
        try:
            body = json.loads(file.read_text(encoding="utf-8"), parse_constant=int)  # int refuses NaN
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
            raise ValueError(f"{file} is not JSON{line}, so not a {self.kind}: {self.remedy}") from None
        if not isinstance(body, dict) or body.get("kind") != self.kind:
            raise ValueError(f"{file} is not a {self.kind}: {self.remedy}")
        if (version := body.get("version")) != self.version:
            raise ValueError(f"{file} is a {self.kind} of version {version!r}, and this foretoken reads {self.version}")
        if body.pop("checksum", None) != checksum_of(body):
            raise ValueError(f"{file} was changed after it was written: its checksum does not match its content")
        return {name: value for name, value in body.items() if name not in ("kind", "version")}
