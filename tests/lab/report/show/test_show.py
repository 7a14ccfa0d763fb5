"""Pictures of runs: what they say is what happened, they load nothing, and they are well-formed."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foretoken.cli.explain import lines_of
from foretoken.core.sampling import SamplingParams
from foretoken.engine.output import Output, output_of
from foretoken.engine.request import Request
from foretoken.engine.trace import RoundTrace
from foretoken.lab.report.show import page, picture
from foretoken.lab.report.show.run import Shown, shown_run
from foretoken.lab.report.show.texts import token_namer, visible
from foretoken.lab.report.show.tree import draw_tree
from foretoken.lab.report.show.why import nodes_of, own_tests, passed, statuses
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.registry import make
from toys import engine, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1]
FACTS = [("target", "a toy"), ("drafter", "<b>&")]
CASES = {
    "greedy": ("tree", "greedy", 0.0),
    "coupled": ("tree", "coupled", 1.0),
    "match": ("chain", "match", 1.0),
    "rejection": ("chain", "rejection", 1.0),
    "block": ("chain", "block", 1.0),
    "multi_round": ("iid", "multi_round", 1.0),
    "without_replacement": ("tree", "without_replacement", 1.0),
    "kseq": ("iid", "kseq", 1.0),
    "traversal": ("tree", "traversal", 1.0),
    "point": ("ngram", "point", 1.0),
    "probes": ("probes", "point", 1.0),
}
each_case = pytest.mark.parametrize("case", list(CASES))


def drafter(name: str) -> Drafter:
    draft = tables()[1]
    return {
        "chain": lambda: ModelDrafter(draft, k=3),
        "tree": lambda: ModelDrafter(draft, tree="2x2x1"),
        "iid": lambda: ModelDrafter(draft, tree="2x2x1", draw="iid"),
        "ngram": lambda: NgramDrafter(n=2, k=3),
        "probes": lambda: LookaheadDrafter(w=3, n=3, g=2),
    }[name]()


def output(case: str, tokens: int = 25) -> Output:
    name, rule, temperature = CASES[case]
    speculative = engine(tables()[0], drafter(name), make("verifier", rule))
    seed = 5 if rule == "coupled" else None
    request = Request(PROMPT, SamplingParams(temperature), tokens, seed=seed, explain=True)
    (run,) = serve(speculative, [request])
    return output_of(run, None)


def test_a_child_whose_turn_did_not_come_is_not_called_rejected() -> None:
    """The walk goes on from equal siblings together: the child of one is accepted before the other's are tried."""
    for seed in range(12):  # the tenth has one
        torch.manual_seed(seed)
        for round_ in run_of("multi_round", 60).rounds:
            assert all("u = " in node.why for node in round_.nodes if node.status == "rejected")


def run_of(case: str, tokens: int = 25) -> Shown:
    return shown_run(output(case, tokens), None, "a prompt", FACTS)


@each_case
def test_every_token_of_the_text_is_in_the_round_that_wrote_it(case: str) -> None:
    out = output(case)
    run = shown_run(out, None, "", ())
    words = [word for round_ in run.rounds for word in round_.words]
    assert [word.text for word in words] == [f"{token} " for token in out.token_ids]
    assert [word.origin for word in words] == out.origins


@each_case
def test_statuses_are_what_the_trace_says(case: str) -> None:
    seen = set()
    for round_ in run_of(case).rounds:
        labels = statuses(round_.trace)
        seen |= set(labels)
        assert [i for i, status in enumerate(labels) if status == "accepted"] == list(round_.trace.accepted)
        assert [i for i, status in enumerate(labels) if status == "probe"] == list(round_.trace.probes)
        for i, status in enumerate(labels):  # nothing can be rejected on the way that was never gone
            above = labels[round_.trace.parents[i]] if i else "root"
            if status == "rejected" and round_.trace.verifier not in ("block", "traversal", "kseq", "multi_round"):
                assert above in ("root", "accepted")
    assert {"root", "accepted", "rejected"} <= seen
    assert ("probe" in seen) == (case == "probes")


@pytest.mark.parametrize("case", ["rejection", "multi_round", "without_replacement", "kseq", "point"])
def test_every_test_finds_its_node(case: str) -> None:
    for round_ in run_of(case, 60).rounds:
        tests = own_tests(round_.trace)
        assert list(tests.values()) == round_.trace.tests  # all of them, in order
        status = statuses(round_.trace)
        for node, toss in tests.items():
            twins = [i for i in round_.trace.accepted if round_.trace.tokens[i] == round_.trace.tokens[node]]
            again = twins and (status[node] == "untried" or case == "kseq")
            assert (status[node] == "accepted") == passed(toss) or again
        for node in round_.nodes:
            if node.status == "rejected":
                assert "u = " in node.why and "≥" in node.why, node


def chain_of(rule: str, tests: list[tuple[float, float, int | None]]) -> RoundTrace:
    """A chain of three, whose first draft token was rejected."""
    return RoundTrace(
        0, [7, 1, 2, 3], [-1, 0, 1, 2], [None] * 4, [None] * 4, [], 9, False, "model", verifier=rule,
        tests=[{"u": u, "chance": chance, "node": node} for u, chance, node in tests],
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["rejection", "lenient", "mine"])
def test_tokens_behind_a_rejection_were_not_reached_whatever_the_rule_is_called(rule: str) -> None:
    _, first, *others = nodes_of(chain_of(rule, [(0.9, 0.1, 1)]), str)
    assert first.status == "rejected" and first.why.startswith("rejected: u = 0.9 ≥ ")
    assert [(node.status, node.why) for node in others] == [
        ("untried", "not reached: '1' was not accepted"),
        ("untried", "not reached: '2' was not accepted"),
    ]


@pytest.mark.parametrize("tests", [[(0.9, 0.1, None)], []], ids=["a test without its node", "no test"])
def test_a_rule_from_outside_need_not_name_its_nodes(tests: list[tuple[float, float, int | None]]) -> None:
    _, first, *others = nodes_of(chain_of("mine", tests), str)
    assert (first.status, first.why) == ("rejected", "rejected: the token that the target took is '9'")
    assert [node.status for node in others] == ["untried", "untried"]


def test_lenient_is_a_rule_of_single_tokens() -> None:
    target, draft = tables()
    runner = engine(target, ModelDrafter(draft, k=3), make("verifier", "lenient"), allow_lossy=True)
    (run,) = serve(runner, [Request(PROMPT, SamplingParams(1.0), 40, explain=True)])
    rounds = [nodes_of(trace, str) for trace in run.rounds if len(trace.tokens) > 1]
    assert {"accepted", "rejected", "untried"} <= {node.status for nodes in rounds for node in nodes}
    for node in (node for nodes in rounds for node in nodes[1:]):
        assert node.why.startswith({"untried": "not reached"}.get(node.status, f"{node.status}: "))
        assert node.status == "untried" or "its chance" in node.why


def test_an_equal_draft_is_tested_once_by_the_point_rule() -> None:
    trace = RoundTrace(
        0, [7, 1, 1], [-1, 0, 0], [None] * 3, [None] * 3, [], 9, False, "ngram", verifier="point",
        tests=[{"u": 0.9, "chance": 0.1, "node": 1}],
    )  # fmt: skip
    assert [node.why for node in nodes_of(trace, str)][1:] == [
        "rejected: u = 0.9 ≥ its share of what is left = 0.1",
        "not tried: an equal draft was",
    ]


def test_reasons_are_true() -> None:
    for round_ in run_of("rejection", 60).rounds:
        for node in round_.reasons:
            assert node.p is not None and node.q is not None
            ratio = node.p / node.q
            if "at least 1" in node.why:
                assert ratio >= 1.0
            else:
                u, sign, shown_ratio = re.fullmatch(r"\w+: u = (\S+) ([<≥]) p/q = (\S+)", node.why).groups()  # type: ignore[union-attr]
                assert float(shown_ratio) == pytest.approx(ratio, rel=0.06)
                assert sign == ("<" if node.status == "accepted" else "≥")
                assert 0 <= float(u) <= 1


def test_what_the_target_took_is_named() -> None:
    for case in ("greedy", "coupled"):
        for round_ in run_of(case).rounds:
            for node in round_.nodes:
                if node.status == "rejected":
                    taken = node.why.split("is ")[1].strip("'")
                    sibling = [n for n in round_.trace.accepted if round_.trace.parents[n] == node.parent]
                    token = round_.trace.tokens[sibling[0]] if sibling else round_.trace.next_token
                    assert taken == str(token) != node.text


@each_case
def test_pages_load_nothing_and_show_every_round(case: str) -> None:
    run = run_of(case)
    text = page.render(run)
    assert not re.search(r"https?://|src=|url\(|@import|<script|<link", text)
    assert text.count("<section") == len(run.rounds) == text.count('id="round-')
    assert "&lt;b&gt;&amp;" in text and "<b>" not in text
    body = text.split("<body>")[1].split("</body>")[0]
    ElementTree.fromstring(f"<body>{body}</body>")
    ribbon = re.sub(r"<[^>]*>", "", body.split('class="ribbon">')[1].split("</div>")[0])
    assert html.unescape(ribbon) == "a prompt" + "".join(w.text for round_ in run.rounds for w in round_.words)


@each_case
def test_pictures_are_whole_svg_files(case: str) -> None:
    run = run_of(case)
    for index in (0, run.best(), len(run.rounds) - 1):
        text = picture.render(run, index)
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert re.sub(r'xmlns="[^"]*"', "", text).find("http") == -1
        wide, high = (float(root.attrib[name]) for name in ("width", "height"))
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            if box.get("x") is not None:
                assert float(box.attrib["x"]) + float(box.attrib["width"]) <= wide
                assert float(box.attrib["y"]) + float(box.attrib["height"]) <= high
    with pytest.raises(ValueError, match=f"round 999 does not exist: the run has {len(run.rounds)}"):
        picture.render(run, 998)


def test_lines_of_a_picture_end_between_words() -> None:
    run = replace(run_of("greedy"), prompt="seven letters " * 20 + "x" * 100)
    root = ElementTree.fromstring(picture.render(run, 0))
    shown = [
        part.text or "" for part in root.iter("{http://www.w3.org/2000/svg}text") if "prompt" in part.get("class", "")
    ]
    assert "".join(shown) == run.prompt  # a word that no line holds is cut
    assert len(shown) > 4 and all(re.fullmatch(r"((seven|letters) )+|x+", line) for line in shown)


def test_the_best_round_has_accepted_and_rejected_tokens() -> None:
    run = run_of("rejection", 60)
    kinds = {node.status for node in run.rounds[run.best()].nodes}
    assert {"accepted", "rejected"} <= kinds


def test_boxes_do_not_overlap() -> None:
    for round_ in run_of("traversal").rounds:
        drawn = draw_tree(round_.nodes, round_.next_token, round_.origin).markup
        matches = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn)
        boxes = [tuple(map(float, box)) for box in matches]
        assert len(boxes) == len(round_.nodes) + 1
        for i, (x, y, w, h) in enumerate(boxes):
            for x2, y2, w2, h2 in boxes[i + 1 :]:
                assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_lines_of_a_tree() -> None:
    trace = RoundTrace(
        0, [7, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [None] * 5, [None] * 5, [1], 9, False, "model", verifier="greedy",
        decides_by="choices",
    )  # fmt: skip
    out = Output("", [1, 9], "length", None, ["accepted", "recovered"], rounds=[trace])  # type: ignore[arg-type]
    (round_,) = shown_run(out, None, "", ()).rounds
    assert [(line.branch + line.text, line.kind) for line in lines_of(round_)] == [
        ("7", "root"),
        ("├─ 1", "accepted"),
        ("│  ├─ 9", "recovered"),
        ("│  └─ 3", "rejected"),
        ("└─ 2", "rejected"),
    ]
    assert round_.caption.startswith("model: 4 drafted, 1 accepted; recovered: '9' in place")


def test_a_long_chain_is_printed_too() -> None:
    """Deeper than Python's stack, as a prediction's draft may be."""
    depth = 1500
    trace = RoundTrace(
        0, [7, *range(depth)], [-1, *range(depth)], [None] * (depth + 1), [None] * (depth + 1),
        list(range(1, depth + 1)), 9, True, "prediction", verifier="greedy",
    )  # fmt: skip
    text = [*range(depth), 9]
    out = Output("", text, "length", None, ["accepted"] * depth + ["bonus"], rounds=[trace])  # type: ignore[arg-type]
    (round_,) = shown_run(out, None, "", ()).rounds
    lines = lines_of(round_)
    assert [line.text for line in lines] == [str(token) for token in (7, *text)]
    assert lines[-1].branch == "   " * depth + "└─ " and lines[-1].kind == "bonus"


def test_tokens_are_shown_as_they_are() -> None:
    assert visible(" a\n\t") == "·a⏎⇥"
    assert visible("") == "∅"
    assert visible("\x00\x1b\x7f\ud800") == "␀␛␡?"
    assert len(visible("x" * 50)) == 16
    assert token_namer(None)(5) == "5"


def test_a_token_keeps_its_leading_space() -> None:
    """``decode`` of one token loses that of SentencePiece: two drafts would look the same."""
    backend = Tokenizer(models.BPE({"\u2581the": 0, "the": 1, "<0xE2>": 2, "</s>": 3}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert [token_namer(tokenizer)(token) for token in range(5)] == [" the", "the", "\ufffd", "</s>", "4"]
    trace = RoundTrace(
        0, [1, 0, 1], [-1, 0, 0], [None] * 3, [None] * 3, [], 3, False, "model", verifier="greedy", decides_by="choices"
    )
    out = Output("</s>", [3], "length", None, ["recovered"], rounds=[trace])  # type: ignore[arg-type]
    (round_,) = shown_run(out, tokenizer, "", ()).rounds
    assert [node.text for node in round_.nodes] == ["the", " the", "the"]


def test_an_output_without_rounds_says_what_to_do() -> None:
    out: Any = replace(output("greedy"), rounds=[])
    with pytest.raises(ValueError, match="generate with explain=True"):
        shown_run(out, None, "", ())
