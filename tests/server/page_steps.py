"""What the page's tests share: a browser, a mock server, and what a person does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import page_node
import pytest
from page_browser import Tab, browser, executable
from page_mock import Mock, mock
from page_node import NodeTab, node_tab

needs_browser = pytest.mark.skipif(executable() is None, reason="no chromium here: apt install chromium")
needs_page = pytest.mark.skipif(
    executable() is None and page_node.executable() is None, reason="neither chromium nor node (20 or later) here"
)
Page = Tab | NodeTab


@pytest.fixture(scope="module")
def open_tab() -> Iterator[Page]:
    """A tab of a browser; where there is none, a document without layout under Node."""
    with browser() if executable() else node_tab() as page:
        yield page


@pytest.fixture
def server() -> Iterator[Mock]:
    with mock() as fake:
        yield fake


@pytest.fixture
def tab(open_tab: Page, server: Mock) -> Page:
    open_tab.size(1200)
    open_tab.open(server.url)
    open_tab.run("sessionStorage.clear(), localStorage.clear()")
    open_tab.complaints.clear()
    open_tab.urls.clear()
    open_tab.open(server.url)
    open_tab.until("document.querySelector('#model').textContent.includes('builtin')")
    return open_tab


def text(tab: Page, selector: str) -> str:
    return str(tab.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def count(tab: Page, selector: str) -> int:
    return int(tab.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def put(tab: Page, name: str, value: str) -> None:
    tab.run(f"document.getElementById('{name}').value = {json.dumps(value)}")


def click(tab: Page, name: str) -> None:
    tab.run(f"document.getElementById('{name}').click()")


@pytest.fixture
def chat(tab: Page, server: Mock) -> Page:
    """The page of a model with a chat template."""
    server.is_chat = True
    tab.open(server.url)
    tab.until("document.body.dataset.mode === 'chat'")
    return tab


def write(tab: Page, prompt: str = "def f():") -> None:
    """Press the button, and wait for the end."""
    put(tab, "prompt", prompt)
    click(tab, "run")
    tab.until("/ended by|Failed/.test(document.getElementById('status').textContent)")


def send(tab: Page, message: str) -> None:
    """Write into the chat, and wait for the end of the answer."""
    tab.run("document.getElementById('prompt').focus()")
    put(tab, "prompt", message)
    tab.press("Enter")
    tab.until("/ended by|Failed/.test(document.getElementById('status').textContent)")
    tab.until("document.getElementById('race').getAttribute('aria-disabled') === 'false'")


def module(tab: Page, name: str) -> str:
    """An expression that is a promise of one of the page's modules."""
    return f"load('{name}')" if isinstance(tab, NodeTab) else f"import('./{name}')"


def raced(tab: Page) -> str:
    """Race, and what is said of it in the end."""
    click(tab, "race")
    tab.until("document.getElementById('identical').textContent.includes('identical')")
    return text(tab, "#verdict")
