"""Traces of rounds: what was proposed, what both models say of it, what was accepted, and that it adds up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request, Running
from foretoken.engine.trace import RoundTrace
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.other.table import TableModel
from foretoken.registry import make
from toys import engine, outputs, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SamplingParams(temperature=1.0)
DRAFTERS: dict[str, Callable[[TableModel], Drafter | None]] = {
    "none": lambda draft: None,
    "ngram": lambda draft: NgramDrafter(n=2, k=3),
    "chain": lambda draft: ModelDrafter(draft, k=3),
    "tree": lambda draft: ModelDrafter(draft, tree="2x2x1"),
    "probes": lambda draft: LookaheadDrafter(w=3, n=3, g=2),
    "ensemble": lambda draft: EnsembleDrafter([ModelDrafter(draft, k=2), NgramDrafter(n=2, k=3)]),
}
each_drafter = pytest.mark.parametrize("name", list(DRAFTERS))
each_mode = pytest.mark.parametrize(
    ("params", "seed"),
    [(SamplingParams(), None), (T1, 4), (SamplingParams(1.0, top_k=2), 4)],
    ids=["greedy", "T1", "top2"],
)


def explained(name: str, params: SamplingParams, seed: int | None) -> tuple[Running, TableModel, TableModel]:
    target, draft = tables()
    runner = engine(target, DRAFTERS[name](draft))
    (run,) = serve(runner, [Request(PROMPT, params, 25, seed=seed, explain=True)])
    return run, target, draft


def written(trace: RoundTrace) -> list[int]:
    return [*(trace.tokens[node] for node in trace.accepted), trace.next_token]


def path(trace: RoundTrace, node: int) -> list[int]:
    """Tokens from the first draft down to a node."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(trace.tokens[node])
        node = trace.parents[node]
    return tokens[::-1]


@each_drafter
@each_mode
def test_rounds_spell_the_output(name: str, params: SamplingParams, seed: int | None) -> None:
    run, *_ = explained(name, params, seed)
    assert [trace.index for trace in run.rounds] == list(range(run.stats.num_drafts))
    tokens = [token for trace in run.rounds for token in written(trace)]
    assert tokens[: len(run.output)] == run.output and len(tokens) - len(run.output) <= len(run.rounds[-1].accepted)
    root = PROMPT[-1]
    for trace in run.rounds:
        assert trace.tokens[0] == root and trace.parents[0] == -1 and trace.p[0] is None and trace.q[0] is None
        assert len(trace.tokens) == len(trace.parents) == len(trace.p) == len(trace.q)
        above = 0
        for node in trace.accepted:
            assert trace.parents[node] == above
            above = node
        leaf = above not in trace.parents
        assert trace.next_is_bonus == leaf or name == "probes"
        root = trace.next_token
        if name != "probes":  # there a tree may be of probes alone, which nobody guessed
            assert trace.drafter == ("none" if len(trace.tokens) == 1 else run_name(name))
    plain, _ = tables()
    assert run.output == outputs(engine(plain), [Request(PROMPT, params, 25, seed=seed)])[0]


def run_name(name: str) -> str:
    drafter = DRAFTERS[name](tables()[1])
    return "none" if drafter is None else drafter.name


@each_drafter
@each_mode
def test_probabilities_are_those_of_the_target(name: str, params: SamplingParams, seed: int | None) -> None:
    """The probabilities are those of the request's own sampling, given the nodes above."""
    run, target, _ = explained(name, params, seed)
    text = list(PROMPT)
    sampler = Sampler(params, len(PROMPT))
    for trace in run.rounds:
        for node in range(1, len(trace.tokens)):
            probability = trace.p[node]
            if probability is None:
                continue
            above = [*text, *path(trace, trace.parents[node])]
            distribution = sampler.distribution(target.distribution(above).log(), above)
            assert probability == pytest.approx(float(distribution[trace.tokens[node]]), abs=1e-9)
        text += written(trace)


def test_draft_probabilities_are_those_that_were_drawn_from() -> None:
    torch.manual_seed(0)  # which requests without a seed draw from: how much is accepted must not depend on other tests
    run, _, draft = explained("chain", T1, None)
    text, seen = list(PROMPT), 0
    for trace in run.rounds:
        for node in range(1, len(trace.tokens)):
            probability = trace.q[node]
            expected = float(draft.distribution([*text, *path(trace, trace.parents[node])])[trace.tokens[node]])
            assert probability == pytest.approx(expected, abs=1e-9)
            seen += 1
        text += written(trace)
    assert seen > 20


def test_guesses_that_nobody_drew_have_no_draft_probability() -> None:
    run, *_ = explained("ngram", T1, None)
    assert sum(len(trace.tokens) > 1 for trace in run.rounds) > 2
    assert all(value is None for trace in run.rounds for value in trace.q)


def test_below_a_token_that_cannot_be_there_is_no_probability() -> None:
    run, *_ = explained("tree", SamplingParams(), None)
    below = [
        (trace, node)
        for trace in run.rounds
        for node in range(1, len(trace.tokens))
        if trace.parents[node] > 0 and trace.p[trace.parents[node]] in (0.0, None)
    ]
    assert below and all(trace.p[node] is None for trace, node in below)


@each_drafter
def test_times_add_up_and_all_of_it_is_json(name: str) -> None:
    run, *_ = explained(name, T1, 1)
    for trace in run.rounds:
        times = (trace.draft_s, trace.target_s, trace.verify_s)
        assert all(math.isfinite(time) and time >= 0 for time in times) and trace.target_s > 0
        assert RoundTrace(**json.loads(json.dumps(trace.as_dict()))) == trace
    rounds_s = run.stats.total_s - run.stats.prefill_s
    sum_s = sum(t.draft_s + t.target_s + t.verify_s + t.overhead_s for t in run.rounds)
    assert sum_s == pytest.approx(rounds_s, rel=1e-6)


@each_drafter
def test_explaining_changes_nothing_and_is_off_by_default(name: str) -> None:
    for params, seed in ((SamplingParams(), None), (T1, 4)):
        run, *_ = explained(name, params, seed)
        target, draft = tables()
        (silent,) = serve(engine(target, DRAFTERS[name](draft)), [Request(PROMPT, params, 25, seed=seed)])
        assert silent.output == run.output and silent.rounds == []


def test_unseeded_sampling_draws_the_same_with_and_without_a_trace() -> None:
    """Looking at probabilities takes no randomness."""
    texts = []
    for explain in (False, True):
        torch.manual_seed(5)
        target, draft = tables()
        requests = [Request(PROMPT, T1, 30, explain=explain) for _ in range(4)]
        texts.append(outputs(engine(target, ModelDrafter(draft, tree="2x2x1")), requests))
    assert texts[0] == texts[1]


def test_every_emission_brings_its_round() -> None:
    target, draft = tables()
    runner = engine(target, ModelDrafter(draft, k=3))
    runner.add(Request(PROMPT, max_new_tokens=20, explain=True))
    (run,) = runner.requests.waiting
    traces: list[RoundTrace] = []
    while runner.busy:
        ((_, emission),) = runner.step()
        (trace,) = emission.rounds
        assert written(trace)[: len(emission.token_ids)] == emission.token_ids
        traces.append(trace)
    assert traces == run.rounds


RULES = ["rejection", "block", "multi_round", "without_replacement", "kseq", "traversal", "point"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batch"])
def test_the_tests_of_a_rule_are_those_that_decided(rule: str, alone: bool) -> None:
    """No test is missing, and those of rejection sampling compare p and q of their nodes."""
    target, draft = tables()
    drafter = NgramDrafter(n=2, k=3) if rule == "point" else ModelDrafter(draft, k=3)
    if rule in ("multi_round", "kseq", "traversal"):
        drafter = ModelDrafter(draft, tree="2x2x1", draw="iid")
    if rule == "without_replacement":
        drafter = ModelDrafter(draft, tree="2x2x1")
    runner = engine(target, drafter, make("verifier", rule))
    requests = [Request(PROMPT, T1, 25, explain=True) for _ in range(1 if alone else 3)]
    rounds = [trace for run in serve(runner, requests) for trace in run.rounds if len(trace.tokens) > 1]
    assert {trace.verifier for trace in rounds} == {rule}
    assert all(trace.tests for trace in rounds)
    assert {test["u"] < test["chance"] for trace in rounds for test in trace.tests} == {True, False}
    if rule == "rejection":
        for trace in rounds:
            assert [test["u"] < test["chance"] for test in trace.tests].count(True) == len(trace.accepted)
            for test, node in zip(trace.tests, range(1, len(trace.tokens)), strict=False):
                p, q = trace.p[node], trace.q[node]
                assert p is not None and q is not None and test["chance"] == pytest.approx(min(1.0, p / q))


def test_a_trace_changes_nothing_and_names_what_the_target_thought_of_the_next_token() -> None:
    seen = []
    for explain in (True, False):
        target, draft = tables()
        runner = engine(target, ModelDrafter(draft, k=3), make("verifier", "rejection"))
        (run,) = serve(runner, [Request(PROMPT, T1, 25, seed=4, explain=explain)])
        seen.append(run.output)
        assert all(trace.next_p is not None and 0 < trace.next_p <= 1 for trace in run.rounds)
    assert seen[0] == seen[1]


def test_greedy_rounds_have_no_tests() -> None:
    run, *_ = explained("chain", SamplingParams(), None)
    assert all(trace.tests == [] and trace.verifier == "greedy" for trace in run.rounds)
