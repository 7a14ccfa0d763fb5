"""Identities that the counts and times of a run obey."""

from __future__ import annotations

import json

import pytest

from foretoken.core import Context, StepRecord
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request, Running
from foretoken.engine.stats import SpecStats
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models.base import Refusal
from toys import engine, serve, tables


def some_runs(drafter: str, eos: frozenset[int] = frozenset()) -> list[Running]:
    target, draft = tables(eos_token_ids=eos)
    built: Drafter | None = {
        "none": lambda: None,
        "chain": lambda: ModelDrafter(draft, k=4),
        "tree": lambda: ModelDrafter(draft, tree="3x2"),
        "ngram": NgramDrafter,
        "empty": ScriptedDrafter,
    }[drafter]()
    requests = [Request([0, 1, 2, 3, 0], SamplingParams(temperature=i % 2), 25, seed=i) for i in range(6)]
    return serve(engine(target, built, max_batch=3), requests)


each = pytest.mark.parametrize("drafter", ["none", "chain", "tree", "ngram", "empty"])


@each
def test_every_round_gives_one_token_and_the_accepted_ones(drafter: str) -> None:
    for run in some_runs(drafter):
        stats = run.stats
        assert stats.num_new_tokens == len(run.output) == len(run.origins) == 25
        assert stats.num_new_tokens == stats.num_drafts + stats.num_accepted_tokens
        assert stats.num_accepted_tokens == run.origins.count("accepted")
        assert stats.num_drafts == 25 - run.origins.count("accepted")
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.mean_acceptance_length == pytest.approx(25 / stats.num_drafts)


@each
def test_positions_add_up(drafter: str) -> None:
    for run in some_runs(drafter):
        positions = run.stats.num_accepted_tokens_per_pos
        assert sum(positions) == run.stats.num_accepted_tokens
        assert positions == sorted(positions, reverse=True)
        assert all(0 < count <= run.stats.num_drafts for count in positions)


def test_tokens_behind_an_eos_do_not_count() -> None:
    """At most the bonus token of the last round is missing."""
    runs = some_runs("chain", eos=frozenset({2}))
    assert any(run.finish_reason == "eos" and run.origins[-1] == "accepted" for run in runs)
    for run in runs:
        cut = run.stats.num_drafts + run.stats.num_accepted_tokens - run.stats.num_new_tokens
        assert cut == (run.origins[-1] == "accepted")
        assert run.stats.num_accepted_tokens == run.origins.count("accepted")
        assert run.stats.num_new_tokens == len(run.output) == len(run.origins)


def test_the_controller_is_told_of_right_drafts_behind_an_eos() -> None:
    class Watching(ConstantController):
        def observe(self, context: Context, record: StepRecord) -> None:
            records.append(record.num_accepted_tokens)

    target, _ = tables()
    plain = serve(engine(target), [Request([0, 1, 2, 3, 0], SamplingParams(1.0), 25, seed=1)])[0].output
    target, _ = tables(eos_token_ids=frozenset({plain[2]}))
    end = plain.index(plain[2]) + 1
    records: list[int] = []
    right = engine(target, PredictionDrafter(k=12), controller=Watching(k=12))
    (run,) = serve(right, [Request([0, 1, 2, 3, 0], SamplingParams(1.0), 25, seed=1, prediction=plain)])
    assert run.output == plain[:end] and run.finish_reason == "eos" and records == [12]
    assert (run.stats.num_accepted_tokens, run.stats.num_accepted_tokens_per_pos) == (end, [1] * end)
    assert run.stats.num_accepted_prediction_tokens == run.stats.num_accepted_prediction_places == end


def test_a_round_that_is_cut_later_counts_as_one_that_was_cut_at_once() -> None:
    origins = ["accepted", "accepted", "accepted", "bonus"]
    for kept in range(1, 5):
        late, at_once = SpecStats(), SpecStats()
        for stats in (late, at_once):
            stats.add_round(3, 1, 2)
        late.add_round(3, 3, 4)
        late.cut_round(origins, kept)
        at_once.add_round(3, min(3, kept), kept)
        assert late == at_once


def test_a_plain_run_drafts_nothing() -> None:
    for drafter in ("none", "empty"):
        for run in some_runs(drafter):
            assert (run.stats.num_draft_tokens, run.stats.acceptance_rate, run.stats.mean_acceptance_length) == (
                0,
                0,
                1,
            )
            assert run.stats.num_accepted_tokens_per_pos == []


@each
def test_times_are_not_negative_and_add_up(drafter: str) -> None:
    for run in some_runs(drafter):
        stats = run.stats
        parts = (stats.draft_s, stats.target_s, stats.verify_s, stats.overhead_s, stats.prefill_s)
        assert all(part > -1e-9 for part in parts)
        assert sum(parts) == pytest.approx(stats.total_s)
        assert stats.tokens_per_s == pytest.approx(25 / (stats.total_s - stats.prefill_s))


def test_ratios_of_an_empty_run() -> None:
    stats = SpecStats()
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.tokens_per_s) == (0.0, 0.0, 0.0)


def test_merging_adds_everything() -> None:
    whole = SpecStats()
    runs = [*some_runs("chain"), *some_runs("tree")]
    for run in runs:
        whole.merge(run.stats)
    assert whole.num_new_tokens == 25 * len(runs) == whole.num_drafts + whole.num_accepted_tokens
    assert sum(whole.num_accepted_tokens_per_pos) == whole.num_accepted_tokens
    assert whole.total_s == pytest.approx(sum(run.stats.total_s for run in runs))
    longest = max(len(run.stats.num_accepted_tokens_per_pos) for run in runs)
    assert len(whole.num_accepted_tokens_per_pos) == longest


def test_a_dictionary_has_the_names_of_the_contract() -> None:
    stats = some_runs("chain")[0].stats.as_dict()
    names = {
        "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "acceptance_rate",
        "mean_acceptance_length", "draft_s", "target_s", "verify_s", "overhead_s", "prefill_s", "total_s",
        "tokens_per_s",
    }  # fmt: skip
    assert names <= set(stats)
    assert stats["acceptance_rate"] == pytest.approx(stats["num_accepted_tokens"] / stats["num_draft_tokens"])


def test_a_request_says_how_its_target_ran_and_what_it_was_refused() -> None:
    target, draft = tables()
    target.exactness = "bitwise"
    target.refused = (Refusal("lean forward", "it is off", "half the speed"),)
    run = serve(engine(target, ModelDrafter(draft, k=2)), [Request([0, 1], SamplingParams(), 4)])[0]
    assert (run.stats.forward, run.stats.exactness) == ("table", "bitwise")
    assert run.stats.refused == ("lean forward: refused, it is off; half the speed",)
    assert json.loads(json.dumps(run.stats.as_dict()))["refused"] == list(run.stats.refused)
    whole = SpecStats()
    whole.merge(run.stats)
    whole.merge(SpecStats())
    assert (whole.forward, whole.exactness, whole.refused) == ("table", "bitwise", run.stats.refused)
