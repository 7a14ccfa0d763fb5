"""Files and folders that one process at a time may write."""

from __future__ import annotations

import logging
from pathlib import Path


def lock(descriptor: int, path: Path, kind: str = "file") -> None:
    """Keep what was opened at ``path`` for this process until it is closed, or the process ends in any way.

    Raises:
        ValueError: another process has it.
    """
    try:
        import fcntl
    except ImportError:  # Windows: two runs in one place are the user's to avoid
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run writes to {path}: wait for it, or choose another {kind}") from None
    except OSError as error:  # some network file systems
        logging.getLogger("foretoken").warning(
            "%s cannot be locked (%s): see to it that no other run writes to it", path, error.strerror
        )
