"""Runs the page under Node, in a document without layout, for the tests where there is no browser."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_mock import PAGE

HERE = Path(__file__).parent


def executable() -> str | None:
    """Where Node is, if it is there and knows what the page uses."""
    path = shutil.which("node")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return path if version.startswith("v") and int(version[1:].split(".")[0]) >= 20 else None


class NodeTab:
    """One page, with the methods of the tests' tab of a browser that need no layout.

    Attributes:
        complaints: errors and warnings of the console, and exceptions.
        urls: what its scripts asked for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._dark = folder, False
        self._process: subprocess.Popen[str] | None = None
        self.complaints: list[str] = []
        self.urls: list[str] = []

    def open(self, url: str) -> None:
        """Load the page anew; what it has stored stays."""
        stored: dict[str, Any] = {"dark": self._dark}
        if self._process is not None:
            kept = self.run("({session: sessionStorage.values, local: localStorage.values})")
            stored |= kept
            self.close()
        command = [str(executable()), str(HERE / "page_node.mjs"), url, str(self._folder), json.dumps(stored)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def close(self) -> None:
        """End the page."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("Node has ended")
        reply: dict[str, Any] = json.loads(line)
        self.complaints, self.urls = reply.get("complaints", []), reply.get("urls", [])
        return reply

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(script) + "\n")
        self._process.stdin.flush()
        reply = self._answer()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply.get("value")

    def until(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression as soon as it is true.

        Raises:
            TimeoutError: it never was.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.02)
        raise TimeoutError(f"never true: {script}; the page complains: {self.complaints}")

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Only the colours count here, from the next page on."""
        self._dark = dark

    def press(self, key: str, control: bool = False, shift: bool = False) -> None:
        """Press a key where the focus is."""
        event = {"bubbles": True, "key": " " if key == "Space" else key, "ctrlKey": control, "shiftKey": shift}
        self.run(f"pressed({json.dumps(event)})")

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.run(f"document.activeElement.value += {json.dumps(text)}")


@contextlib.contextmanager
def node_tab() -> Iterator[NodeTab]:
    """A page that ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "page")
        shutil.copytree(PAGE, copy)
        (copy / "package.json").write_text('{"type": "module"}')
        tab = NodeTab(copy)
        try:
            yield tab
        finally:
            tab.close()
