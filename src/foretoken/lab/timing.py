"""The laboratory's clock."""

from __future__ import annotations

from typing import Any

from foretoken.models.clock import now


class Stopwatch:
    """Seconds since it was started, read when ``device`` has done everything that it was given."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.began_s = now(device)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return now(self.device) - self.began_s
