"""The page in a real browser, on recorded rounds: what it shows, what it sends, what it says of errors."""

from __future__ import annotations

import re

import pytest
from page_browser import Tab
from page_mock import PAGE, REASON, RECORDED, Mock
from page_steps import click, count, needs_browser, open_tab, put, server, tab, text, write

__all__ = ["open_tab", "server", "tab"]  # fixtures
TOKENS = sum(len(choice["token_ids"]) for chunk in RECORDED for choice in chunk["choices"])
ROUNDS = [one for chunk in RECORDED for choice in chunk["choices"] for one in choice["speculative"]["rounds"]]
ORIGINS = [origin for chunk in RECORDED for choice in chunk["choices"] for origin in choice["origins"]]


# -- what is shipped --------------------------------------------------------------------------------------------------


def test_page_is_small_and_asks_nobody_else() -> None:
    files = [file for file in PAGE.iterdir() if file.suffix in (".html", ".js", ".css")]
    assert {"index.html", "app.js", "style.css"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) < 100_000
    for file in files:
        urls = re.findall(r"https?://[^\s'\"]+", file.read_text(encoding="utf-8"))
        assert all(url.startswith("http://www.w3.org/") for url in urls), (file, urls)
    markup = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", markup), "needs what the policy forbids"


# -- loading ----------------------------------------------------------------------------------------------------------


@needs_browser
def test_page_loads_without_complaints(tab: Tab, server: Mock) -> None:
    write(tab)
    click(tab, "race")
    tab.until("document.getElementById('verdict').textContent.includes('identical')")
    assert tab.complaints == []
    assert all(url.startswith((server.url, "data:")) for url in tab.urls), tab.urls


@needs_browser
def test_browser_reports_what_the_policy_forbids(tab: Tab) -> None:
    """Negative control of the test above: an inline style, and an image from elsewhere, are seen."""
    tab.run("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\">x</p>')")
    tab.until("document.querySelector('p[style]') !== null")
    tab.run("new Promise((done) => { const i = new Image(); i.onerror = done; i.src = 'http://127.0.0.2:9/x.png'; })")
    assert any("style" in one for one in tab.complaints)
    assert any("127.0.0.2" in one for one in tab.complaints)
    tab.complaints.clear()


# -- an answer --------------------------------------------------------------------------------------------------------


@needs_browser
def test_ribbon_shows_every_token_with_its_origin(tab: Tab, server: Mock) -> None:
    write(tab)
    classes = tab.run("[...document.querySelectorAll('#ribbon .t')].map((one) => one.classList[1])")
    assert classes == ORIGINS
    assert count(tab, "#ribbon .round") == len(ROUNDS)
    for origin in ("accepted", "recovered", "bonus", "plain"):
        assert text(tab, f"#n-{origin}") == str(ORIGINS.count(origin))
    shown = tab.run(
        "(() => { const copy = document.getElementById('ribbon').cloneNode(true);"
        "copy.querySelectorAll('.nl').forEach((one) => one.remove()); return copy.textContent; })()"
    )
    assert shown == "".join(choice["text"] for chunk in RECORDED for choice in chunk["choices"])
    styles = tab.run(
        "['accepted', 'recovered', 'bonus', 'plain'].map((kind) =>"
        "getComputedStyle(document.querySelector(`.legend .${kind}`)).textDecorationStyle)"
    )
    assert len(set(styles)) == 4, "colour must not be the only difference"


@needs_browser
def test_request_is_what_the_form_says(tab: Tab, server: Mock) -> None:
    for name, value in (("temperature", "0.25"), ("seed", "11"), ("tokens", "32")):
        put(tab, name, value)
    click(tab, "enabled")
    write(tab, "say it")
    path, body = server.asked[-1]
    assert path == "/v1/completions"
    assert body == {
        "model": "builtin",
        "prompt": "say it",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.25,
        "seed": 11,
        "max_tokens": 32,
        "speculative": {"enabled": False, "explain": True},
    }
    assert text(tab, "#n-plain") == str(TOKENS)


@needs_browser
def test_chat_keeps_the_conversation(tab: Tab, server: Mock) -> None:
    tab.run("document.querySelector('input[value=chat]').click()")
    write(tab, "first")
    write(tab, "second")
    path, body = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == "".join(c["text"] for chunk in RECORDED for c in chunk["choices"])
    click(tab, "forget")
    write(tab, "third")
    assert [one["content"] for one in server.asked[-1][1]["messages"]] == ["third"]


@needs_browser
def test_tree_of_any_round(tab: Tab) -> None:
    write(tab)
    index = next(i for i, one in enumerate(ROUNDS) if one["accepted"] and len(one["tokens"]) > 4)
    tab.run(f"document.getElementById('round-{index}').click()")
    one = ROUNDS[index]
    assert count(tab, "#tree .node") == len(one["tokens"]) + 1, "and the next token"
    assert count(tab, "#tree .node.accepted") == len(one["accepted"])
    assert count(tab, "#tree .edge.accepted") == len(one["accepted"])
    assert count(tab, "#tree-table tbody tr") == len(one["tokens"]) + 1
    tab.run("document.querySelector('#tree .node.rejected').dispatchEvent(new Event('click'))")
    assert "rejected; p/q = " in text(tab, "#why")
    struck = tab.run("[...document.querySelectorAll('#peek s')].length")
    assert struck == len(one["tokens"]) - 1 - len(one["accepted"])


@needs_browser
def test_rings_and_discs_say_p_and_q(tab: Tab) -> None:
    write(tab)
    node = next(n for n in range(1, len(ROUNDS[0]["tokens"])) if 0.1 < (ROUNDS[0]["p"][n] or 0) < 0.9)
    p, q = ROUNDS[0]["p"][node], ROUNDS[0]["q"][node]
    here = f"document.querySelectorAll('#tree .node')[{node}]"
    assert float(tab.run(f"{here}.querySelector('.disc').getAttribute('r')")) == pytest.approx(3 + 9 * q**0.5)
    dash, around = map(float, tab.run(f"{here}.querySelector('.ring').getAttribute('stroke-dasharray')").split())
    assert dash / around == pytest.approx(p)


@needs_browser
def test_charts_count_what_was_recorded(tab: Tab) -> None:
    write(tab)
    rows = tab.run(
        "[...document.querySelectorAll('#position-table tbody tr')].map((row) =>"
        "[...row.children].map((cell) => cell.textContent))"
    )
    tried = sum(1 for one in ROUNDS if 0 in one["parents"])
    hits = sum(1 for one in ROUNDS if one["accepted"])
    assert rows[0][:3] == ["1", str(tried), str(hits)]
    assert count(tab, "#position .whisker") == len(rows)
    histogram = tab.run(
        "[...document.querySelectorAll('#histogram-table tbody tr')].map((row) =>"
        "[...row.children].map((cell) => Number(cell.textContent)))"
    )
    assert sum(tokens * rounds for tokens, rounds in histogram) == TOKENS
    assert sum(rounds for _, rounds in histogram) == len(ROUNDS)
    assert count(tab, "#cost rect.draft") == len(ROUNDS)
    assert count(tab, "#cost-table tbody tr") == len(ROUNDS)
    assert REASON in text(tab, "#reason")


@needs_browser
def test_wilson_by_hand(tab: Tab) -> None:
    """The interval that the page draws, for 8 of 10 and 0 of 5."""
    source = (PAGE / "app.js").read_text(encoding="utf-8")
    function = re.search(r"function wilson.*?\n}\n", source, re.DOTALL)
    assert function is not None
    found = tab.run(function[0] + "[...wilson(8, 10), ...wilson(0, 5)]")
    assert found == pytest.approx([0.490162, 0.943318, 0.0, 0.434482], abs=1e-5)


# -- the race ---------------------------------------------------------------------------------------------------------


@needs_browser
def test_race_says_identical(tab: Tab, server: Mock) -> None:
    click(tab, "race")
    tab.until("document.getElementById('verdict').textContent.includes('identical')")
    assert text(tab, "#verdict").startswith(f"identical: yes, {TOKENS} of {TOKENS} tokens")
    (_, plain), (_, spec) = server.asked
    assert plain["speculative"] == {"enabled": False}
    assert spec["speculative"] == {"enabled": True}
    assert plain["seed"] == spec["seed"]
    assert plain["cache_salt"] != spec["cache_salt"], "one must not read the other's cache"
    assert text(tab, "#plain-text") == text(tab, "#spec-text") != ""


@needs_browser
def test_race_says_where_texts_differ(tab: Tab) -> None:
    put(tab, "prompt", "DIFFER")
    click(tab, "race")
    tab.until("document.getElementById('verdict').textContent.includes('identical')")
    assert text(tab, "#verdict").startswith(f"identical: no, they differ from token {TOKENS} of {TOKENS}")


@needs_browser
def test_race_can_be_seen_again(tab: Tab) -> None:
    click(tab, "race")
    tab.until("document.getElementById('replay').getAttribute('aria-disabled') === 'false'")
    shown = text(tab, "#spec-text")
    click(tab, "replay")
    assert text(tab, "#spec-text") != shown
    tab.until("document.getElementById('replay').getAttribute('aria-disabled') === 'false'")
    assert text(tab, "#spec-text") == shown


# -- errors -----------------------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("REFUSE", "400: max_new_tokens=9000 goes past the model's context"),
        ("BREAK", "the stream broke off before its end"),
        ("FAIL", "out of memory: try again"),
    ],
)
def test_errors_are_shown_as_text(tab: Tab, prompt: str, said: str) -> None:
    write(tab, prompt)
    assert text(tab, "#problem") == said
    assert tab.run("document.getElementById('problem').hidden") is False
    write(tab)
    assert tab.run("document.getElementById('problem').hidden") is True


@needs_browser
def test_key_is_sent_and_kept_for_the_tab_only(tab: Tab, server: Mock) -> None:
    server.key = "secret"
    tab.until("document.getElementById('live-state').textContent.includes('API key')")
    write(tab)
    assert text(tab, "#problem").startswith("401: give a valid key")
    put(tab, "key", "secret")
    tab.run("document.getElementById('key').dispatchEvent(new Event('change'))")
    write(tab)
    assert count(tab, "#ribbon .round") == len(ROUNDS)
    assert tab.run("[sessionStorage.getItem('foretoken-key'), localStorage.length, document.cookie]") == [
        "secret",
        0,
        "",
    ]


# -- the engine -------------------------------------------------------------------------------------------------------


@needs_browser
def test_queue_and_throughput_are_live(tab: Tab, server: Mock) -> None:
    assert [text(tab, "#live-running"), text(tab, "#live-waiting")] == ["1", "2"]
    server.rounds += 500
    tab.until("Number(document.getElementById('live-rounds').textContent) > 10")
    tab.until("Number(document.getElementById('live-tokens').textContent) > 10")
    assert "costs plain ms" in text(tab, "#engine")
