"""The page of a model with a chat template: a chat first, with rounds and trees in a drawer."""

from __future__ import annotations

from typing import Any

import pytest
from page_mock import RECORDED, Mock
from page_steps import Page, chat, click, count, needs_page, open_tab, put, send, server, tab, text, write

__all__ = ["chat", "open_tab", "server", "tab"]  # fixtures
ANSWER = "".join(choice["text"] for chunk in RECORDED for choice in chunk["choices"])
ROUNDS = [round_ for chunk in RECORDED for choice in chunk["choices"] for round_ in choice["speculative"]["rounds"]]


def history(tab: Page) -> list[str]:
    """Texts of the history, without buttons and notes."""
    texts: list[str] = tab.run("[...document.querySelectorAll('#history .text')].map((one) => one.textContent)")
    return texts


def messages(server: Mock) -> list[Any]:
    path, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    return [(message["role"], message["content"]) for message in body["messages"]]


def value(tab: Page, name: str) -> Any:
    return tab.run(f"document.getElementById('{name}').value")


# -- what opens -------------------------------------------------------------------------------------------------------


@needs_page
def test_a_model_with_a_template_opens_a_chat(chat: Page) -> None:
    assert text(chat, "#run") == "Send" and value(chat, "prompt") == ""
    assert text(chat, "#prompt-label") == "Message"
    is_open = (
        "['settings', 'rounds-drawer', 'race-drawer', 'engine-drawer'].map((one) => document.getElementById(one).open)"
    )
    assert chat.run(is_open) == [False] * 4
    assert chat.complaints == []


@needs_page
def test_a_model_without_one_opens_a_completion(tab: Page, server: Mock) -> None:
    tab.until("document.body.dataset.mode === 'completion'")
    assert text(tab, "#run") == "Write" and value(tab, "prompt").startswith("def fibonacci")
    assert tab.run("[...document.querySelectorAll('.drawer')].every((one) => one.open)") is True
    write(tab)
    assert server.requests[-1][0] == "/v1/completions"


@needs_page
def test_each_kind_of_page_keeps_its_fields(chat: Page, server: Mock) -> None:
    put(chat, "prompt", "a message")
    chat.run("document.querySelector('input[value=completion]').click()")
    assert value(chat, "prompt").startswith("def fibonacci") and value(chat, "tokens") == "64"
    write(chat, "a text")
    assert server.requests[-1][0] == "/v1/completions"
    chat.run("document.querySelector('input[value=chat]').click()")
    assert value(chat, "prompt") == "a message" and value(chat, "tokens") == "512"


@needs_page
def test_the_kind_does_not_change_under_an_answer(chat: Page, server: Mock) -> None:
    server.pause_s = 0.02
    put(chat, "prompt", "hello")
    click(chat, "run")
    chat.run("document.querySelector('input[value=completion]').click()")
    assert (
        chat.run("[document.body.dataset.mode, document.querySelector('input[name=mode]:checked').value]")
        == ["chat"] * 2
    )
    chat.until("document.getElementById('status').textContent.includes('ended by')")
    assert history(chat) == ["hello", ANSWER]


@needs_page
def test_a_key_can_be_given_before_the_model_is_known(tab: Page, server: Mock) -> None:
    server.key, server.is_chat = "secret", True
    tab.open(server.url)
    tab.until("document.getElementById('live-state').textContent.includes('API key')")
    assert tab.run("[document.body.dataset.mode, document.getElementById('settings').open]") == ["completion", True]
    put(tab, "key", "secret")
    tab.until("document.body.dataset.mode === 'chat'")
    send(tab, "hello")
    assert history(tab) == ["hello", ANSWER]


@needs_page
def test_the_models_own_temperature_is_offered(tab: Page, server: Mock) -> None:
    server.is_chat, server.sampling = True, {"temperature": 0.6, "top_p": 0.9}
    tab.open(server.url)
    tab.until("document.body.dataset.mode === 'chat'")
    assert value(tab, "temperature") == "0.6"


# -- talking ----------------------------------------------------------------------------------------------------------


@needs_page
def test_the_model_is_told_of_all_that_was_said(chat: Page, server: Mock) -> None:
    put(chat, "system", " Be brief. ")
    send(chat, "first")
    assert messages(server) == [("system", "Be brief."), ("user", "first")]
    assert value(chat, "prompt") == ""
    send(chat, "second")
    assert messages(server)[1:] == [("user", "first"), ("assistant", ANSWER), ("user", "second")]
    assert history(chat) == ["first", ANSWER, "second", ANSWER]
    click(chat, "forget")
    assert history(chat) == []
    send(chat, "third")
    assert messages(server) == [("system", "Be brief."), ("user", "third")]


@needs_page
def test_settings_are_sent(chat: Page, server: Mock) -> None:
    for name, setting in (("temperature", "0.25"), ("seed", "11"), ("tokens", "32")):
        put(chat, name, setting)
    send(chat, "hello")
    body = server.requests[-1][1]
    assert [body["temperature"], body["seed"], body["max_tokens"]] == [0.25, 11, 32]
    put(chat, "temperature", "9")
    put(chat, "prompt", "again")
    click(chat, "run")
    assert chat.run("document.getElementById('settings').open") is True, "where the wrong field is"
    assert len(server.requests) == 1


@needs_page
def test_enter_sends_and_shift_enter_starts_a_line(chat: Page, server: Mock) -> None:
    chat.run("document.getElementById('prompt').focus()")
    chat.press("Enter")
    assert server.requests == [], "there is nothing to be sent"
    chat.type("one")
    chat.press("Enter", shift=True)
    assert server.requests == []
    chat.type("two")
    chat.press("Enter")
    chat.until("document.getElementById('status').textContent.includes('ended by')")
    assert messages(server)[-1] == ("user", "one\ntwo")


@needs_page
def test_a_message_is_text_and_nothing_else(chat: Page) -> None:
    send(chat, "<img src=x onerror=alert(1)> **bold**")
    assert history(chat)[0] == "<img src=x onerror=alert(1)> **bold**"
    assert count(chat, "#history img") == 0


# -- stopping ---------------------------------------------------------------------------------------------------------


@needs_page
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_was_written(chat: Page, server: Mock, how: str) -> None:
    server.pause_s = 0.3
    put(chat, "prompt", "long")
    click(chat, "run")
    chat.until("document.querySelectorAll('.round').length > 1")
    assert text(chat, "#run") == "Stop"
    if how == "button":
        click(chat, "run")
    else:
        chat.press("Escape")
    chat.until("document.getElementById('status').textContent === 'Stopped.'")
    assert text(chat, "#run") == "Send"
    part = history(chat)[1]
    assert part and part != ANSWER and ANSWER.startswith(part)
    server.pause_s = 0.0
    send(chat, "go on")
    assert messages(server) == [("user", "long"), ("assistant", part), ("user", "go on")]


@needs_page
def test_a_double_click_does_not_stop(chat: Page, server: Mock) -> None:
    server.pause_s = 0.02
    put(chat, "prompt", "twice")
    click(chat, "run")
    chat.run("document.getElementById('run').dispatchEvent(new (globalThis.MouseEvent ?? Event)('click', {detail: 2}))")
    chat.until("document.getElementById('status').textContent.includes('ended by')")
    assert history(chat) == ["twice", ANSWER] and len(server.requests) == 1


# -- copying ----------------------------------------------------------------------------------------------------------


@needs_page
@pytest.mark.parametrize("is_old", [False, True], ids=["clipboard", "without a clipboard"])
def test_an_answer_is_copied(chat: Page, is_old: bool) -> None:
    send(chat, "hello")
    new = "undefined" if is_old else "{writeText: async (text) => { taken.push(text); }}"
    chat.run(
        f"globalThis.taken = [], Object.defineProperty(navigator, 'clipboard', {{configurable: true, value: {new}}}), "
        "document.execCommand = () => taken.push([...document.body.children].at(-1).value) > 0"
    )
    chat.run("document.querySelector('.assistant .tools button').click()")
    chat.until("document.getElementById('status').textContent === 'Copied.'")
    assert chat.run("taken") == [ANSWER]
    assert count(chat, ".sr[aria-hidden=true]") == 0, "nothing stays behind"


# -- the drawer -------------------------------------------------------------------------------------------------------


@needs_page
def test_the_drawer_shows_the_last_answer_or_the_chosen_one(chat: Page, server: Mock) -> None:
    send(chat, "first")
    assert count(chat, "#ribbon .round") == len(ROUNDS)
    assert text(chat, "#rounds-which") == "of answer 1"
    server.drafts = False
    send(chat, "second")
    assert count(chat, "#ribbon .accepted") == 0
    assert text(chat, "#rounds-which") == "of answer 2"
    notes = chat.run("[...document.querySelectorAll('#history .note')].map((one) => one.textContent)")
    assert "tokens per round" in notes[0] and "no draft was used" in notes[1]
    chat.run("document.querySelectorAll('.tools button[aria-pressed]')[0].click()")
    assert chat.run("document.getElementById('rounds-drawer').open") is True
    assert count(chat, "#ribbon .round") == len(ROUNDS)
    assert count(chat, "#tree .node") == len(ROUNDS[0]["tokens"]) + 1
    pressed = (
        "[...document.querySelectorAll('.tools button[aria-pressed]')].map((one) => one.getAttribute('aria-pressed'))"
    )
    assert chat.run(pressed) == ["true", "false"]


# -- errors -----------------------------------------------------------------------------------------------------------


@needs_page
@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("REFUSE", "400: max_new_tokens=9000 exceeds the model's context"),
        ("QUOTA", "429: the key's tokens of this minute are used up (try again in 7 s)"),
        ("BUSY", "503: the server is busy: all 256 places are taken; try again (try again in 7 s)"),
        ("BREAK", "the stream broke off before its end"),
        ("FAIL", "out of memory: try again"),
    ],
)
def test_an_error_is_one_line_and_loses_nothing(chat: Page, server: Mock, message: str, problem: str) -> None:
    send(chat, "before")
    send(chat, message)
    assert text(chat, "#problem") == problem and "\n" not in problem
    assert value(chat, "prompt") == message, "what was typed is there again"
    is_broken = message in ("BREAK", "FAIL")
    assert len(history(chat)) == (4 if is_broken else 2), "what came of a broken answer can be read"
    assert count(chat, ".failed") == (2 if is_broken else 0)
    send(chat, "after")
    assert messages(server) == [("user", "before"), ("assistant", ANSWER), ("user", "after")]
    assert chat.run("document.getElementById('problem').hidden") is True


@needs_page
def test_what_was_typed_meanwhile_stays_too(chat: Page, server: Mock) -> None:
    server.pause_s = 0.2
    put(chat, "prompt", "BREAK")
    click(chat, "run")
    chat.until("document.querySelectorAll('.turn').length === 2")
    put(chat, "prompt", "the next one")
    chat.until("document.getElementById('status').textContent === 'Failed.'")
    assert value(chat, "prompt") == "BREAK\nthe next one"


# -- light and dark ---------------------------------------------------------------------------------------------------


@needs_page
def test_theme_is_remembered_until_it_is_the_systems(tab: Page, server: Mock) -> None:
    theme = "document.documentElement.dataset.theme ?? 'system'"
    assert tab.run(theme) == "system" and tab.run("localStorage.length") == 0
    assert text(tab, "#theme") == "Dark"
    click(tab, "theme")
    assert tab.run(theme) == "dark" and text(tab, "#theme") == "Light"
    tab.open(server.url)
    assert tab.run(theme) == "dark", "and before anything is asked"
    click(tab, "theme")
    assert tab.run(theme) == "system" and tab.run("localStorage.length") == 0
    tab.size(1200, dark=True)
    tab.open(server.url)
    assert text(tab, "#theme") == "Light"
    click(tab, "theme")
    assert tab.run(theme) == "light"
