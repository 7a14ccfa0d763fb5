"""The page, on recorded rounds, in a browser or else under Node: what it shows, sends and says of errors."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from page_mock import PAGE, REASON, RECORDED, Mock
from page_steps import (
    Page,
    click,
    count,
    module,
    needs_browser,
    needs_page,
    open_tab,
    put,
    raced,
    server,
    tab,
    text,
    write,
)

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.engine.trace import RoundTrace
from foretoken.lab.report.show.why import nodes_of
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.registry import make
from foretoken.server.pages import PATHS
from toys import engine, serve, tables

__all__ = ["open_tab", "server", "tab"]  # fixtures
TOKENS = sum(len(choice["token_ids"]) for chunk in RECORDED for choice in chunk["choices"])
ROUNDS = [round_ for chunk in RECORDED for choice in chunk["choices"] for round_ in choice["speculative"]["rounds"]]
ORIGINS = [origin for chunk in RECORDED for choice in chunk["choices"] for origin in choice["origins"]]


# -- what is shipped --------------------------------------------------------------------------------------------------


def test_every_file_is_served_and_loaded() -> None:
    sources = {file.name: file.read_text(encoding="utf-8") for file in PAGE.iterdir()}
    loaded = set(re.findall(r'(?:src|href|from) ?=? ?"(?:\./)?([\w]+\.(?:js|css))"', "".join(sources.values())))
    assert loaded == set(sources) - {"index.html"} == {path.strip("/") for path in PATHS} - {""}


def test_page_is_small_and_asks_nobody_else() -> None:
    files = [file for file in PAGE.iterdir() if file.suffix in (".html", ".js", ".css")]
    assert {file.name for file in files} == {file.name for file in PAGE.iterdir()}
    assert {"index.html", "app.js", "style.css"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) < 100_000
    for file in files:
        urls = re.findall(r"https?://[^\s'\"]+", file.read_text(encoding="utf-8"))
        assert all(url.startswith("http://www.w3.org/") for url in urls), (file, urls)
    markup = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", markup), "needs what the policy forbids"


# -- loading ----------------------------------------------------------------------------------------------------------


@needs_page
def test_page_loads_without_complaints(tab: Page, server: Mock) -> None:
    write(tab)
    raced(tab)
    assert tab.complaints == []
    assert all(url.startswith((server.url, "data:")) for url in tab.urls), tab.urls


@needs_browser
def test_browser_reports_what_the_policy_forbids(tab: Page) -> None:
    """Negative control of the test above: an inline style, and an image from elsewhere, are seen."""
    tab.run("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\">x</p>')")
    tab.until("document.querySelector('p[style]') !== null")
    tab.run("new Promise((done) => { const i = new Image(); i.onerror = done; i.src = 'http://127.0.0.2:9/x.png'; })")
    assert any("style" in complaint for complaint in tab.complaints)
    assert any("127.0.0.2" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


# -- an answer --------------------------------------------------------------------------------------------------------


@needs_page
def test_ribbon_shows_every_token_with_its_origin(tab: Page, server: Mock) -> None:
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


@needs_browser
def test_colour_is_not_the_only_difference(tab: Page) -> None:
    styles = tab.run(
        "['accepted', 'recovered', 'bonus', 'plain'].map((kind) =>"
        "getComputedStyle(document.querySelector(`.legend .${kind}`)).textDecorationStyle)"
    )
    assert len(set(styles)) == 4


@needs_page
def test_request_is_what_the_form_says(tab: Page, server: Mock) -> None:
    for name, value in (("temperature", "0.25"), ("seed", "11"), ("tokens", "32")):
        put(tab, name, value)
    click(tab, "enabled")
    write(tab, "say it")
    path, body = server.requests[-1]
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


@needs_page
def test_chat_keeps_the_conversation(tab: Page, server: Mock) -> None:
    tab.run("document.querySelector('input[value=chat]').click()")
    write(tab, "first")
    write(tab, "second")
    path, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == "".join(c["text"] for chunk in RECORDED for c in chunk["choices"])
    click(tab, "forget")
    write(tab, "third")
    assert [message["content"] for message in server.requests[-1][1]["messages"]] == ["third"]


@needs_page
def test_tree_of_any_round(tab: Page) -> None:
    write(tab)
    index = next(i for i, round_ in enumerate(ROUNDS) if round_["accepted"] and len(round_["tokens"]) > 4)
    tab.run(f"document.getElementById('round-{index}').click()")
    round_ = ROUNDS[index]
    assert count(tab, "#tree .node") == len(round_["tokens"]) + 1, "and the next token"
    assert count(tab, "#tree .node.accepted") == len(round_["accepted"])
    assert count(tab, "#tree .edge.accepted") == len(round_["accepted"])
    assert count(tab, "#tree-table tbody tr") == len(round_["tokens"]) + 1
    tab.run("document.querySelector('#tree .node.rejected').dispatchEvent(new Event('click'))")
    assert re.search(r"rejected; u = [\d.]+ ≥ (p/q|its chance) = [\d.]+", text(tab, "#why"))
    struck = tab.run("[...document.querySelectorAll('#peek s')].length")
    assert struck == len(round_["tokens"]) - 1 - len(round_["accepted"])


RULES = {
    "greedy": ("ngram", "greedy", 0.0),
    "match": ("chain", "match", 1.0),
    "rejection": ("chain", "rejection", 1.0),
    "lenient": ("chain", "lenient,lenience=0.5", 1.0),
    "block": ("chain", "block", 1.0),
    "multi_round": ("iid", "multi_round", 1.0),
    "without_replacement": ("tree", "without_replacement", 1.0),
    "kseq": ("iid", "kseq", 1.0),
    "traversal": ("tree", "traversal", 1.0),
    "typical": ("tree", "typical", 1.0),
    "point": ("ngram", "point", 1.0),
    "probes": ("probes", "point", 1.0),
}


def traced(case: str) -> list[RoundTrace]:
    """Rounds of a rule on toys."""
    name, rule, temperature = RULES[case]
    draft = tables()[1]
    drafter = {
        "chain": lambda: ModelDrafter(draft, k=3),
        "tree": lambda: ModelDrafter(draft, tree="2x2x1"),
        "iid": lambda: ModelDrafter(draft, tree="2x2x1", draw="iid"),
        "ngram": lambda: NgramDrafter(n=2, k=3),
        "probes": lambda: LookaheadDrafter(w=3, n=3, g=2),
    }[name]()
    speculative = engine(tables()[0], drafter, make("verifier", rule), allow_lossy=True)
    torch.manual_seed(3)
    (run,) = serve(speculative, [Request([0, 1, 2, 3, 0, 1], SamplingParams(temperature), 40, explain=True)])
    return run.rounds


@needs_page
@pytest.mark.parametrize("case", list(RULES))
def test_tree_says_what_the_rule_compared(tab: Page, case: str) -> None:
    """The page's outcomes and reasons are those of ``foretoken show``, for every rule."""
    rounds = traced(case)
    texts = [
        {**trace.as_dict(), "texts": [str(token) for token in trace.tokens], "next_text": str(trace.next_token)}
        for trace in rounds
    ]
    code = module(tab, "why.js")
    shown = tab.run(
        f"{code}.then((one) => {json.dumps(texts)}.map((round) => {{ const found = one.fates(round);"
        "return found.map((fate, node) => [fate, one.because(round, node, found)]); }))"
    )
    seen = set()
    for trace, nodes in zip(rounds, shown, strict=True):
        for node, (fate, why) in zip(nodes_of(trace, str), nodes, strict=True):
            seen.add(fate)
            assert fate == node.status
            if fate in ("accepted", "rejected"):
                assert said(why) == said(node.why.partition(": ")[2])
            if "p/q" in why:
                assert node.p is not None and node.q
                chance = 1.0 if "at least 1" in why else float(why.rpartition("= ")[2])
                assert chance == pytest.approx(min(1.0, node.p / node.q), rel=0.06)
    assert {"root", "accepted", "rejected"} <= seen and ("probe" in seen) == (case == "probes")


def said(why: str) -> str:
    """A reason without its quotes, the name of a chance, and digits of numbers."""
    why = re.sub("p/q|its share of what is left", "its chance", why.translate(str.maketrans("“”", "''")))
    return re.sub(r"\d+\.?\d*(e-?\d+)?", lambda number: f"{float(number[0]):.2g}", why)


@needs_page
def test_rings_and_discs_say_p_and_q(tab: Page) -> None:
    write(tab)
    node = next(n for n in range(1, len(ROUNDS[0]["tokens"])) if 0.1 < (ROUNDS[0]["p"][n] or 0) < 0.9)
    p, q = ROUNDS[0]["p"][node], ROUNDS[0]["q"][node]
    here = f"document.querySelectorAll('#tree .node')[{node}]"
    assert float(tab.run(f"{here}.querySelector('.disc').getAttribute('r')")) == pytest.approx(3 + 9 * q**0.5)
    dash, around = map(float, tab.run(f"{here}.querySelector('.ring').getAttribute('stroke-dasharray')").split())
    assert dash / around == pytest.approx(p)


@needs_page
def test_charts_count_what_was_recorded(tab: Page) -> None:
    write(tab)
    rows = tab.run(
        "[...document.querySelectorAll('#position-table tbody tr')].map((row) =>"
        "[...row.children].map((cell) => cell.textContent))"
    )
    tried = sum(1 for round_ in ROUNDS if 0 in round_["parents"])
    hits = sum(1 for round_ in ROUNDS if round_["accepted"])
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


@needs_page
def test_wilson_by_hand(tab: Page) -> None:
    """The interval that the page draws, for 8 of 10 and 0 of 5."""
    bounds = tab.run(f"{module(tab, 'statistics.js')}.then((one) => [...one.wilson(8, 10), ...one.wilson(0, 5)])")
    assert bounds == pytest.approx([0.490162, 0.943318, 0.0, 0.434482], abs=1e-5)


# -- errors -----------------------------------------------------------------------------------------------------------


@needs_page
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("REFUSE", "400: max_new_tokens=9000 exceeds the model's context"),
        ("BREAK", "the stream broke off before its end"),
        ("FAIL", "out of memory: try again"),
        ("QUOTA", "429: the key's tokens of this minute are used up (try again in 7 s)"),
        ("BUSY", "503: the server is busy: all 256 places are taken; try again (try again in 7 s)"),
    ],
)
def test_errors_are_shown_as_text(tab: Page, prompt: str, message: str) -> None:
    write(tab, prompt)
    assert text(tab, "#problem") == message
    assert tab.run("document.getElementById('problem').hidden") is False
    write(tab)
    assert tab.run("document.getElementById('problem').hidden") is True


@needs_page
def test_key_is_sent_and_kept_for_the_tab_only(tab: Page, server: Mock) -> None:
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


@needs_page
def test_queue_and_throughput_are_live(tab: Page, server: Mock) -> None:
    assert [text(tab, "#live-running"), text(tab, "#live-waiting")] == ["1", "2"]
    server.rounds += 500
    tab.until("Number(document.getElementById('live-rounds').textContent) > 10")
    tab.until("Number(document.getElementById('live-tokens').textContent) > 10")
    assert "costs plain ms" in text(tab, "#engine")


@needs_page
def test_behind_a_gateway_all_replicas_count(tab: Page, server: Mock) -> None:
    """The state is now one replica's, now another's: differences of its counters would be no rates."""
    server.replicas = 2
    tab.until("document.getElementById('live-running').textContent === '2'")
    assert text(tab, "#live-waiting") == "4"
    assert "2 of 32 running, 4 of 512 waiting" in text(tab, "#engine") and "10 MiB" in text(tab, "#engine")
    shown = [float(text(tab, "#live-rounds"))]
    count = server.num_reports
    while server.num_reports < count + 3:
        time.sleep(0.05)
        shown.append(float(text(tab, "#live-rounds")))
    assert max(shown) < 1000 and min(shown) >= 0
