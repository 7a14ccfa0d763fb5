"""The race on the page: it repeats until its interval says something, and says what it shows in words."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import pytest
from page_mock import RECORDED, Mock
from page_steps import Page, chat, click, module, needs_page, open_tab, put, raced, send, server, tab, text

__all__ = ["chat", "open_tab", "server", "tab"]  # fixtures
TOKENS = sum(len(choice["token_ids"]) for chunk in RECORDED for choice in chunk["choices"])


def by_lane(speculative_s: float, plain_s: float) -> Any:
    """Delays that make one lane faster, and vary a little from pair to pair."""
    return lambda body: (speculative_s if body["speculative"]["enabled"] else plain_s) + 0.002 * (body["seed"] % 2)


@pytest.fixture(autouse=True)
def quick(server: Mock) -> None:
    server.pause_s = 0.0


@needs_page
@pytest.mark.parametrize(
    ("speculative_s", "plain_s", "word"), [(0.1, 0.3, "faster: "), (0.3, 0.1, "slower: ")], ids=["faster", "slower"]
)
def test_race_repeats_until_the_interval_excludes_one(
    tab: Page, server: Mock, speculative_s: float, plain_s: float, word: str
) -> None:
    server.delay_s = by_lane(speculative_s, plain_s)
    verdict = raced(tab)
    assert verdict.startswith(f"Speculative is {word}")
    low, high, pairs = re.findall(r"interval ([\d.]+) to ([\d.]+), (\d+) pairs", verdict)[0]
    assert float(low) > 1 if word == "faster: " else float(high) < 1
    assert 3 <= int(pairs) < 12
    bodies = [body for _, body in server.requests]
    assert len(bodies) == 2 * (int(pairs) + 1), "and a pair to warm up"
    lanes = [body["speculative"] for body in bodies]
    assert all(lane in ({"enabled": True}, {"enabled": False}) for lane in lanes), "no lane explains itself: that costs"
    assert lanes[0] == lanes[3] != lanes[1] == lanes[2], "who runs first must change"
    assert all(body["seed"] == other["seed"] for body, other in zip(bodies[::2], bodies[1::2], strict=True))
    assert len({body["cache_salt"] for body in bodies}) == len(bodies), "none must read another's cache"
    assert text(tab, "#identical").startswith(f"identical: yes, {int(pairs) * TOKENS} of {int(pairs) * TOKENS} tokens")
    assert text(tab, "#plain-text") == text(tab, "#spec-text") != ""


@needs_page
def test_race_ends_undecided_after_twelve_pairs(tab: Page, server: Mock) -> None:
    server.delay_s = lambda body: 0.04 + 0.08 * (body["speculative"]["enabled"] == (body["seed"] % 2 == 0))
    verdict = raced(tab)
    assert verdict.startswith("No difference can be told") and "the interval contains 1" in verdict
    assert "12 pairs" in verdict and len(server.requests) == 26


@needs_page
def test_race_says_that_no_draft_was_used(tab: Page, server: Mock) -> None:
    server.drafts = False
    server.delay_s = lambda body: 0.02 + 0.03 * (body["speculative"]["enabled"] == (body["seed"] % 2 == 0))
    verdict = raced(tab)
    assert verdict.startswith("No draft was used: the controller chose plain decoding in every round.")
    assert "faster" not in verdict and "slower" not in verdict
    assert len(server.requests) == 8, "more pairs would tell nothing"


@needs_page
def test_race_says_where_texts_differ(tab: Page) -> None:
    put(tab, "prompt", "DIFFER")
    raced(tab)
    line = text(tab, "#identical")
    assert line == f"identical: no, in pair 1 they differ from token {TOKENS} of {TOKENS}."
    assert tab.run("document.getElementById('identical').className") == "differ"


@needs_page
def test_race_can_be_seen_again(tab: Page) -> None:
    raced(tab)
    tab.until("document.getElementById('replay').getAttribute('aria-disabled') === 'false'")
    shown = text(tab, "#spec-text")
    click(tab, "replay")
    assert text(tab, "#spec-text") != shown
    tab.until("document.getElementById('replay').getAttribute('aria-disabled') === 'false'")
    assert text(tab, "#spec-text") == shown


@needs_page
def test_race_stops(tab: Page, server: Mock) -> None:
    server.delay_s = lambda body: 0.3
    click(tab, "race")
    tab.until("document.getElementById('verdict').textContent.startsWith('A first pair')")
    tab.run("document.getElementById('prompt').focus()")
    tab.press("Escape")
    tab.until("document.getElementById('verdict').textContent === 'Stopped.'")


@needs_page
def test_race_of_a_chat_is_about_the_last_question(chat: Page, server: Mock) -> None:
    click(chat, "race")
    chat.until("document.getElementById('problem').hidden === false")
    assert "write a message first" in text(chat, "#problem") and server.requests == []
    send(chat, "first")
    server.requests.clear()
    raced(chat)
    assert {path for path, _ in server.requests} == {"/v1/chat/completions"}
    assert all(body["messages"] == [{"role": "user", "content": "first"}] for _, body in server.requests)
    assert all(body["max_tokens"] == 128 for _, body in server.requests), "a long answer is not waited for 26 times"
    assert chat.run("document.getElementById('race-drawer').open") is True


@needs_page
def test_interval_by_hand(tab: Page) -> None:
    """The interval of ratios is Student's, of their logarithms; of ten looks each has a tenth of 5 %."""
    quantile = {3: 14.089, 5: 5.598, 12: 3.497}
    for count, t in quantile.items():
        ratios = [1.2 + 0.01 * index for index in range(count)]
        interval = tab.run(f"{module(tab, 'statistics.js')}.then((one) => one.ratioInterval({ratios}))")
        logs = [math.log(ratio) for ratio in ratios]
        half = t * statistics.stdev(logs) / math.sqrt(count)
        middle = statistics.mean(logs)
        assert [interval["ratio"], interval["low"], interval["high"]] == pytest.approx(
            [math.exp(middle), math.exp(middle - half), math.exp(middle + half)], rel=1e-9
        )


@needs_page
def test_interval_is_wrong_in_five_of_a_hundred_races_at_most(tab: Page) -> None:
    """3,000 races of equals whose noise is normal: all looks together say "faster" or "slower" in at most 5 %."""
    script = """.then((one) => {
      let seed = 1;
      const uniform = () => { seed = (seed * 48271) % 2147483647; return seed / 2147483647; };
      const normal = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
      let wrong = 0;
      for (let race = 0; race < 3000; race += 1) {
        const ratios = [];
        while (ratios.length < one.MOST_PAIRS) {
          ratios.push(Math.exp(0.1 * normal()));
          if (one.isDecided(one.ratioInterval(ratios))) { wrong += 1; break; }
        }
      }
      return wrong / 3000;
    })"""
    assert 0.005 < tab.run(module(tab, "statistics.js") + script) < 0.05
