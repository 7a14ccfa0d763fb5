"""Locks of files and folders that one process at a time may write."""

from __future__ import annotations

import logging
from pathlib import Path


def lock(descriptor: int, path: Path, kind: str = "file", wait: bool = False) -> None:
    """Lock the file opened at ``path`` for this process until it is closed or the process ends. Raises ``ValueError``
    if another process holds the lock and ``wait`` is false."""
    try:
        import fcntl
    except ImportError:  # Windows: users must not run two processes in one folder
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait:
            logging.getLogger("foretoken").warning("another run writes to %s: waiting for it", path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return
        raise ValueError(f"another run writes to {path}: wait for it, or choose another {kind}") from None
    except OSError as error:  # some network file systems
        logging.getLogger("foretoken").warning(
            "%s cannot be locked (%s): make sure that no other run writes to it", path, error.strerror
        )
