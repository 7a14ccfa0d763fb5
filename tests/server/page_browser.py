"""Drives a headless Chromium by its debugging protocol, for the tests of the page."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--renderer-process-limit=1",
    "--remote-debugging-port=0",
)
KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "Space": (" ", 32, " "),
}


def executable() -> str | None:
    """Where the browser is, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One tab.

    Attributes:
        complaints: errors and warnings of the console, exceptions, and violations of the content security policy.
        urls: what was asked for.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self.urls: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """The result of one command."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": values}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([arg.get("value") for arg in values["args"]]))
        elif event == "Network.requestWillBeSent":
            self.urls.append(values["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"]["exception"]["description"])
        return reply["result"].get("value")

    def until(self, script: str, seconds: float = 90.0) -> Any:
        """The value of an expression as soon as it is true.

        Raises:
            TimeoutError: it never was.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise TimeoutError(f"never true: {script}; the page complains: {self.complaints}")

    def open(self, url: str) -> None:
        """Load a page, and wait for its scripts."""
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Of the window; small ones are phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, control: bool = False, shift: bool = False) -> None:
        """Press and release a key."""
        name, code, text = KEYS[key]
        common = {"key": name, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 * control + 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.call("Input.insertText", text=text)

    def shot(self, path: Path, whole: bool = True) -> None:
        """Save a picture of the page."""
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a browser of its own, which ends with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [str(executable()), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            port = _port(process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                page = next(target for target in json.load(answer) if target["type"] == "page")
            with connect(page["webSocketDebuggerUrl"], max_size=None, open_timeout=30) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[str]) -> int:
    for line in process.stderr or ():
        if match := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line):
            return int(match[1])
    raise RuntimeError("the browser has ended before it could be driven")
