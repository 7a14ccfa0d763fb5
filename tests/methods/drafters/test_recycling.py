"""Token Recycling: the table, the tree and its template."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core import Budget, Context, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.recycling import PRIOR, FollowerTable, RecyclingDrafter, Statistics, Template
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.match import MatchVerifier
from toys import FALSE_ALARM, engine, joint_distribution, llamas, outputs, sampled_p_value, tables

WIDE = Budget(max_depth=6, max_nodes=80)


def context(tokens: list[int]) -> Context:
    return Context(0, tokens, len(tokens), Sampler(SamplingParams(), len(tokens)), Rng(0))


def shown(drafter: RecyclingDrafter, request: Context, tree: TokenTree, logits: torch.Tensor, verdict: Verdict) -> None:
    drafter.observe(request, tree, Scores(logits, tree, request.tokens, request.sampler), verdict)


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}


# -- the template ------------------------------------------------------------------------------------------------------


def test_the_default_template_is_near_the_published_tree() -> None:
    levels = Template.best(PRIOR, 80, 6).levels(6, 80)
    counts = [len(level) for level in levels]
    assert sum(counts) == 80
    assert max(abs(a - b) for a, b in zip(counts, (8, 21, 25, 15, 8, 3), strict=True)) <= 1


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_no_tree_of_that_size_expects_more(nodes: int) -> None:
    probabilities = (0.6, 0.3, 0.05)
    template = Template.best(probabilities, nodes, depth=3)
    every = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
    best = 0.0
    for chosen in itertools.combinations(every, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, sum(float(np.prod([probabilities[r] for r in path])) for path in chosen))
    assert sum(template.scores) == pytest.approx(best)
    assert list(template.scores) == sorted(template.scores, reverse=True)


def test_statistics_shape_the_template() -> None:
    drafter = RecyclingDrafter(nodes=12, depth=12)
    before = [len(level) for level in drafter.tenants.of("").template.levels(12, 12)]
    for i in range(2000):
        drafter.tenants.of("").statistics.add([10, 11, 12], 10 if i % 20 else 11)  # rank 0 is nearly always right
    drafter.tenants.of("").reshape(drafter.max_nodes, drafter.max_depth)
    after = [len(level) for level in drafter.tenants.of("").template.levels(12, 12)]
    assert after[0] < before[0] and len(after) > len(before)
    probabilities = drafter.tenants.of("").statistics.probabilities()
    assert probabilities[0] == pytest.approx(0.94, abs=0.01) and probabilities == sorted(probabilities, reverse=True)


def test_statistics_count_only_what_was_tried() -> None:
    statistics = Statistics()
    statistics.add([5, 6], 6)
    statistics.add([5], 5)
    statistics.add([], 5)
    assert statistics.tried[:3] == [2, 1, 0] and statistics.hits[:3] == [1, 1, 0]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_node_is_learnt_and_the_last_of_equal_tokens_counts() -> None:
    drafter = RecyclingDrafter(nodes=8, depth=2)
    request = context([7])
    tree = TokenTree((7, 3, 9, 3), (-1, 0, 0, 2))  # 3 is rejected twice
    logits = torch.zeros(4, 20, dtype=torch.float64)
    for node, ranking in enumerate(([1, 2], [4, 5], [6, 8], [10, 11])):
        logits[node, ranking] = torch.tensor([5.0, 4.0], dtype=torch.float64)
    shown(drafter, request, tree, logits, Verdict((), 1, False))
    rows = drafter.learned(request).followers.rows
    assert rows[7, :2].tolist() == [1, 2] and rows[9, :2].tolist() == [6, 8]
    assert rows[3, :2].tolist() == [10, 11]
    assert (rows[7] >= 0).all() and (rows[1] == -1).all()


def test_the_tree_follows_followers() -> None:
    drafter = RecyclingDrafter(nodes=6, depth=3)
    table = drafter.learned(context([1])).followers
    table.update([1, 2, 4], np.array([[2, 3], [4, 0], [1, 2]], np.int32))
    tree = drafter.propose(context([1]), WIDE)
    assert {(2,), (3,), (2, 4), (2, 0), (2, 4, 1)} <= paths(tree)
    assert (3, 0) not in paths(tree)  # nothing is known about 3: no guess of token 0


def test_unknown_tokens_give_no_draft() -> None:
    drafter = RecyclingDrafter()
    assert len(drafter.propose(context([999]), WIDE)) == 1
    drafter.start(context([0]))
    assert len(drafter.propose(context([0]), WIDE)) == 1


def test_the_prompt_fills_empty_rows_only() -> None:
    table = FollowerTable()
    table.update([1], np.array([[9, 8]], np.int32))
    table.read([1, 2, 3, 2, 4, 2, 3])
    assert table.rows[1, :3].tolist() == [9, 8, -1]
    assert table.rows[2, :3].tolist() == [3, 4, -1]  # the most recent first, each once
    assert table.rows[3, :2].tolist() == [2, -1]


def test_budget() -> None:
    drafter = RecyclingDrafter()
    rng = random.Random(0)
    rows = np.array([rng.sample(range(50), 8) for _ in range(50)], np.int32)
    drafter.learned(context([1])).followers.update(list(range(50)), rows)
    assert drafter.propose(context([1]), WIDE).num_drafts == 80
    whole = paths(drafter.propose(context([1]), WIDE))
    small = drafter.propose(context([1]), Budget(max_depth=2, max_nodes=12))
    assert small.num_drafts <= 12 and max(small.depths) <= 2 and paths(small) <= whole
    for node in range(len(small)):
        siblings = [small.tokens[child] for child in small.children[node]]
        assert len(siblings) == len(set(siblings))


def test_the_table_outlives_a_request_only_when_shared() -> None:
    for share in (True, False):
        drafter = RecyclingDrafter(share=share)
        request = context([1, 2, 3])
        drafter.start(request)
        drafter.finish(request)
        assert (drafter.propose(context([1]), WIDE).num_drafts > 0) is share
        assert not request.state and drafter.traits.shares_state is share


def test_the_shape_outlives_a_request_only_when_shared() -> None:
    target, _ = llamas()
    for share in (True, False):
        drafter = RecyclingDrafter(nodes=20, adapt=1, share=share)
        first = drafter.tenants.of("").template
        outputs(engine(target, drafter), [Request([5, 6, 7], max_new_tokens=20)])
        assert (drafter.tenants.of("").template != first) is share
        assert bool(sum(drafter.tenants.of("").statistics.tried)) is share


@pytest.mark.parametrize("options", [{"nodes": 0}, {"depth": 0}, {"adapt": -1}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="recycling needs"):
        RecyclingDrafter(**options)


# -- exactness with a table that requests share ------------------------------------------------------------------------


def test_greedy_with_a_shared_table_that_reshapes() -> None:
    target, _ = llamas()
    requests = [Request(p, max_new_tokens=30) for p in ([5, 6, 7], [3], [0, 0], [5, 6, 7], [5, 6, 7, 8], [3])]
    drafter = RecyclingDrafter(nodes=20, adapt=5)
    default = drafter.tenants.of("").template
    speculative = engine(target, drafter, max_batch=2)
    assert outputs(speculative, requests) == outputs(engine(target), requests)
    assert drafter.tenants.of("").template != default and sum(drafter.tenants.of("").statistics.hits) > 0


def test_sampled_distribution_with_a_shared_table() -> None:
    target, _ = tables()
    modes = {"T=1": SamplingParams(temperature=1.0)}
    prompt = [0, 1, 2, 3, 0, 1]
    distributions = {mode: joint_distribution(target, params, prompt, 3) for mode, params in modes.items()}
    speculative = engine(target, RecyclingDrafter(nodes=5), max_batch=4)
    assert sampled_p_value(speculative, modes, distributions, prompt, 3, 400) > FALSE_ALARM


@pytest.mark.parametrize("rule", [None, MatchVerifier()], ids=["auto", "match"])
def test_a_seed_fixes_the_output_whatever_was_shared(rule: Verifier | None) -> None:
    target, _ = tables()
    requests = [Request([0, 1, 2, 0, 1], SamplingParams(temperature=1.0), 12, seed=seed) for seed in range(6)]
    plain = outputs(engine(target, verifier=rule), requests)
    for size in (1, 4):
        speculative = engine(target, RecyclingDrafter(nodes=6), rule, max_batch=size)
        assert outputs(speculative, requests) == plain
        assert outputs(speculative, requests[::-1]) == plain[::-1]  # by now it has learnt these texts
