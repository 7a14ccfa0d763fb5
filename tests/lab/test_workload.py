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


def test_a_speed_is_the_median_and_its_acceptance_that_of_all() -> None:
    stats = [
        SpecStats(num_new_tokens=tokens, num_drafts=4, num_draft_tokens=8, num_accepted_tokens=accepted, total_s=1.0)
        for tokens, accepted in ((5, 0), (7, 2), (30, 4))
    ]
    assert Speed.over(stats) == Speed(stats[1].tokens_per_s, 6 / 24, 1 + 6 / 12)


def test_every_drafter_decodes_the_same_prompts() -> None:
    work = Workload(Subject(TableModel.random(5, seed=1)), [[1, 2, 1, 2], [3]], new_tokens=9)
    plain, drafted = work.speed(None), work.speed(NgramDrafter(n=1, k=2))
    assert plain.tokens_per_s > 0 and plain.mean_acceptance_length == 1.0
    assert drafted.tokens_per_s > 0 and drafted.mean_acceptance_length >= 1.0


def test_a_stopwatch_goes_on() -> None:
    watch = Stopwatch()
    first = watch.seconds
    assert 0 <= first <= watch.seconds
