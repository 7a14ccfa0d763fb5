"""Environment variables of foretoken, and warnings about misspelt ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from foretoken.server.config import PREFIX, ServerSettings

OTHERS = (
    "CPU", "DEBUG",
    "API_KEY", "API_KEY_FILE", "CONFIG", "RAY_ADDRESS", "REPLICAS",
    "WHEEL_KERNELS", "FAKE_CUDA", "MIXES", "SAMPLES",
)  # fmt: skip
"""Names without the prefix: those of the library and command line, of ``serve`` beside its settings, and of builds and
tests."""
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_")
"""Variables that Kubernetes sets for a Service whose name begins with foretoken."""


def known_variables() -> frozenset[str]:
    settings = [setting.name for setting in fields(ServerSettings)]
    return frozenset(PREFIX + name.upper() for name in (*OTHERS, *settings))


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """One warning per variable with our prefix and an unknown name, with the closest known name."""
    names = known_variables()
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in names or _SERVICE.search(name) or "://" in environ[name]:
            continue
        from difflib import get_close_matches

        closest = get_close_matches(name, sorted(names), 1, 0.0)[0]
        yield f"the environment variable {name} is ignored: foretoken has no variable of that name; closest: {closest}"
