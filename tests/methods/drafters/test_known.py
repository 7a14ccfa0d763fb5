"""Known tokens are drafted first: forced tokens, then a prediction, then the inner drafter's guess."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretoken.core import Budget, Context
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request, Running
from foretoken.engine.stats import SpecStats
from foretoken.loading import build_drafter, load_model
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models.other.table import TableModel
from toys import engine, serve, tables

PROMPT = [0, 1, 0]
T1 = SamplingParams(temperature=1.0)


class Forcing:
    """An even number of output tokens is followed by what the table says is possible; nothing is masked."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.asked = list(tokens), 0

    @property
    def processor(self) -> Any:
        return lambda ids, scores: scores

    ends: frozenset[int] = frozenset()

    def may_end(self, output: Sequence[int]) -> bool:
        return False

    def forced(self, output: Sequence[int]) -> list[int]:
        self.asked += 1
        return self.tokens[len(output) :]


class Reluctant(ConstantController):
    """Might draft, and never does."""

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(max_depth=0, max_nodes=0)


def finish(serving: Any, request: Request) -> Running:
    serving.add(request)
    last: Running | None = None
    while serving.busy:
        for run, _ in serving.step():
            last = run
    assert last is not None
    return last


def test_forced_tokens_are_drafted_even_where_the_controller_decodes_plainly() -> None:
    target, _ = tables()
    expected = finish(engine(target), Request(PROMPT, max_new_tokens=8)).output
    forcing = Forcing(expected)
    serving = engine(target, KnownDrafter(k=3), controller=Reluctant())
    run = finish(serving, Request(PROMPT, max_new_tokens=8, constraint=forcing))
    assert run.output == expected
    assert forcing.asked
    assert run.stats.num_accepted_tokens == run.stats.num_draft_tokens >= 5
    assert run.stats.num_drafts == 2  # three drafts and one token of the target's own, twice


def test_a_draft_cap_of_zero_is_plain_decoding() -> None:
    target, _ = tables()
    serving = engine(target, KnownDrafter(k=3))
    run = finish(serving, Request(PROMPT, max_new_tokens=6, prediction=[0, 1, 2], max_draft_tokens=0))
    assert run.stats.num_draft_tokens == 0 and run.stats.num_drafts == 6


@pytest.mark.parametrize("inner", [None, "ngram", "model"])
def test_a_prediction_is_counted_and_the_inner_guess_is_not(inner: str | None) -> None:
    target, draft = tables()
    members = {None: lambda: None, "ngram": NgramDrafter, "model": lambda: ModelDrafter(draft, k=2)}
    right = finish(engine(target), Request(PROMPT, max_new_tokens=9)).output
    run = finish(
        engine(target, KnownDrafter(members[inner](), k=4)), Request(PROMPT, max_new_tokens=9, prediction=right[:5])
    )
    assert run.output == right
    assert run.stats.num_accepted_prediction_tokens >= 4
    assert run.stats.num_prediction_tokens <= run.stats.num_draft_tokens
    other = finish(engine(target, KnownDrafter(members[inner](), k=4)), Request(PROMPT, max_new_tokens=9))
    assert other.stats.num_prediction_tokens == 0
    if inner != "ngram":  # which may find nothing to copy
        assert (other.stats.num_draft_tokens > 0) == (inner == "model")


def test_a_wrong_prediction_changes_nothing_but_the_counts() -> None:
    target, draft = tables()
    plain = finish(engine(target), Request(PROMPT, T1, 12, seed=3)).output
    wrong = finish(
        engine(target, KnownDrafter(ModelDrafter(draft))), Request(PROMPT, T1, 12, seed=3, prediction=[1] * 12)
    )
    assert wrong.output == plain


def answering(answer: Sequence[int]) -> TableModel:
    """A model that is sure of every token of an answer to ``PROMPT``."""
    return TableModel(lambda prefix: [float(token == answer[len(prefix) - len(PROMPT)]) for token in range(64)], 64)


def rounds(answer: Sequence[int], prediction: Sequence[int] | None, inner: Drafter | None) -> SpecStats:
    """The statistics of an answer, which must be the model's."""
    serving = engine(answering(answer), KnownDrafter(inner))
    run = finish(serving, Request(PROMPT, max_new_tokens=len(answer), prediction=prediction))
    assert run.output == list(answer)
    return run.stats


ANSWER = random.Random(0).choices(range(2, 40), k=96)


@pytest.mark.parametrize(
    "prediction",
    [
        [50] * 96,  # nothing in common
        [*ANSWER[:8], *[50] * 88],  # left after a while
        [ANSWER[i] if i % 5 == 0 else 50 for i in range(96)],  # a common word in every sentence is no agreement
    ],
    ids=["unrelated", "left", "common words"],
)
def test_the_inner_drafter_goes_on_where_the_answer_has_left_the_prediction(prediction: list[int]) -> None:
    inner = ScriptedDrafter(script=ANSWER, as_output=True)
    inner.max_depth = 2
    without = rounds(ANSWER, None, inner)
    assert without.num_drafts <= 33
    stats = rounds(ANSWER, prediction, inner)
    assert stats.num_drafts <= without.num_drafts + 5
    dead = stats.num_prediction_tokens - stats.num_accepted_prediction_tokens
    assert dead <= 5 * 8


def test_a_place_that_is_lost_is_found_again_from_the_tokens_of_other_drafts() -> None:
    """Thirty new tokens in the middle, written by the inner drafter or by the target alone."""
    answer = [*ANSWER[:40], *range(40, 60), *range(40, 50), *ANSWER[40:]]
    for inner, slow in ((None, 30), (ScriptedDrafter(script=answer, as_output=True), 30 / 9)):
        stats = rounds(answer, ANSWER, inner)
        assert stats.num_drafts <= slow + len(ANSWER) / 9 + 6
        assert stats.num_accepted_prediction_tokens >= 70


@pytest.mark.parametrize("inner", [None, "ngram"])
def test_a_change_in_one_place_keeps_the_speed_of_a_prediction(inner: str | None) -> None:
    for change, cost in (([], 1), ([50], 2), ([50, 51], 2), ([50, 51, 52], 5)):  # for two tokens
        answer = [*ANSWER[:40], *change, *ANSWER[42:]]
        stats = rounds(answer, ANSWER, None if inner is None else NgramDrafter())
        assert stats.num_drafts <= len(answer) / 9 + cost


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        KnownDrafter(k=0)


@pytest.mark.parametrize("inner", ["(ngram,n=2)", "(router,drafters=(ngram|suffix))", "(cascade,inner=(ngram,n=2))"])
def test_an_inner_spec_may_hold_brackets_of_its_own(inner: str) -> None:
    drafter = build_drafter(f"known,inner={inner}", load_model("builtin"))
    assert isinstance(drafter, KnownDrafter) and drafter.inner is not None
    assert drafter.inner.spec == inner[1:-1]


def test_the_longer_draft_of_another_member_is_whole() -> None:
    """A plan names a drafter, and another with a longer draft where the first one proposes nothing."""
    draft = tables()[1]
    drafter = KnownDrafter(RouterDrafter([NgramDrafter(), ModelDrafter(draft, k=6)]))
    (run,) = serve(engine(tables()[0], None), [Request([0, 1, 2], max_new_tokens=1)])
    context = replace(run.context, tokens=[3, 1, 2])  # nothing to copy
    budget = Budget(2, 64, member=0, otherwise=Budget(6, 64, member=1))
    drafter.start(context)
    (tree,) = drafter.propose_batch([context], [budget])
    assert tree.num_drafts == 6


@pytest.mark.parametrize("group", ["router", "ensemble"])
@pytest.mark.parametrize("member", ["prediction", "known", "(known,inner=(ngram,n=2))"])
def test_a_group_takes_no_member_whose_knowledge_it_would_hide(group: str, member: str) -> None:
    """Its predicted tokens were counted as none, and its forced ones waited for the controller."""
    target, _ = tables()
    with pytest.raises(ValueError, match=f"cannot be a member of '{group}'.*: use known,inner=\\({group},") as error:
        build_drafter(f"{group},drafters=({member}|ngram)", target, target_source=target)
    assert "\n" not in str(error.value)
    built = build_drafter(f"known,inner=({group},drafters=(suffix|ngram))", target, target_source=target)
    run = finish(engine(target, built), Request(PROMPT, max_new_tokens=8, prediction=[1, 0, 1, 0]))
    assert run.stats.num_prediction_tokens > 0
