"""Workloads: which prompts are decoded, and what a run says."""

from __future__ import annotations

import pytest

from foretoken.engine.stats import SpecStats
from foretoken.lab.prompts import BenchPrompt
from foretoken.lab.timing import Stopwatch
from foretoken.lab.workload import Speed, Subject, Workload, fitting_prompts
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.other.table import TableModel


class Letters:
    """A token for every letter."""

    chat_template = None

    def __call__(self, text: str, **more: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


def test_prompts_are_spread_over_those_that_fit() -> None:
    texts = ["a" * length for length in (1, 30, 2, 3, 4, 5)]
    subject = Subject(TableModel.random(5, context_length=24), tokenizer=Letters())
    encoded = fitting_prompts(subject, [BenchPrompt("x", text) for text in texts], 16, 2)
    assert [len(ids) for ids in encoded] == [1, 3]
    with pytest.raises(ValueError, match="no prompt fits with 24 new tokens into a context of 24"):
        fitting_prompts(subject, [BenchPrompt("x", "a")], 24, 2)
    with pytest.raises(ValueError, match="has no tokenizer"):
        fitting_prompts(Subject(subject.target), [BenchPrompt("x", "a")], 4, 2)


def test_a_speed_is_that_of_all_prompts_together() -> None:
    """An arm that takes half of the time for two prompts of three, and twice the time for the longest, loses."""

    def stats(seconds: tuple[float, ...]) -> list[SpecStats]:
        each = [
            SpecStats(num_new_tokens=30, num_drafts=4, num_draft_tokens=8, total_s=0.5 + spent, prefill_s=0.5)
            for spent in seconds
        ]
        for answer, accepted in zip(each, (0, 2, 4), strict=True):
            answer.num_accepted_tokens = accepted
        return each

    arm, plain = Speed.over(stats((0.5, 0.5, 8.0))), Speed.over(stats((1.0, 1.0, 4.0)))
    assert arm == Speed(pytest.approx(90 / 9), 6 / 24, 1 + 6 / 12)
    assert arm.tokens_per_s / plain.tokens_per_s == pytest.approx(6 / 9)


def test_every_drafter_decodes_the_same_prompts() -> None:
    work = Workload(Subject(TableModel.random(5, seed=1)), [[1, 2, 1, 2], [3]], new_tokens=9)
    plain, drafted = work.speed(None), work.speed(NgramDrafter(n=1, k=2))
    assert plain.tokens_per_s > 0 and plain.mean_acceptance_length == 1.0
    assert drafted.tokens_per_s > 0 and drafted.mean_acceptance_length >= 1.0


def test_a_stopwatch_goes_on() -> None:
    watch = Stopwatch()
    first = watch.seconds
    assert 0 <= first <= watch.seconds
