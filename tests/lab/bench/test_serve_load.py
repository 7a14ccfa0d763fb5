"""The load generator: what it counts, what is an error to it, how requests arrive, and whether it tells arms apart."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")
pytest.importorskip("httpx", reason="the extra 'bench' is not installed")

from load_servers import Scripted, running

from foretoken.lab.bench.load import client, figures
from foretoken.lab.bench.load.client import Drafts, Sample, drafts_of
from foretoken.lab.bench.load.run import LoadResult, parse_addresses, run_load
from foretoken.lab.bench.load.settings import Level, LoadSettings, Server, arrivals
from foretoken.lab.prompts import BenchPrompt

SPEC = {"num_draft_tokens": 6, "num_accepted_draft_tokens": 3, "num_spec_steps": 2}
PREDICTED = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1}


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    server = Scripted()
    with running(server.app) as url:
        yield server, url


def load(
    url: str, prompts: Sequence[str], levels: Sequence[Level] = (), compare: bool = False, **more: Any
) -> LoadResult:
    """A load test of one server that asks each prompt once."""
    options: dict[str, Any] = {"requests": len(prompts), "warmup": 1, "timeout_s": 5.0, **more}
    settings = LoadSettings(levels or [Level("concurrency", 2)], **options)
    categories = {"toy": [BenchPrompt("toy", text) for text in prompts]}
    return run_load([Server("server", url)], categories, settings, compare)


# -- one request -----------------------------------------------------------------------------------------------------


def test_time_per_token_counts_tokens_and_not_chunks(scripted: Any) -> None:
    server, url = scripted
    server.pause_s = 0.05
    (cell,) = load(url, ["a", "b"]).cells
    assert cell["completed"] == 2 and cell["errors"] == {} and cell["new_tokens"] == 26
    first_ms, last_ms = cell["ttft_ms"]["p50"], cell["e2e_ms"]["p50"]  # of four chunks
    assert first_ms < last_ms and last_ms >= 3 * 50
    assert cell["tpot_ms"]["p50"] == pytest.approx((last_ms - first_ms) / 12, rel=0.01)
    assert cell["mean_acceptance_length"] == 2 and cell["acceptance_rate"] == 0.5


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("full", "http_503", "no room"),
        ("detail", "http_422", "not like this"),
        ("cut", "truncated", "without a finish_reason"),
        ("endless", "truncated", "[DONE] and without a finish_reason"),
        ("error", "stream_error", "out of luck"),
        ("words", "bad_answer", "JSONDecodeError"),
        ("die", "disconnected", "peer closed connection"),
    ],
)
def test_errors_are_counted_by_kind(scripted: Any, prompt: str, kind: str, words: str) -> None:
    result = load(scripted[1], ["fine", prompt, "fine"])
    (cell,) = result.cells
    assert cell["errors"] == {kind: 1} and cell["completed"] == 2 and cell["new_tokens"] == 26
    assert any(words in note for note in result.summary["notes"]), result.summary["notes"]


def test_a_request_that_takes_too_long_is_an_error(scripted: Any) -> None:
    (cell,) = load(scripted[1], ["fine", "hang"], timeout_s=0.5).cells
    assert cell["errors"] == {"timeout": 1} and cell["completed"] == 1


def test_streams_without_done_or_usage_count_and_are_told(scripted: Any) -> None:
    result = load(scripted[1], ["undone", "uncounted", "fine"])
    (cell,) = result.cells
    assert cell["completed"] == 3 and cell["new_tokens"] == 13 + 4 + 13
    assert any("without [DONE]" in note for note in result.summary["notes"])
    assert any("had no usage" in note for note in result.summary["notes"])


def test_chat_deltas_thoughts_and_calls_are_text() -> None:
    sample = Sample(0, "x")
    for i, delta in enumerate(
        [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm "},
            {"content": "yes"},
            {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ]
    ):
        sample.read({"choices": [{"delta": delta}]}, float(i))
    sample.read({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 9.0)
    assert sample.close().ok and sample.text == "hm yesf{}"
    assert sample.first_s == 1.0 and sample.last_s == 9.0 and sample.tokens == sample.chunks == 3


@pytest.mark.parametrize(
    ("event", "drafts"),
    [
        ({"metrics": {"speculative_decoding": SPEC}}, (2, 6, 3)),
        ({"timings": {"draft_n": 8, "draft_n_accepted": 5}}, (None, 8, 5)),
        ({"usage": {"completion_tokens_details": PREDICTED}}, (None, 5, 4)),
        ({"usage": {"completion_tokens": 4}}, None),
        ({"timings": {"predicted_n": 3}}, None),
    ],
)  # fmt: skip
def test_drafts_in_the_words_of_several_engines(event: dict[str, Any], drafts: Any) -> None:
    counts = drafts_of(event)
    assert (None if counts is None else (counts.rounds, counts.drafted, counts.accepted)) == drafts


def test_counters_of_the_first_prefix_are_summed_over_labels() -> None:
    page = """# TYPE foretoken:spec_decode_num_drafts_total counter
foretoken:spec_decode_num_drafts_total{model_name="a"} 3.0
foretoken:spec_decode_num_drafts_total{model_name="b"} 4.0
foretoken:spec_decode_num_draft_tokens_total{model_name="a"} 1.2e+01
foretoken:spec_decode_num_accepted_tokens_total{model_name="a"} 6.0
foretoken:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 99.0
vllm:spec_decode_num_draft_tokens_total{model_name="a"} 12.0"""
    assert client.read_counters(page.splitlines()) == Drafts(7, 12, 6)
    assert client.read_counters(["process_cpu_seconds_total 3"]) is None


def test_acceptance_comes_from_counters_where_answers_say_nothing(scripted: Any) -> None:
    (cell,) = load(scripted[1], ["untold", "untold"]).cells
    assert (cell["draft_tokens"], cell["acceptance_rate"], cell["mean_acceptance_length"]) == (16, 0.5, 3.0)


# -- arrivals --------------------------------------------------------------------------------------------------------


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = arrivals(Level("rate", 20.0), 4000, 1)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert times == arrivals(Level("rate", 20.0), 4000, 1) != arrivals(Level("rate", 20.0), 4000, 2)
    bursts = arrivals(Level("rate", 20.0, burst=4), 4000, 1)
    assert bursts[0] == bursts[3] < bursts[4] == bursts[7]
    assert bursts[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_so_many_clients_and_no_more(scripted: Any) -> None:
    server, url = scripted
    server.pause_s = 0.01
    load(url, ["a"] * 12, [Level("concurrency", 3)])
    assert server.most == 3


def test_a_rate_does_not_wait_for_answers(scripted: Any) -> None:
    server, url = scripted
    server.pause_s = 0.2
    (cell,) = load(url, ["a"] * 12, [Level("rate", 100.0)]).cells
    assert server.most > 6 and cell["requests_per_s"] > 5  # one after the other: 1.7


def test_every_pass_and_arm_asks_the_same_with_a_salt_of_its_own(scripted: Any) -> None:
    server, url = scripted
    server.owner = "foretoken"
    load(url, ["a", "b", "c"], compare=True, passes=2, seed=5, temperature=1.0, extra={"top_k": 7})
    bodies = server.seen[2:]  # behind the warm-up
    assert sorted((body["prompt"], body["seed"]) for body in bodies) == sorted([("a", 5), ("b", 6), ("c", 7)] * 4)
    assert len({body["cache_salt"] for body in bodies}) == 4 and all(body["top_k"] == 7 for body in bodies)
    order = [body.get("speculative") is not None for body in bodies]
    assert order == [True] * 3 + [False] * 6 + [True] * 3  # arms take turns at going first


def test_a_second_run_shares_no_salt_with_the_first(scripted: Any) -> None:
    server, url = scripted
    server.owner = "foretoken"
    load(url, ["a", "b"])
    first = {body["cache_salt"] for body in server.seen}
    server.seen.clear()
    load(url, ["a", "b"])
    second = {body["cache_salt"] for body in server.seen}
    assert len(first) == len(second) == 2 and not first & second  # the warm-up and the only pass


def test_unknown_servers_get_no_salt(scripted: Any) -> None:
    server, url = scripted
    load(url, ["a"])
    assert all("cache_salt" not in body and "seed" not in body for body in server.seen)


def test_categories_take_turns() -> None:
    prompts = {"a": [BenchPrompt("a", "1"), BenchPrompt("a", "2")], "b": [BenchPrompt("b", "3")]}
    asks = LoadSettings([]).asks(prompts, 6)
    assert [ask.prompt.text for ask in asks] == ["1", "3", "2", "3", "1", "3"]


# -- comparing -------------------------------------------------------------------------------------------------------


def test_a_text_that_differs_between_arms_is_seen(scripted: Any) -> None:
    server, url = scripted
    same = load(url, ["a", "b"], compare=True).cells
    assert [cell["identical"] for cell in same] == [None, True]
    server.skew = "!"
    result = load(url, ["a", "b"], compare=True)
    assert [cell["identical"] for cell in result.cells] == [None, False]
    (row,) = result.summary["equality"]
    assert (row["compared"], row["different"]) == (2, 2)
    assert row["examples"][0]["texts"][1].endswith("end!") and row["examples"][0]["character"] == 27


@pytest.mark.parametrize(("less_likely", "ties"), [(-0.75, 2), (-3.0, 0), (None, 0)])
def test_a_difference_is_a_tie_only_where_the_server_holds_both_tokens_alike(
    scripted: Any, less_likely: float | None, ties: int
) -> None:
    server, url = scripted
    server.skew = "!"
    server.logprobs = {"token_id:9": -0.6} | ({} if less_likely is None else {"token_id:8": less_likely})
    result = load(url, ["a", "b"], compare=True)
    (row,) = result.summary["equality"]
    assert (row["different"], row["ties"], row["ties_unknown"]) == (2, ties, 0) and result.cells[1][
        "identical"
    ] is False
    bodies = [body for body in server.seen if "logprobs" in body]
    assert [body["prompt"] for body in bodies] == [[5, 6, 0, 1, 2]] * 2
    gap = None if less_likely is None else pytest.approx(-0.6 - less_likely)
    assert row["examples"][0]["gap"] == gap


@pytest.mark.parametrize("logprobs", [{}, {"a": -0.6, "b": -0.7}])
def test_ties_are_unknown_where_no_token_ids_are_reported(scripted: Any, logprobs: dict[str, float]) -> None:
    server, url = scripted
    server.skew, server.logprobs = "!", logprobs
    (row,) = load(url, ["a", "b"], compare=True).summary["equality"]
    assert (row["different"], row["ties"], row["ties_unknown"]) == (2, 0, 2)


def test_ties_are_unknown_of_sampled_texts(scripted: Any) -> None:
    server, url = scripted
    server.skew, server.logprobs = "!", {"token_id:9": -0.6, "token_id:8": -0.75}
    (row,) = load(url, ["a"], compare=True, temperature=1.0, seed=1).summary["equality"]
    assert (row["different"], row["ties"], row["ties_unknown"]) == (1, 0, 1)


def test_texts_are_not_compared_where_they_may_differ(scripted: Any) -> None:
    server, url = scripted
    server.skew = "!"
    result = load(url, ["a"], compare=True, temperature=1.0)
    assert result.cells[1]["identical"] is None and result.summary["equality"] == []
    assert any("needs --seed" in note for note in result.summary["notes"])


def test_a_server_that_always_drafts_cannot_be_compared_with_itself(scripted: Any) -> None:
    server, url = scripted
    server.switches = False
    with pytest.raises(ValueError, match="does not turn speculation off"):
        load(url, ["a"], compare=True)


def test_spreads_of_few_values() -> None:
    assert figures.spread([3.0, None]) == {"mean": 3000.0, "p50": 3000.0, "p90": 3000.0, "p99": 3000.0}
    assert figures.spread([None]) is None


# -- against the real application ------------------------------------------------------------------------------------


def test_plain_against_speculation_on_our_own_server() -> None:
    import foretoken as ft
    from foretoken.server.app import create_app
    from foretoken.server.config import ServerSettings

    def make(settings: ServerSettings) -> Any:
        return ft.load("builtin", "ngram", dtype="float32", controller="constant", known=True)

    from foretoken.server.serving import Serving

    settings = ServerSettings(max_running=4)
    with running(create_app(settings, Serving(settings, make)), "/ready") as url:
        result = load(
            url, ["one two three one two three", "def f(x):"], [Level("concurrency", 2)], True,
            requests=4, max_tokens=16, ignore_eos=True, temperature=1.0, seed=3,
        )  # fmt: skip
    plain, speculative = result.cells
    assert plain["errors"] == speculative["errors"] == {}
    assert plain["new_tokens"] == speculative["new_tokens"] == 64
    assert plain["draft_tokens"] == 0 < speculative["draft_tokens"]
    assert speculative["identical"] is True and result.summary["equality"][0]["compared"] == 4
    assert result.summary["servers"]["plain"]["drafter"] == "ngram"


def test_addresses() -> None:
    (server,) = parse_addresses(["http://h:1/v1/"], False, ["k"], [])
    assert (server.name, server.url, server.key, server.model) == ("server", "http://h:1", "k", "")
    servers = parse_addresses(["a=http://h:1", "http://h:2/x?y=http://z"], False, ["k", "l"], ["m"])
    assert [(server.name, server.key, server.model) for server in servers] == [
        ("a", "k", "m"),
        ("h:2/x?y=http://z", "l", "m"),
    ]
    for addresses, words in (
        (["h:1"], "is not a server"),
        (["http://h:99999"], "'http://h:99999' is not a valid address: Port out of range 0-65535"),
        (["a=http://h:b/v1"], "is not a valid address: Port could not be cast"),
        (["a=http://h:1", "a=http://h:2"], "two servers are called a"),
        (["http://h:1"] * 2, "two servers"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_addresses(addresses, False, [], [])
    with pytest.raises(ValueError, match="given 2 times for 1"):
        parse_addresses(["http://h:1"], False, ["k", "l"], [])
    with pytest.raises(ValueError, match="one URL"):
        parse_addresses(["http://h:1", "http://h:2"], True, [], [])


def test_nobody_at_the_address_and_a_wrong_key(scripted: Any) -> None:
    server, url = scripted
    with pytest.raises(ValueError, match="nothing answers"):
        load("http://127.0.0.1:9", ["a"])
    server.key = "secret"
    with pytest.raises(ValueError, match="needs an API key"):
        load(url, ["a"])
    with pytest.raises(ValueError, match=r"answers no request \(http_503\): no room"):
        server.key = ""
        load(url, ["full"])


def test_a_client_that_is_late_says_so() -> None:
    from foretoken.lab.bench.load.drive import Pass
    from foretoken.lab.bench.load.run import notes
    from foretoken.lab.bench.load.settings import ServerArm

    arm = ServerArm("x", Server("x", "u", "m"))
    late = Pass(arm, Level("rate", 1.0), 0, lag_s=0.2)
    assert any("late by up to 200 ms" in note for note in notes([late], LoadSettings([]), {"a": []}))


def test_an_interrupted_test_counts_the_prompts_that_it_has() -> None:
    """The count includes prompts whose requests had not ended."""
    from foretoken.lab.bench.load.client import Sample
    from foretoken.lab.bench.load.drive import Pass
    from foretoken.lab.bench.load.run import notes
    from foretoken.lab.bench.load.settings import ServerArm

    cut = Pass(ServerArm("x", Server("x", "u", "m")), Level("rate", 1.0), 0, [Sample(0, "a")], cut=True)
    groups = {"a": ["one", "two", "three", "four"], "b": ["five", "six", "seven", "eight"]}
    by_count = {count: notes([cut], LoadSettings([], requests=count), groups) for count in (8, 10)}
    assert not any("prompts for" in note for note in by_count[8])
    assert any(note.startswith("There are 8 prompts for 10 requests") for note in by_count[10])


def test_a_pass_cut_by_an_interrupt_does_not_lower_the_rates() -> None:
    from foretoken.lab.bench.load.drive import Pass
    from foretoken.lab.bench.load.settings import ServerArm

    def passed(seconds: float, cut: bool) -> Pass:
        sample = Sample(0, "a", first_s=0.5, last_s=1.0, tokens=100)
        return Pass(arm, settings.levels[0], 0, [sample], seconds, cut=cut)

    arm, settings = ServerArm("x", Server("x", "u", "m")), LoadSettings([Level("concurrency", 1)])
    whole, cut = passed(1.0, False), passed(1e9, True)
    row = figures.cell([whole, cut], [whole, cut], settings)
    assert (row["tokens_per_s"], row["requests_per_s"], row["requests"]) == (100.0, 1.0, 2)
    assert figures.cell([cut], [cut], settings)["tokens_per_s"] == pytest.approx(1e-7)


def test_stopping_keeps_what_has_ended(scripted: Any) -> None:
    from foretoken.lab.bench.load.drive import Driver
    from foretoken.lab.bench.load.settings import ServerArm

    url = scripted[1]

    async def run() -> Any:
        async with client.open_client(5.0) as http:
            settings = LoadSettings([Level("concurrency", 2)], requests=6, passes=3, warmup=1)
            prompts = {"a": [BenchPrompt("a", "fine")] * 3 + [BenchPrompt("a", "hang")] * 3}

            def tell(done: int, total: int, text: str) -> None:
                if done == 3:
                    driver.stop.set()

            driver = Driver(http, settings, prompts, tell)
            return await driver.run([ServerArm("x", Server("x", url, "toy"))])

    (result,) = asyncio.run(asyncio.wait_for(run(), 10))
    assert result.cut and len(result.samples) == 3 and all(sample.ok for sample in result.samples)
