"""Known tokens are drafted first: forced tokens, then a prediction, then the inner drafter's guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.core import Budget, Context
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request, Running
from foretoken.loading import build_drafter, load_model
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from toys import engine, tables

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


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        KnownDrafter(k=0)


@pytest.mark.parametrize("inner", ["(ngram,n=2)", "(router,drafters=(ngram|suffix))", "(cascade,inner=(ngram,n=2))"])
def test_an_inner_spec_may_hold_brackets_of_its_own(inner: str) -> None:
    drafter = build_drafter(f"known,inner={inner}", load_model("builtin"))
    assert isinstance(drafter, KnownDrafter) and drafter.inner is not None
    assert drafter.inner.spec == inner[1:-1]
