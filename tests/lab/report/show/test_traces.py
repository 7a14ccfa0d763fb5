"""Traces as files: what we write reads back to the same page, others' are shown, broken ones are told by line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_show import FACTS, each_case, output

from foretoken.core.sampling import SamplingParams
from foretoken.engine.output import output_of
from foretoken.engine.request import Request
from foretoken.lab.report.show import page, picture
from foretoken.lab.report.show.run import Total, shown_run, total_of
from foretoken.lab.report.show.trace_file import read_trace, to_lines
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.registry import make
from toys import engine, serve, tables

HEAD = {"foretoken_trace": 1, "engine": "other 2.0", "facts": {"target": "a model"}}
RECIPES = Path(__file__).resolve().parents[4] / "examples" / "trace_from_logs.py"


def written(tmp_path: Path, *rows: dict[str, Any] | str) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def a_round(**more: Any) -> dict[str, Any]:
    return {"type": "round", "draft": ["a", "b", "c"], "accepted": [1, 2], **more}


@each_case
def test_our_traces_read_back_to_the_same_page(case: str, tmp_path: Path) -> None:
    run = shown_run(output(case, 40), None, "a prompt\n", FACTS)
    back = read_trace(written(tmp_path, *to_lines(run, "us"))).choose(None)
    assert list(back.facts) == [("engine", "us"), *FACTS]
    original, restored = page.render(run), page.render(back)
    begin = '<ul class="legend">'
    assert restored[restored.index(begin) :] == original[original.index(begin) :]
    assert back.best() == run.best()
    assert [round_.drafted for round_ in back.rounds] == [round_.drafted for round_ in run.rounds]


def test_a_round_needs_only_drafts_and_what_was_accepted(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD, a_round(), a_round(accepted=[1, 2, 3]), a_round(draft=[], accepted=[]))
    first, second, third = read_trace(file).choose(None).rounds
    assert [node.status for node in first.nodes] == ["root", "accepted", "accepted", "rejected"]
    assert first.caption == "drafter: 3 drafted, 2 accepted; recovered: '?' in place of what was rejected"
    assert second.next_token.why.startswith("bonus:") and third.caption == "nothing was drafted; plain: '?'"
    assert [word.text for word in first.words] == ["a", "b", "?"]


def test_a_tree_of_another_engine(tmp_path: Path) -> None:
    more = {"parents": [0, 0, 2], "accepted": [2], "next": "x", "draft_ms": 2, "target_ms": 8, "drafter": "theirs"}
    file = written(tmp_path, HEAD, {"type": "request", "prompt": "<p>"}, a_round(**more))
    run = read_trace(file).choose(None)
    (round_,) = run.rounds
    assert [node.status for node in round_.nodes[1:]] == ["rejected", "accepted", "rejected"]
    assert round_.caption.startswith("theirs: 3 drafted, 1 accepted; recovered: 'x'")
    assert round_.caption.endswith("draft 2.0 ms, target 8.0 ms")
    text = page.render(run)
    assert "&lt;p&gt;" in text and "token -1" not in text
    assert "<svg" in picture.render(run, 0)
    assert total_of("r", run) == Total("r", 1, 3, 1, per_position=(1.0,))  # 10 ms are not the whole round
    timed = read_trace(written(tmp_path, HEAD, a_round(**more, total_ms=16))).choose(None)
    assert total_of("r", timed) == Total("r", 1, 3, 1, tokens_per_s=125.0, per_position=(1.0,))
    partly = read_trace(written(tmp_path, HEAD, a_round(**more, total_ms=16), a_round(**more))).choose(None)
    assert total_of("r", partly).tokens_per_s is None


def test_the_speed_in_a_trace_is_that_of_the_run(tmp_path: Path) -> None:
    request = Request([0, 1, 2], SamplingParams(0.0), 24, stop_token_ids=frozenset([3]), explain=True)
    (served,) = serve(engine(tables()[0], ModelDrafter(tables()[0], k=4), make("verifier", "greedy")), [request])
    made = output_of(served, None)
    assert sum(len(trace.accepted) + 1 for trace in made.rounds) > len(made.token_ids)  # the last round is truncated
    run = shown_run(made, None, "a prompt", FACTS)
    (total,) = read_trace(written(tmp_path, *to_lines(run, "us"))).totals
    assert total.tokens_per_s == pytest.approx(made.stats.tokens_per_s, rel=1e-4)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"type": "round"', "no JSON (Expecting"),
        ("[1]", "no JSON object"),
        ('{"type": "round", "draft": [NaN]}', "no JSON (not UTF-8, or not a JSON number)"),
        ({"type": "step"}, "'type' must be request, round or total, not 'step'"),
        ({"type": "round"}, "'draft' must be a list of strings or null"),
        (a_round(draft=[1]), "'draft' must be a list of strings or null"),
        (a_round(accepted=[2]), "'accepted' is not a path from the root: [2]"),
        (a_round(accepted=[1, 2, 3, 4]), "'accepted' is not a path from the root"),
        (a_round(accepted=[True]), "'accepted' must be a list of whole numbers"),
        (a_round(parents=[0, 2, 0]), "'parents': node 2 has parent 2"),
        (a_round(parents=[0]), "'parents' has 1 entries instead of 3"),
        (a_round(status=["accepted", "rejected", None]), "'status' of node 2 is 'rejected', which contradicts"),
        (a_round(why=["x"]), "'why' must have an entry for each of the 3 draft tokens"),
        (a_round(p=["x", None, None]), "'p' has an entry of the wrong type"),
        (a_round(origin="luck"), "'origin' must be recovered, bonus, plain, not 'luck'"),
        (a_round(next=3), "'next' must be a string"),
        (a_round(target_ms=-1), "'target_ms' must be a number >= 0"),
        (a_round(total_ms="2"), "'total_ms' must be a number >= 0"),
        (a_round(text=["a", "b", "c", "d"]), "'text' has 4 pieces, and the round wrote at most 3"),
        (a_round(draft=["a"] * 5000), "'draft' has 5000 tokens, and at most 4096 can be shown"),
        (a_round(request=3), "'request' must be a string"),
        ({"type": "total"}, "a total needs at least one of rounds"),
        ({"type": "total", "rounds": "3"}, "'rounds' must be a number >= 0"),
        ({"type": "total", "per_position": [1.5]}, "'per_position' must be a list of shares"),
    ],
)
def test_a_broken_line_is_told_by_file_and_line(tmp_path: Path, row: Any, words: str) -> None:
    file = written(tmp_path, HEAD, a_round(), "", row)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_trace(file)
    assert str(error.value).startswith(f"{file}, line 4: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"foretoken_trace": 2}, "line 1: a trace of version 2, and this foretoken reads version 1"),
        ({"foretoken_trace": True}, "line 1: a trace of version True"),
        ({"prompt": "a"}, 'line 1: not a trace: the first line must be {"foretoken_trace": 1, ...}'),
        ({"foretoken_trace": 1, "facts": {"a": 1}}, "line 1: 'facts' must be an object of strings"),
        ({"foretoken_trace": 1, "engine": 7}, "line 1: 'engine' must be a string"),
        ("", "is empty: a trace begins with"),
        (HEAD, "holds no rounds and no totals"),
    ],
)
def test_what_is_no_trace_says_so(tmp_path: Path, head: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_trace(written(tmp_path, head))


def test_several_requests_and_totals(tmp_path: Path) -> None:
    total = {"type": "total", "label": "12:00", "rounds": 4, "drafted": 12, "accepted": 6, "per_position": [0.8, 0.5]}
    trace = read_trace(written(tmp_path, HEAD, a_round(request="x"), a_round(request="y", accepted=[]), total))
    assert [row.cells for row in trace.totals] == [
        ["x", "1", "3", "2", "67%", "3.00", "", "1.00 1.00"],
        ["y", "1", "3", "0", "0%", "1.00", "", ""],
        ["12:00", "4", "12", "6", "50%", "2.50", "", "0.80 0.50"],
    ]
    assert trace.choose("y").facts[-1] == ("request", "y, one of 2")
    assert "12:00" in page.render(trace.choose(None), trace.totals)
    with pytest.raises(ValueError, match="no request 'z'; it has x, y"):
        trace.choose("z")


def test_totals_alone_are_a_page_without_rounds(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEAD, {"type": "total", "tokens_per_round": 2.5}))
    text = page.render(trace.choose(None), trace.totals)
    assert "2.50" in text and "<section" not in text and "ribbon" not in text.split("<body>")[1]


LOGS = {
    "vllm": [
        '{"id": "a", "choices": [], "metrics": {"speculative_decoding": {"per_step_accepted": [2, 0], "per_step_drafted": [2, 4]}}}'  # noqa: E501
    ],
    "vllm-log": [
        "(APIServer pid=347228) INFO 08-04 20:51:08 [loggers.py:310] Engine 000: Avg prompt throughput: 93.9 tokens/s, Running: 1",  # noqa: E501
        "(APIServer pid=347228) INFO 08-04 20:51:08 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 3.49, Accepted throughput: 0.12 tokens/s, Drafted throughput: 0.34 tokens/s, Accepted: 92 tokens, Drafted: 259 tokens, Per-position acceptance rate: 0.757, 0.622, Avg Draft acceptance rate: 35.5%",  # noqa: E501
    ],
    "sglang": [
        "[2026-11-26 12:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 5, #running-req: 0",
        "[2026-11-26 12:00:01 TP0] Decode batch, #running-req: 1, #token: 100, token usage: 0.01, accept len: 2.45, accept rate: 0.36, cuda graph: True, gen throughput (token/s): 88.10, #queue-req: 0",  # noqa: E501
    ],
    "llama.cpp": [
        "11:04:29.854 | 1.12.930.368 I slot print_timing: id  3 | task 7 | ",
        "11:04:29.854 | prompt eval time =   16743.45 ms / 33191 tokens (    0.50 ms per token,  1982.33 tokens per second)",  # noqa: E501
        "11:04:29.854 |        eval time =     161.86 ms /     8 tokens (   20.23 ms per token,    49.43 tokens per second)",  # noqa: E501
        "11:04:29.854 |       total time =   16905.31 ms / 33199 tokens",
        "11:04:29.854 | draft acceptance rate = 0.37500 (    3 accepted /     8 generated)",
        "11:04:29.854 | statistics draft-mtp: #calls(b,g,a) = 1 4 4, #gen drafts = 4, #acc drafts = 2, #gen tokens = 8, #acc tokens = 3",  # noqa: E501
    ],
}
"""Lines as the engines write them."""
EXPECTED = {
    "vllm": ["a", "2", "6", "2", "33%", "2.00", "", "0.50 0.50"],
    "vllm-log": ["08-04 20:51:08", "", "259", "92", "36%", "3.49", "", "0.76 0.62"],
    "sglang": ["2026-11-26 12:00:01 TP0", "", "", "", "36%", "2.45", "88.1", ""],
    "llama.cpp": ["task 7", "", "8", "3", "38%", "", "49.4", ""],
}


@pytest.mark.parametrize("engine", LOGS)
def test_recipes_read_logs_of_other_engines(engine: str, tmp_path: Path) -> None:
    log, file = tmp_path / "server.log", tmp_path / "trace.jsonl"
    log.write_text("\n".join(LOGS[engine]))
    done = subprocess.run([sys.executable, str(RECIPES), engine, str(log)], capture_output=True, text=True, check=True)
    file.write_text(done.stdout)
    trace = read_trace(file)
    assert dict(trace.facts)["engine"] == engine
    assert [total.cells for total in trace.totals] == [EXPECTED[engine]]


def test_a_trace_is_shown_without_pytorch(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD, a_round())
    code = (
        "import sys; from foretoken.cli.main import main; "
        f"code = main(['show', {str(file)!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "round 1: drafter: 3 drafted, 2 accepted" in done.stdout
