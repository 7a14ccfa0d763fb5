"""The log: one JSON object a line, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


class JsonLines(logging.Formatter):
    """Control characters are escaped by JSON, so that nobody can write lines of others."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=True, default=str)


def install() -> None:
    """Send our log to stderr so."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("foretoken")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
