"""The page for people: keyboards, screen readers, phones, eyes; and once on the real server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from page_browser import Tab
from page_mock import RECORDED, Mock
from page_steps import Page, count, needs_browser, needs_page, open_tab, put, raced, send, server, tab, text, write

__all__ = ["open_tab", "server", "tab"]  # fixtures
ROUNDS = [round_ for chunk in RECORDED for choice in chunk["choices"] for round_ in choice["speculative"]["rounds"]]


def tab_to(tab: Tab, name: str) -> None:
    """Press Tab until something has the focus."""
    for _ in range(40):
        if tab.run("document.activeElement.id") == name:
            return
        tab.press("Tab")
    raise AssertionError(f"Tab never reaches {name}")


@needs_browser
def test_everything_works_by_keyboard(tab: Tab, server: Mock) -> None:
    tab_to(tab, "prompt")
    tab.run("document.activeElement.select()")
    tab.type("by keys")
    tab_to(tab, "run")
    tab.press("Enter")
    tab.until("document.getElementById('status').textContent.includes('ended by')")
    assert server.requests[-1][1]["prompt"] == "by keys"
    assert tab.run("document.activeElement.id") == "run", "the focus must not be lost"
    tab_to(tab, "ribbon")
    before = text(tab, "#tree-which")
    tab.press("ArrowRight")
    assert text(tab, "#tree-which") != before
    assert tab.run("document.getElementById('ribbon').getAttribute('aria-activedescendant')") == "round-1"
    assert tab.run("document.getElementById('round-1').getAttribute('aria-selected')") == "true"


@needs_page
def test_control_enter_writes_and_escape_stops(tab: Page, server: Mock) -> None:
    server.pause_s = 0.5
    tab.run("document.getElementById('prompt').focus()")
    tab.press("Enter", control=True)
    tab.until("document.querySelectorAll('.round').length > 1")
    tab.press("Escape")
    tab.until("document.getElementById('status').textContent === 'Stopped.'")
    assert count(tab, ".round") < len(ROUNDS)


def answered(tab: Tab, server: Mock, is_chat: bool) -> None:
    """Load the page of a model with or without a chat template, and get an answer; every panel is open."""
    server.is_chat = is_chat
    tab.open(server.url)
    tab.until(f"document.body.dataset.mode === '{'chat' if is_chat else 'completion'}'")
    (send if is_chat else write)(tab, "def f():")
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


@needs_browser
@pytest.mark.parametrize("is_chat", [False, True])
def test_everything_has_a_name(tab: Tab, server: Mock, is_chat: bool) -> None:
    answered(tab, server, is_chat)
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "checkbox", "radio", "listbox", "option", "image", "region", "table"}
    seen = [node for node in nodes if not node["ignored"] and node.get("role", {}).get("value") in roles]
    unnamed = [node["role"]["value"] for node in seen if not node.get("name", {}).get("value")]
    assert unnamed == []
    assert {"button", "textbox", "listbox", "option", "image"} <= {node["role"]["value"] for node in seen}


@needs_browser
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("width", [320, 400, 1200])
def test_nothing_overflows(tab: Tab, server: Mock, width: int, is_chat: bool) -> None:
    tab.size(width)
    answered(tab, server, is_chat)
    assert tab.run("document.documentElement.scrollWidth") <= width
    outside = tab.run(
        "[...document.querySelectorAll('section, button, input, textarea, pre, p, dl, .chart')]"
        f".filter((one) => one.getBoundingClientRect().right > {width} + 1).map((one) => one.id || one.tagName)"
    )
    assert outside == []


@needs_browser
def test_an_answer_moves_nothing(tab: Tab) -> None:
    places = "[...document.querySelectorAll('section')].map((one) => one.getBoundingClientRect().top + scrollY)"
    before = tab.run(places)
    write(tab)
    assert tab.run(places) == before


@needs_browser
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_words_can_be_read(tab: Tab, server: Mock, dark: bool, is_chat: bool) -> None:
    """Contrast of at least 4.5 between text and what is behind it, light and dark."""
    tab.size(1200, dark=dark)
    answered(tab, server, is_chat)
    script = """(() => {
      const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
      const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = (node) => {
        for (let one = node; one; one = one.parentElement) {
          const colour = parts(getComputedStyle(one).backgroundColor);
          if (colour.length < 4 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
      };
      const seen = '.t, .hint, .peek, .text, summary, button, dt, dd, h1, h2, label, td, th, #status';
      return [...document.querySelectorAll(seen)]
        .filter((one) => one.getClientRects().length)
        .map((one) => {
          const pair = [light(parts(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => b - a);
          return [(pair[0] + 0.05) / (pair[1] + 0.05), one.className || one.tagName];
        }).filter((one) => one[0] < 4.5);
    })()"""
    assert tab.run(script) == []


# -- the real server --------------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> Iterator[str]:
    """Address of the server itself with the built-in model."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from foretoken.server.app import create_app
    from foretoken.server.config import ServerSettings

    settings = ServerSettings(model="builtin", drafter="model,tree=3x2x1x1", controller="constant", dtype="float32")
    http_server = uvicorn.Server(uvicorn.Config(create_app(settings), log_config=None, lifespan="on"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=http_server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        http_server.should_exit = True
        thread.join(timeout=60)


@needs_browser
def test_page_on_the_real_server(open_tab: Tab, real: str) -> None:
    tab = open_tab
    tab.size(1200)
    for _ in range(600):
        tab.open(real)
        if tab.run("fetch('ready').then((answer) => answer.ok)"):
            break
        time.sleep(0.2)
    tab.complaints.clear()
    tab.open(real)
    tab.until("document.querySelector('#model').textContent.includes('builtin')")
    put(tab, "tokens", "24")
    write(tab)
    assert text(tab, "#problem") == ""
    assert count(tab, "#ribbon .t") == 24
    assert count(tab, "#tree .node") > 3
    assert int(text(tab, "#n-accepted")) > 0
    assert "faster" in (verdict := raced(tab)) or "slower" in verdict or "No difference" in verdict
    assert text(tab, "#identical").startswith("identical: yes")
    assert tab.complaints == []
