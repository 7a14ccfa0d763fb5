"""Predicted outputs: following, losing and finding the place again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.loading import LoadingContext
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from toys import engine, llamas, outputs, serve, tables

PROMPT = [900, 901]


def follow(prediction: list[int], answer: list[int], k: int = 4) -> tuple[Context, PredictionDrafter]:
    """A request that has written ``answer`` after the prompt, token by token."""
    drafter = PredictionDrafter(k=k)
    context = Context(
        0, list(PROMPT), len(PROMPT), Sampler(SamplingParams(), len(PROMPT)), Rng(0), prediction=prediction
    )
    drafter.start(context)
    for token in answer:
        context.tokens.append(token)
        drafter.source(context)
    return context, drafter


def draft(prediction: list[int], answer: list[int], k: int = 4, **budget: Any) -> list[int]:
    context, drafter = follow(prediction, answer, k)
    return list(drafter.propose(context, Budget(**{"max_depth": 16, **budget})).tokens[1:])


def replay(prediction: list[int], answer: list[int], k: int = 8) -> SpecStats:
    """Rounds over an answer that is known: the text is the target."""
    context, drafter = follow(prediction, [], k)
    stats, position = SpecStats(), 0
    while position < len(answer):
        tree = drafter.propose(context, Budget(max_depth=min(k, len(answer) - position - 1)))
        accepted = 0
        while accepted < len(tree) - 1 and tree.tokens[accepted + 1] == answer[position + accepted]:
            accepted += 1
        stats.add_round(tree.num_drafts, accepted, accepted + 1)
        context.tokens.extend(answer[position : position + accepted + 1])
        position += accepted + 1
        drafter.source(context)
    return stats


TEXT = list(range(100, 160))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([], [100, 101, 102, 103]),  # from the beginning
        ([100, 101], [102, 103, 104, 105]),
        ([100, 101, 7], [103, 104, 105, 106]),  # one token replaced by one
        ([100, 101, 7, 103], [104, 105, 106, 107]),
        ([100, 101, 7, 8, 9, 103], [104, 105, 106, 107]),  # one replaced by three
        ([100, 101, 7, 102], [103, 104, 105, 106]),  # inserted
        ([100, 101, 104], [105, 106, 107, 108]),  # two left out
        ([100, 101, 150], [103, 104, 105, 106]),  # one token that far ahead is not believed ...
        ([100, 101, 150, 151], [152, 153, 154, 155]),  # ... two are
        ([100, 101, 102, 103, 104, 101, 102], [103, 104, 105, 106]),  # said again
        ([5, 6, 100], [101, 102, 103, 104]),  # a preamble
        (TEXT, []),  # used up
        (TEXT[:-2], TEXT[-2:]),
    ],
)
def test_where_the_prediction_goes_on(written: list[int], expected: list[int]) -> None:
    assert draft(TEXT, written) == expected


def test_the_nearest_of_equal_places_and_the_longest_match() -> None:
    text = [1, 2, 50, 1, 2, 51, 1, 2, 52, 1, 2, 53]
    assert draft(text, [1, 2, 50, 9, 1], k=2) == [2, 51]
    assert draft(text, [1, 2, 50, 9, 51, 1, 2], k=1) == [52]


def test_prompt_tokens_are_not_taken_for_the_answer() -> None:
    assert draft([7, 901, 8, 9], []) == [7, 901, 8, 9]
    assert draft([7, 901, 8, 9], [3, 8]) == [9]


def test_budget_and_no_prediction() -> None:
    assert draft(TEXT, [], max_depth=2) == [100, 101]
    default = PredictionDrafter(k=2, default=[8, 9])
    for own, expected in ((None, (2, 8, 9)), ([5], (2, 5)), ([], (2,))):
        context = Context(0, [1, 2], 2, Sampler(SamplingParams(), 2), Rng(0), prediction=own)
        assert default.propose(context, Budget()).tokens == expected
    assert draft(TEXT, [], k=8, max_nodes=3) == [100, 101, 102]
    context = Context(0, [1, 2], 2, Sampler(SamplingParams(), 2), Rng(0))
    assert len(PredictionDrafter().propose(context, Budget())) == 1
    for empty in ([], None):
        context = Context(0, [1, 2], 2, Sampler(SamplingParams(), 2), Rng(0), prediction=empty)
        assert len(PredictionDrafter().propose(context, Budget())) == 1


@pytest.mark.parametrize("seed", range(5))
def test_an_edited_text_costs_few_rounds_per_edit(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(300) for _ in range(400)]
    answer, edits = list(text), 10
    for i in sorted(rng.sample(range(20, 380), edits), reverse=True):
        change = rng.choice(["replace", "insert", "delete"])
        new = [1000 + rng.randrange(5) for _ in range(rng.randrange(1, 4))]
        answer[i : i + (0 if change == "insert" else rng.randrange(1, 4))] = [] if change == "delete" else new
    stats = replay(text, answer, k=8)
    assert stats.num_drafts <= len(answer) / 9 + 5.5 * edits
    assert replay(text, list(text)).mean_acceptance_length > 8.5
    unrelated = replay([500 + t for t in text], answer)
    assert unrelated.num_accepted_tokens == 0 and unrelated.num_drafts == len(answer)


def test_what_was_cut_off_is_no_doubt() -> None:
    """Rejected drafts of an outer drafter are taken back, and what they said of the place with them."""
    context, drafter = follow(TEXT, TEXT[:3])
    assert not drafter.is_left(context)
    for wrong in (7, 8, 9, 7):
        context.tokens.append(wrong)
        drafter.source(context)
    assert drafter.is_left(context)
    del context.tokens[-4:]
    drafter.rewind(context, len(context.tokens))
    assert not drafter.is_left(context)
    assert drafter.propose(context, Budget(max_depth=2)).tokens[1:] == (103, 104)


# -- through the engine ------------------------------------------------------------------------------------------------


def test_greedy_and_the_statistics() -> None:
    target, _ = llamas()
    prompt = [5, 6, 7]
    (plain,) = outputs(engine(target), [Request(prompt, max_new_tokens=40)])
    for prediction in (plain, [*plain[:10], 1, 1, *plain[12:]], [3] * 20, plain[5:], None):
        request = Request(prompt, max_new_tokens=40, prediction=prediction)
        (run,) = serve(engine(target, PredictionDrafter(k=7)), [request])
        assert run.output == plain
        stats = run.stats
        assert stats.num_prediction_tokens == stats.num_draft_tokens
        assert stats.num_accepted_prediction_tokens == stats.num_accepted_tokens
        if prediction is plain:
            assert stats.num_drafts == 5 and stats.num_accepted_prediction_tokens == 35
        if prediction is None:
            assert stats.num_prediction_tokens == 0


def test_other_drafters_count_no_prediction_tokens() -> None:
    target, _ = llamas()
    (run,) = serve(engine(target, NgramDrafter()), [Request([5, 6, 5, 6, 5], max_new_tokens=20, prediction=[1, 2])])
    assert run.stats.num_draft_tokens > 0
    assert run.stats.num_prediction_tokens == run.stats.num_accepted_prediction_tokens == 0


def test_sampled_with_a_seed_is_the_same_in_a_batch() -> None:
    target, _ = tables()
    requests = [
        Request([0, 1], SamplingParams(temperature=1.0), 12, seed=seed, prediction=[1, 2, 3, 0] * 4)
        for seed in range(5)
    ]
    together, alone = (outputs(engine(target, PredictionDrafter(k=3), max_batch=size), requests) for size in (4, 1))
    assert together == alone


def test_bad_input() -> None:
    target, _ = tables()
    context = LoadingContext(target, "")
    with pytest.raises(ValueError, match="k >= 1"):
        PredictionDrafter(k=0)
    with pytest.raises(ValueError, match="takes no path"):
        PredictionDrafter.build("file", context)
    drafter = PredictionDrafter.build(None, context, k=3)
    for token in (4, -1):
        running = engine(target, drafter)
        with pytest.raises(ValueError, match=f"prediction token {token} is outside the vocabulary of 4"):
            outputs(running, [Request([0, 1], prediction=[1, token])])
        assert not running.busy
