"""What the page's tests share: a browser, a mock server, and what a person does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from page_browser import Tab, browser, executable
from page_mock import Mock, mock

needs_browser = pytest.mark.skipif(executable() is None, reason="no chromium here: apt install chromium")


@pytest.fixture(scope="module")
def open_tab() -> Iterator[Tab]:
    with browser() as found:
        yield found


@pytest.fixture
def server() -> Iterator[Mock]:
    with mock() as found:
        yield found


@pytest.fixture
def tab(open_tab: Tab, server: Mock) -> Tab:
    open_tab.size(1200)
    open_tab.open(server.url)
    open_tab.run("sessionStorage.clear()")
    open_tab.complaints.clear()
    open_tab.urls.clear()
    open_tab.open(server.url)
    open_tab.until("document.querySelector('#model').textContent.includes('builtin')")
    return open_tab


def text(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def count(tab: Tab, selector: str) -> int:
    return int(tab.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def put(tab: Tab, name: str, value: str) -> None:
    tab.run(f"document.getElementById('{name}').value = {json.dumps(value)}")


def click(tab: Tab, name: str) -> None:
    tab.run(f"document.getElementById('{name}').click()")


def write(tab: Tab, prompt: str = "def f():") -> None:
    """Press the button, and wait for the end."""
    put(tab, "prompt", prompt)
    click(tab, "run")
    tab.until("/ended by|Failed/.test(document.getElementById('status').textContent)")
