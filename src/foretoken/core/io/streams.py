"""Files that must not be replaced."""

from __future__ import annotations

from pathlib import Path


def is_stream(path: str | Path) -> bool:
    """Whether a path is a device, a pipe or an open file, such as ``/dev/null`` and ``/dev/stdout``. A file in its
    place would be lost to whoever reads it; in the place of ``/dev/null`` it breaks the machine."""
    path = Path(path)
    is_open_file = str(path).startswith(("/proc/", "/dev/fd/")) or (
        path.is_symlink() and str(path.readlink()).startswith("/proc/")
    )
    return path.exists() and (is_open_file or not (path.is_file() or path.is_dir()))
