"""What all smoke tests share: they run in environments where only one client is installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

URL = os.environ["BASE_URL"]
TOKENIZER = os.environ["TOKENIZER"]
WORK = os.environ["WORK"]
CHECKED: list[str] = []


def check(what: str, holds: bool, found: Any = "") -> None:
    """Note what holds; what does not ends the test.

    Raises:
        SystemExit: it does not.
    """
    if not holds:
        raise SystemExit(f"{what}: {str(found)[:500]}")
    CHECKED.append(what)


def post(path: str, **body: Any) -> Any:
    """The answer of the server itself, for comparison."""
    request = urllib.request.Request(
        URL + path, json.dumps({"model": "builtin", **body}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def shell(*command: str) -> str:
    """The output of a program of the client's own.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{command[0]} ended with {done.returncode}")
    return done.stdout


def report(package: str, **more: Any) -> None:
    """The last line."""
    print(json.dumps({"version": importlib.metadata.version(package), "checked": CHECKED, **more}))
