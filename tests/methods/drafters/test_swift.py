"""SWIFT: the search for a set, how a set is measured, and the shape of its trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretoken.core import Budget, Kind, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.drafters.skip_search import SkipSearch, posterior
from foretoken.methods.drafters.skip_sets import SkipSet
from foretoken.methods.drafters.swift import SwiftDrafter, num_children
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.point import PointVerifier
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from models.checkpoints import new_model, prompt_of
from toys import FALSE_ALARM, engine, joint_distribution, llamas, outputs, sampled_p_value, serve, tables

LAYERS = 6
PROMPT = prompt_of(9)
T1 = SamplingParams(temperature=1.0)


def model(**changes: Any) -> HuggingFaceModel:
    return HuggingFaceModel(new_model("llama", **{"num_hidden_layers": LAYERS, **changes}).double())


# -- the search ------------------------------------------------------------------------------------------------------


def test_candidates_have_the_given_size_and_keep_the_ends() -> None:
    search = SkipSearch(8)
    assert search.candidate() == SkipSet.odd(8)
    search.record(search.candidate(), 0.1)
    for _ in range(60):
        skips = search.candidate()
        assert len(skips.attention) + len(skips.mlp) == 7  # .45 of 16
        assert not {0, 7} & (skips.attention | skips.mlp)
        search.record(skips, 0.05)
    assert search.best == SkipSet.odd(8) and search.best_score == 0.1


def test_the_better_set_stays() -> None:
    search = SkipSearch(8)
    for score in (0.3, 0.2, 0.5, 0.5, 0.4):
        candidate = search.candidate()
        search.record(candidate, score)
        if score == 0.5 and search.stale == 0:
            best = candidate
    assert search.best == best and search.best_score == 0.5 and search.stale == 2


def test_when_the_search_ends() -> None:
    good, dull = SkipSearch(8, goal=0.9), SkipSearch(8)
    good.record(good.candidate(), 0.9)
    assert not good.done
    good.record(good.candidate(), 0.91)
    assert good.done
    while not dull.done:
        dull.record(dull.candidate(), 0.5)
    assert dull.measured == 1 + dull.patience
    assert SkipSearch(8, ratio=0.0).done


def test_it_ends_after_the_most_measurements() -> None:
    search, scores = SkipSearch(8, most=40), 0
    while not search.done:
        search.record(search.candidate(), scores / 1000)
        scores += 1
    assert search.measured == 40


def test_the_same_scores_give_the_same_search() -> None:
    first, second = SkipSearch(10), SkipSearch(10)
    for i in range(60):
        candidate = first.candidate()
        assert candidate == second.candidate()
        for search in (first, second):
            search.record(candidate, (i * 7 % 11) / 20)


def test_suggestions_use_what_was_seen() -> None:
    """When the score is the share of a hidden set that was hit, suggested sets beat random ones clearly."""
    hidden = SkipSet(frozenset(range(1, 6)), frozenset(range(1, 6)))

    def score(skips: SkipSet) -> float:
        return (len(skips.attention & hidden.attention) + len(skips.mlp & hidden.mlp)) / 20

    search = SkipSearch(12)
    suggested, drawn = [], []
    for i in range(251):
        candidate = search.candidate()
        (suggested if i and i % 25 == 0 else drawn).append(score(candidate))
        search.record(candidate, score(candidate))
    assert len(suggested) == 10
    assert np.mean(suggested) > np.mean(drawn) + 2 * np.std(drawn) / 10**0.5
    assert search.best_score == max(suggested + drawn)


def test_the_posterior_knows_what_it_saw() -> None:
    rng = np.random.default_rng(1)
    x = rng.random((12, 16)) < 0.5
    y = rng.random(12)
    mean, deviation = posterior(x, y, np.concatenate([x[:3], ~x[:3]]))
    assert mean[:3] == pytest.approx(y[:3], abs=0.05)
    assert (deviation[:3] < 0.15 * y.std()).all() and (deviation[3:] > 3 * deviation[:3]).all()
    flat, _ = posterior(x, np.full(12, 0.25), x)
    assert flat == pytest.approx(0.25)


# -- measuring -------------------------------------------------------------------------------------------------------


def test_the_whole_model_predicts_its_own_greedy_text() -> None:
    target = model()
    drafter = SwiftDrafter(target, window=8)
    speculative = engine(target, drafter)
    speculative.add(Request(PROMPT, max_new_tokens=40, ignore_eos=True))
    while len(speculative.requests.running[0].output if speculative.requests.running else ()) < 12:
        speculative.step()
    (run,) = speculative.requests.running
    assert drafter.matchness(run.context, SkipSet()) == 1.0
    skips = SkipSet(frozenset({2}), frozenset({2, 3}))
    measured = drafter.matchness(run.context, skips)
    assert not run.sequence.scratch_tokens and run.sequence.tokens == run.context.tokens[:-1]
    # The same from a cache of its own that ends where the window begins.
    tokens = run.context.tokens
    other = target.open()
    target.prefill(other, tokens[:-9])
    rows = target.forward_part([Feed(other, tokens[-9:-1])], skips.plan)[0]
    target.release(other)
    hits = [int(a) == b for a, b in zip(rows.logits.argmax(-1), tokens[-8:], strict=True)]
    assert measured == sum(hits) / 8 and 0 < measured < 1


@pytest.mark.parametrize("share", [True, False])
def test_requests_take_part_in_one_search_or_have_their_own(share: bool) -> None:
    target = model()
    drafter = SwiftDrafter(target, window=4, share=share, k=3)
    speculative = engine(target, drafter)
    requests = [Request(prompt_of(5, seed=i), max_new_tokens=30, ignore_eos=True) for i in range(2)]
    plain = outputs(engine(target), requests)
    for request in requests:
        speculative.add(request)
    for _ in range(12):
        speculative.step()
    searches = [drafter.search(run.context) for run in speculative.requests.running]
    assert len(searches) == 2 and (searches[0] is searches[1]) is share
    assert all(search.measured > 2 for search in searches)
    assert outputs(engine(target, drafter), requests) == plain
    assert (drafter.tenants.of("").measured > 12) is share


def test_measurements_can_be_spread_over_rounds() -> None:
    target, counts = model(), []
    for every in (1, 4):
        drafter = SwiftDrafter(target, window=4, every=every)
        (run,) = serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=40, ignore_eos=True)])
        counts.append(drafter.tenants.of("").measured)
        assert 0 < counts[-1] <= run.stats.num_drafts // every
    assert counts[0] >= 3 * counts[1]


# -- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "greedy", "sampled"),
    [(0.99, 3, 1), (0.951, 3, 1), (0.95, 5, 3), (0.81, 5, 3), (0.8, 8, 5), (0.51, 8, 5), (0.5, 10, 10), (0.01, 10, 10)],
)
def test_published_widths(confidence: float, greedy: int, sampled: int) -> None:
    assert (num_children(confidence, True), num_children(confidence, False)) == (greedy, sampled)


def proposed(drafter: SwiftDrafter, params: SamplingParams, *budgets: Budget) -> list[TokenTree]:
    """Trees for one text under several budgets."""
    speculative = engine(drafter.model, drafter)
    speculative.add(Request(PROMPT, params, 60, seed=0, ignore_eos=True))
    speculative.step()
    (run,) = speculative.requests.running
    trees = []
    for budget in budgets:
        trees.append(drafter.propose(run.context, budget))
        drafter.model.commit(run.sequence, ())
    speculative.close()
    return trees


@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "sampled"])
def test_a_chain_with_siblings(params: SamplingParams) -> None:
    drafter = SwiftDrafter(model(), k=6, threshold=0.0, share=False)
    (tree,) = proposed(drafter, params, Budget(6, 64))
    assert tree.kind is Kind.POINT and drafter.traits.kind is Kind.POINT and drafter.traits.draws_trees
    assert tree.depths[:7] == (0, 1, 2, 3, 4, 5, 6)  # the chain first
    assert max(tree.depths) == 6 and tree.num_drafts <= 64
    for node in range(len(tree)):
        children = [tree.tokens[child] for child in tree.children[node]]
        assert len(set(children)) == len(children) <= 10
        assert not children or node < 6  # siblings are leaves
    assert any(len(tree.children[node]) > 1 for node in range(6))


def test_the_chain_ends_after_an_unsure_token() -> None:
    sure, unsure = (SwiftDrafter(model(), k=6, threshold=t, share=False) for t in (0.0, 1.0))
    (long,), (short,) = (proposed(d, SamplingParams(), Budget(6, 64)) for d in (sure, unsure))
    assert (max(long.depths), max(short.depths)) == (6, 1)
    assert len(short.children[0]) > 1


def test_the_chain_comes_before_siblings() -> None:
    drafter = SwiftDrafter(model(), k=6, threshold=0.0, share=False)
    trees = proposed(drafter, T1, Budget(6, 3), Budget(2, 5), Budget(6, 6), Budget(6, 8))
    assert [tree.num_drafts for tree in trees] == [3, 5, 6, 8]
    assert [max(tree.depths) for tree in trees] == [3, 2, 6, 6]


# -- exactness -------------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_output_whatever_was_written_before() -> None:
    """The set of skipped layers decides what is drafted, not what is written, also with a shared search."""
    target = model()
    requests = [Request(prompt_of(6, seed=i), T1, 24, seed=i, ignore_eos=True) for i in range(3)]
    drafter = SwiftDrafter(target, window=4)
    assert drafter.traits.shares_state
    first = outputs(engine(target, drafter), requests)
    assert drafter.tenants.of("").measured > 3
    assert outputs(engine(target, drafter), requests[::-1]) == first[::-1] == outputs(engine(target), requests[::-1])


@pytest.mark.parametrize("rule", [None, PointVerifier()], ids=["auto", "point"])
def test_the_distribution_with_a_shared_search(rule: Verifier | None) -> None:
    target, _ = llamas(vocab=4)
    prompt, tokens = [0, 1, 2, 3, 0, 1], 4
    distributions = {"T=1": joint_distribution(target, T1, prompt, tokens)}
    drafter = SwiftDrafter(target, k=3, threshold=0.3, keep=0, window=2)
    speculative = engine(target, drafter, rule, max_batch=4)
    assert sampled_p_value(speculative, {"T=1": T1}, distributions, prompt, tokens, 500) > FALSE_ALARM
    assert drafter.tenants.of("").measured > 20


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("swift,k=0", "swift needs k >= 1"),
        ("swift,threshold=1.5", "threshold from 0.0 to 1.0"),
        ("swift,threshold=nan", "threshold from 0.0 to 1.0"),
        ("swift,nodes=0", "nodes >= 1"),
        ("swift,skip_ratio=-1", "skip_ratio from 0.0 to 1.0"),
        ("swift,window=0", "window from 1 to 512"),
        ("swift,window=513", "window from 1 to 512"),
        ("swift,every=0", "every >= 1"),
        ("swift,goal=2", "goal from 0.0 to 1.0"),
        ("swift,keep=3", "no layer of 6 can be skipped"),
        ("swift:./folder", "takes no path"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    target = model()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def test_targets_that_cannot_are_refused() -> None:
    with pytest.raises(CapabilityError, match="layers can be run one by one"):
        SwiftDrafter(tables()[0])
    with pytest.raises(CapabilityError, match="no separate MLP"):
        SwiftDrafter(HuggingFaceModel(new_model("opt", num_hidden_layers=4).float()))
    with pytest.raises(ValueError, match="more than 2"):
        SwiftDrafter(llamas()[0])


def test_limits_are_stated() -> None:
    drafter = SwiftDrafter(model(), k=7, nodes=20)
    assert (drafter.max_depth, drafter.max_nodes) == (7, 20)
