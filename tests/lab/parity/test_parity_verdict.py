"""The report says how many texts are equal, why others are not, and nothing of what was not tried."""

from __future__ import annotations

import pytest
from parity_toys import Planted, Wavering, models

from foretoken.cli.parity import _cells
from foretoken.core import Budget, Context, TokenTree
from foretoken.lab.parity.report import Check, Report, Settings, verdict
from foretoken.lab.parity.run import run_parity
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models.base import LanguageModel

TIED = [[1, 1, 1, 1]]


def report_on(target: LanguageModel, *drafters: Drafter, prompts: list[list[int]] = TIED, **more: object) -> Report:
    settings = {"max_new_tokens": 8, "samples": 0, "controller": "constant", "modes": ["greedy"], **more}
    return run_parity(target, None, drafters, prompts, Settings(**settings))  # type: ignore[arg-type]


def words(report: Report) -> list[str]:
    return [remark.text for remark in verdict(report)]


def test_texts_that_differ_by_a_tie_are_counted_with_gaps_and_the_reason() -> None:
    report = report_on(Wavering(), NgramDrafter())
    assert report.passed and report.public()["ties"] == 1
    equality, outcome = words(report)
    assert equality.startswith(
        "0 of 1 texts are equal to plain decoding's; 1 differs from a numerical tie on (logit gap"
    )
    assert equality.endswith(": this model is exact up to rounding here (said by this test)")
    assert outcome.startswith("passed up to rounding: 1 of 1 texts differ from plain decoding's, all of them from")


def test_a_tie_breaks_the_promise_of_a_bitwise_target() -> None:
    report = report_on(Wavering("bitwise"), NgramDrafter())
    assert not report.passed and report.checks[0].ties == 0 and report.checks[0].differences == 1
    assert "although the target is exact" in report.checks[0].notes[0]
    equality, outcome = words(report)
    assert "1 differs from a numerical tie on: a broken promise" in equality and "said by this test" in equality
    assert outcome == "FAILED: this model claims to be exact to the last bit, and is not"


def test_other_kernels_may_tie_with_a_bitwise_target(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [2, 1, 1, 1, 1, 1, 1, 1]
    monkeypatch.setattr("foretoken.lab.parity.run.transformers_output", lambda *_: outside)
    target = Wavering("bitwise")
    monkeypatch.setattr(target, "forward", super(Wavering, target).forward)  # it keeps its own promise
    report = report_on(target, NgramDrafter(), modes=["greedy", "transformers"])
    assert report.passed and report.public()["ties"] == 2
    plain, other, outcome = words(report)
    assert plain == "all 1 texts are equal to plain decoding's, token by token"
    assert other.startswith(
        "0 of 2 texts are equal to those of transformers.generate; 2 differ from a numerical tie on"
    )
    assert "its kernels differ" in other
    assert outcome == (
        "passed: speculation does not change this target's output; 2 differ from transformers.generate's texts from "
        "numerical ties on"
    )


def test_equal_texts_pass_without_a_word_of_ties() -> None:
    report = report_on(models()[0], Planted(), prompts=[[0, 1], [2]])
    assert words(report) == [
        "all 2 texts are equal to plain decoding's, token by token",
        "passed: speculation does not change this target's output",
    ]


def test_a_drafter_that_drafted_nothing_was_not_tried() -> None:
    report = report_on(models()[0], ScriptedDrafter(), prompts=[[0, 1], [2]])
    first, last = words(report)
    assert first.startswith("scripted drafted nothing on these prompts: it was not tested")
    assert last == "nothing was drafted on these prompts, so speculation was not tested"
    record = report.public()
    assert record["tried"] is False and record["untried"] == [first]
    assert (record["prompts"], record["identical"], record["checks"][0]["tried"]) == (0, 0, False)


def test_texts_of_a_drafter_that_drafted_nothing_are_not_counted() -> None:
    report = report_on(models()[0], ScriptedDrafter(), Planted(), prompts=[[0, 1], [2]])
    record = report.public()
    assert (record["prompts"], record["identical"], record["tried"]) == (2, 2, True)
    assert [check["tried"] for check in record["checks"]] == [False, True]
    lines = words(report)
    assert lines[0].startswith("scripted drafted nothing")
    assert lines[1] == "all 2 texts are equal to plain decoding's, token by token"


def test_a_check_in_which_nothing_was_drafted_is_named() -> None:
    checks = [Check("ngram", "greedy", "greedy", 4, 4, drafted=9), Check("ngram", "greedy", "stop", 8, 8)]
    lines = words(Report(checks, complete=True, done=2, planned=2))
    assert lines[0].startswith("ngram drafted nothing in stop: it was not tested there")
    assert lines[1].startswith("all 4 texts")


def test_an_unfinished_run_says_how_far_it_came() -> None:
    report = Report([Check("ngram", "greedy", "greedy", 4, 3, ties=1, drafted=9, gaps=[1e-3])], done=1, planned=6)
    assert (
        words(report)[-1] == "stopped before the end, after 1 of 6 checks: 1 numerical tie so far, the rest is unknown"
    )
    assert not report.passed


def test_an_unfinished_run_with_a_difference_has_failed_and_says_so() -> None:
    report = Report([Check("ngram", "greedy", "greedy", 4, 3, differences=1, drafted=9)], done=1, planned=6)
    lines = words(report)
    assert lines[0] == "3 of 4 texts are equal to plain decoding's; 1 differs in a way that rounding does not explain"
    assert lines[-1].startswith("FAILED") and lines[-1].endswith("only 1 of 6 checks were run")


def test_gaps_have_their_range() -> None:
    check = Check("ngram", "greedy", "greedy", 4, 2, ties=2, drafted=9, gaps=[0.25, 0.5])
    assert "2 differ from a numerical tie on (logit gaps 0.25 to 0.5)" in words(Report([check], complete=True))[0]


class BreaksOff(Planted):
    def propose(self, context: Context, budget: Budget) -> TokenTree:
        raise KeyError(17)


def test_a_drafter_that_breaks_off_is_said_once_and_nothing_is_said_of_its_texts() -> None:
    report = report_on(models()[0], BreaksOff(), prompts=[[0, 1], [2]], modes=["greedy", "sampled"], samples=8)
    assert [check.broke_off for check in report.checks] == [True, True]
    assert words(report) == ["FAILED: a drafter failed"]
    (note,) = report.checks[0].notes
    assert note.endswith("raised KeyError: 17") and note.count("line ") == 1, "the drafter's line, and no other"
    cells = _cells(report.checks[0], samples=8)
    assert cells[:3] == ["model", report.checks[0].verifier, "greedy"] and set(cells[3:]) == {"-"}
    beside = report_on(models()[0], BreaksOff(), Planted(), prompts=[[0, 1], [2]])
    assert words(beside) == ["all 2 texts are equal to plain decoding's, token by token", "FAILED: a drafter failed"]


def test_a_difference_beside_a_drafter_that_broke_off_is_said_too() -> None:
    differs = Check("ngram", "greedy", "greedy", 4, 3, differences=1, drafted=9)
    broke = Check("model", "greedy", "greedy", 4, differences=4, broke_off=True)
    lines = words(Report([differs, broke], complete=True))
    assert lines[-1] == "FAILED: there is a difference that rounding does not explain, and a drafter failed"
    assert "3 of 4 texts" in lines[0]
