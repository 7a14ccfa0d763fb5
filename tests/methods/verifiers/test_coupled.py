"""Coupled sampling: the winners of the race have the target's distribution, whatever was drafted."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import Tables, grow, prefixes
from scipy.stats import chi2, chisquare
from torch import Tensor

from foretoken.core import Kind, NonFiniteLogitsError, Rng, Scores, TokenTree, Verdict
from foretoken.core import scores as scores_module
from foretoken.core.noise import Noise
from foretoken.core.sampling import LogitsProcessor, Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.drawing import best, ranked
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.batched import verify_batch
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.compatibility import auto_verifier, check_proposals
from foretoken.methods.verifiers.coupled import CoupledVerifier
from foretoken.methods.verifiers.greedy import GreedyVerifier
from foretoken.methods.verifiers.point import PointVerifier
from toys import engine, outputs, tables

FALSE_ALARM = 1e-4
PROMPT = (3, 1, 4)
T1 = SamplingParams(temperature=1.0)
RULE = CoupledVerifier()


def forbids(token: int, after: int) -> LogitsProcessor:
    """Behind one token another one is impossible."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[ids[:, -1] == after, token] = -torch.inf
        return scores

    return processor


RECIPES = [
    T1,
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.4, top_p=0.8, min_p=0.1),
    SamplingParams(temperature=1.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.8, presence_penalty=0.6, frequency_penalty=0.4, top_k=4),
    SamplingParams(temperature=1.0, logit_bias={0: 1.5, 3: -4.0}),
    SamplingParams(temperature=1.0, processors=(forbids(2, 1), forbids(0, 3))),
]


def root_scores(logits: Tensor, position: int, noise: Noise, params: SamplingParams = T1) -> Scores:
    """Plain decoding of the output token at ``position``, from logits [V]."""
    prefix = [*PROMPT, *[0] * position]
    return Scores(logits[None], TokenTree.root_only(prefix[-1]), prefix, Sampler(params, len(PROMPT), noise))


def fast(scores: Scores) -> Verdict:
    return RULE.verify(scores.tree, scores, Rng(0))


def plain(scores: Scores) -> Verdict:
    return RULE.decide(scores.tree, scores, Coins(Rng(0)))


def random_tree(generator: np.random.Generator, vocab: int, nodes: int) -> TokenTree:
    """Any tree: chains, branches, one token below several parents and several times below one, probes."""
    wide = generator.random() < 0.5
    parents = [-1, *(int(generator.integers(0, n) if wide else max(n - 2, 0)) for n in range(1, nodes))]
    tokens = generator.integers(0, vocab, nodes).tolist()
    probes = generator.random(nodes) < 0.15
    probes[0] = False
    for node in range(1, nodes):
        probes[node] |= probes[parents[node]]
    return TokenTree(tuple(tokens), tuple(parents), probes=tuple(probes.tolist()))


def random_scores(seed: int, params: SamplingParams, noise: Noise | None, vocab: int = 5, nodes: int = 14) -> Scores:
    """A tree in the middle of a text, and float64 logits by prefix, so that equal prefixes have equal rows."""
    generator = np.random.default_rng(seed)
    tree, target = random_tree(generator, vocab, nodes), Tables(vocab, seed=seed)
    logits = torch.stack([target.p(prefix) for prefix in prefixes(tree)]).log()
    prefix = [*PROMPT, *generator.integers(0, vocab, int(generator.integers(0, 6))).tolist(), tree.tokens[0]]
    return Scores(logits, tree, prefix, Sampler(params, len(PROMPT), noise))


def chained(scores: Scores) -> Scores:
    """The same rows for a chain of the same tokens: the walk may reach all nodes."""
    root, *drafts = scores.tree.tokens
    return Scores(scores.logits, TokenTree.chain(root, drafts), scores.prefix, scores.sampler)


def fresh(scores: Scores) -> Scores:
    """The same without anything looked up."""
    return Scores(scores.logits, scores.tree, scores.prefix, scores.sampler)


def walked(scores: Scores) -> list[int]:
    """The tokens that plain decoding writes on the rows of the tree: the definition, by hand."""
    sampler, nodes, tokens = scores.sampler, [0], []
    assert sampler.noise is not None
    while nodes:
        path = [scores.tree.tokens[node] for node in scores.tree.path(nodes[0])[1:]]
        p = sampler.distribution(scores.logits[nodes[0]], [*scores.prefix, *path])
        numbers = sampler.noise.exponentials(len(scores.prefix) + len(path) - sampler.prompt_length, len(p))
        times = [float(e / chance) if chance > 0 else np.inf for e, chance in zip(numbers, p, strict=True)]
        tokens.append(int(np.argmin(times)))
        children = [child for node in nodes for child in scores.tree.children[node]]
        nodes = [child for child in children if scores.tree.tokens[child] == tokens[-1]]
    return tokens


def emitted(scores: Scores, verdict: Verdict) -> list[int]:
    return [*(scores.tree.tokens[node] for node in verdict.path), verdict.next_token]


# -- the distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 4, 5, 6])
@pytest.mark.parametrize("params", [T1, SamplingParams(temperature=0.7, top_k=3)], ids=["T=1", "filters"])
def test_the_winner_has_the_targets_distribution(vocab: int, params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(vocab, generator=generator, dtype=torch.float64) + 0.05
    weights[vocab - 2] = 0.0
    if vocab > 4:
        weights[0] = 0.0
    p, noise, count = Sampler(params).distribution(weights.log(), ()), Noise(vocab), 5000
    winners = [fast(root_scores(weights.log(), position, noise, params)).next_token for position in range(count)]
    assert winners[:500] == [plain(root_scores(weights.log(), i, noise, params)).next_token for i in range(500)]
    counts = np.bincount(winners, minlength=vocab)
    assert not counts[(p == 0).numpy()].any()
    possible = (p > 0).numpy()
    assert chisquare(counts[possible], count * p.numpy()[possible]).pvalue > FALSE_ALARM
    wrong = p.numpy()[possible].copy()
    wrong[[0, -1]] += (0.04, -0.04)
    assert chisquare(counts[possible], count * wrong).pvalue < 1e-8  # so the test sees an error of this size


def test_winners_of_consecutive_positions_are_independent() -> None:
    p, noise, count = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), Noise(0), 8000
    winners = np.array([fast(root_scores(p.log(), position, noise)).next_token for position in range(count)])
    for gap in (1, 2, 3):
        pairs = np.zeros((3, 3))
        np.add.at(pairs, (winners[:-gap], winners[gap:]), 1)
        expected = pairs.sum() * np.outer(p, p)
        assert chisquare(pairs.ravel(), expected.ravel()).pvalue > FALSE_ALARM


def raced_tree(draft: Tables, shape: tuple[int, ...], sampler: Sampler) -> TokenTree:
    """As a drafter grows it: the children of a node are the first in the race on q."""
    tokens, parents = [0], [-1]
    level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for depth, width in enumerate(shape):
        following = []
        for node, prefix in level:
            ranking = ranked(sampler, draft.q(prefix).log()[None], [1 + depth], None)[0]
            for token in best(ranking, width):
                following.append((len(tokens), (*prefix, token)))
                tokens.append(token)
                parents.append(node)
        level = following
    return TokenTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 1)], ids=str)
def test_pairs_of_tokens_follow_the_target_whatever_was_drafted(shape: tuple[int, ...]) -> None:
    """The candidates race on the same noise, and still: among texts whose first draft was accepted, and among those in
    which it was not, the second token has the target's distribution after the first.
    """
    target, count, cells = Tables(3, seed=4), 3000, np.zeros((2, 3, 3))
    for seed in range(count):
        sampler = Sampler(T1, 1, Noise(seed))
        tree = raced_tree(target, shape, sampler)
        rows = torch.stack([target.p(prefix) for prefix in prefixes(tree)]).log()
        scores = Scores(rows, tree, (0,), sampler)
        tokens = emitted(scores, fast(scores))
        accepted = len(tokens) > 1
        if not accepted:  # the next round, on the noise of the next position
            after = Scores(target.p((tokens[0],)).log()[None], TokenTree.root_only(tokens[0]), (0, tokens[0]), sampler)
            tokens.append(fast(after).next_token)
        cells[int(accepted), tokens[0], tokens[1]] += 1
    assert chisquare(cells.sum((0, 2)), count * target.p(()).numpy()).pvalue > FALSE_ALARM
    statistic = freedom = 0.0
    for accepted, first in np.ndindex(2, 3):
        row = cells[accepted, first]
        if row.sum() >= 60:
            expected = row.sum() * target.p((first,)).numpy()
            statistic, freedom = statistic + ((row - expected) ** 2 / expected).sum(), freedom + 2
    assert freedom >= 6 and chi2.sf(statistic, freedom) > FALSE_ALARM
    assert cells[1].sum() > 0.4 * count


@pytest.mark.parametrize(
    ("p", "q", "rate"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 0.2 + 3 / 13 + 0.2),
        ([0.7, 0.3, 0.0], [0.0, 0.3, 0.7], 0.3 / 1.7),
        ([0.25] * 4, [0.25] * 4, 1.0),
        ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], 0.0),
    ],
)
def test_how_often_the_first_candidate_is_accepted(p: list[float], q: list[float], rate: float) -> None:
    """The sum over v of 1 / sum_w max(p_w / p_v, q_w / q_v)."""
    possible = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    formula = sum(1 / sum(max(a / p[v], b / q[v]) for a, b in zip(p, q, strict=True)) for v in possible)
    assert formula == pytest.approx(rate)
    noise, count = Noise(0), 8000
    logs = torch.tensor([p, q], dtype=torch.float64).log()
    sampler = Sampler(T1, 0, noise)
    both = [sampler.ranking(logs, [position, position], None).argmax(-1).tolist() for position in range(count)]
    share = sum(x == y for x, y in both) / count
    assert abs(share - rate) <= 4 * (rate * (1 - rate) / count) ** 0.5 + 1e-12


# -- the walk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", RECIPES, ids=range(len(RECIPES)))
def test_both_ways_walk_as_plain_decoding_would(params: SamplingParams) -> None:
    accepted = 0
    for seed in range(80):
        scores = random_scores(seed, params, Noise(seed))
        verdict = plain(scores)
        assert fast(scores) == verdict
        assert emitted(scores, verdict) == walked(scores)
        accepted += len(verdict.path)
        last = verdict.path[-1] if verdict.path else 0
        assert list(verdict.path) == scores.tree.path(last)[1:]
        assert not any(scores.tree.probes[node] for node in verdict.path)
    assert accepted > 30


def test_the_text_does_not_depend_on_the_tree() -> None:
    """Round after round with other trees: the text of plain decoding, and tokens beyond the tree are not looked at."""
    target = Tables(4, seed=1)
    for seed in range(20):
        sampler, generator = Sampler(T1, 1, Noise(seed)), np.random.default_rng(seed)
        texts = []
        for nodes in (1, 4, 20):
            text = [0]
            while len(text) < 8:
                tree = random_tree(generator, 4, nodes)
                tree = TokenTree((text[-1], *tree.tokens[1:]), tree.parents, probes=tree.probes)
                rows = torch.stack([target.p((*text[1:], *path)) for path in prefixes(tree)]).log()
                scores = Scores(rows, tree, text, sampler)
                text += emitted(scores, fast(scores))
            texts.append(text[:8])
        assert texts[0] == texts[1] == texts[2]


def test_the_kind_and_the_recorded_distributions_do_not_matter() -> None:
    draft = Tables(5, seed=2)
    for seed in range(40):
        drawn = grow(draft, (2, 2), Kind.IID, Coins(Rng(seed)))
        points = TokenTree(drawn.tokens, drawn.parents)
        rows = torch.stack([draft.p(prefix) for prefix in prefixes(drawn)]).log()
        verdicts = [fast(Scores(rows, tree, (0,), Sampler(T1, 1, Noise(seed)))) for tree in (drawn, points)]
        assert verdicts[0] == verdicts[1]


def test_impossible_tokens_never_win() -> None:
    logits = torch.full((50,), -torch.inf, dtype=torch.float64)
    logits[[7, 31]] = torch.tensor([0.0, -30.0], dtype=torch.float64)
    for seed in range(300):
        tree = TokenTree((0, 8, 7, 30), (-1, 0, 0, 0))
        scores = Scores(logits.expand(4, -1), tree, (0,), Sampler(T1, 1, Noise(seed)))
        assert fast(scores) == plain(scores) and fast(scores).path in ((2,), ())
        assert set(emitted(scores, fast(scores))) <= {7, 31}


class Flat(Noise):
    """Everybody runs equally fast."""

    def exponentials(self, position: int, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float64)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lower_id(large: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(scores_module, "LARGE", 2)
    rows = torch.tensor([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5, [0.0, 0.0, 0.5, 0.5, 0.0]], dtype=dtype).log()
    for row, winner in zip(rows, (1, 0, 2), strict=True):
        two = [root_scores(row, 0, Flat(0)) for _ in range(2)]
        assert fast(two[0]).next_token == winner
        assert [verdict.next_token for verdict in verify_batch([RULE] * 2, two, [Rng(0)] * 2)] == [winner] * 2
        if dtype is torch.float64:
            assert plain(root_scores(row, 0, Flat(0))).next_token == winner


def test_no_coin_is_tossed_and_nothing_is_changed() -> None:
    for seed in range(10):
        scores, rng = random_scores(seed, T1, Noise(seed)), Rng(seed)
        noise = scores.sampler.noise
        assert noise is not None
        kept = {position: noise.gumbels(position, 5, torch.device("cpu")) for position in range(12)}
        before = {position: row.clone() for position, row in kept.items()}
        logits = scores.logits.clone()
        RULE.verify(scores.tree, scores, rng)
        RULE.decide(scores.tree, scores, Coins(rng))
        verify_batch([RULE] * 2, [fresh(scores), fresh(scores)], [rng, rng])
        assert rng.uniform() == Rng(seed).uniform()
        assert torch.equal(scores.logits, logits)
        assert all(torch.equal(row, before[position]) for position, row in kept.items())


# -- greedy, and without noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [None, Noise(3)], ids=["without-noise", "with-noise"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(repetition_penalty=1.5), SamplingParams(logit_bias={1: 2.0})],
    ids=["plain", "penalty", "bias"],
)
def test_temperature_0_is_the_greedy_walk(params: SamplingParams, noise: Noise | None) -> None:
    accepted = 0
    for seed in range(40):
        scores = random_scores(seed, params, noise)
        walk = GreedyVerifier().verify(scores.tree, fresh(scores), Rng(0))
        assert plain(fresh(scores)) == fast(fresh(scores)) == walk
        accepted += len(walk.path)
    assert accepted > 15


def test_a_sampler_without_noise_is_refused() -> None:
    scores = random_scores(0, T1, None)
    other = random_scores(1, T1, None)
    for refused in (
        lambda: plain(scores),
        lambda: fast(scores),
        lambda: verify_batch([RULE] * 2, [scores, other], [Rng(0), Rng(1)]),
    ):
        with pytest.raises(ValueError, match="the verifier 'coupled' needs the noise of a request"):
            refused()


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("params", RECIPES, ids=range(len(RECIPES)))
def test_logits_that_are_no_numbers_are_reported(bad: float, params: SamplingParams) -> None:
    for large in (False, True):
        size = scores_module.LARGE + 1 if large else 6
        logits = torch.full((size,), bad, dtype=torch.float64)
        scores = [root_scores(logits, 0, Noise(seed), params) for seed in range(2)]
        for refused in (
            lambda scores=scores: plain(scores[0]),
            lambda scores=scores: fast(scores[0]),
            lambda scores=scores: verify_batch([RULE] * 2, scores, [Rng(0), Rng(1)]),
        ):
            with pytest.raises(NonFiniteLogitsError):
                refused()


def test_a_named_rule_gives_unseeded_requests_noise() -> None:
    target = tables()[0]
    coupled, requests = engine(target, verifier=RULE), [Request([0, 1], T1, 12) for _ in range(3)]
    torch.manual_seed(7)
    first = outputs(coupled, requests)
    assert outputs(coupled, requests) != first
    torch.manual_seed(7)
    assert outputs(coupled, requests) == first and len({tuple(text) for text in first}) > 1


# -- a batch ---------------------------------------------------------------------------------------------------------


def mixed(seed: int) -> list[tuple[Verifier, Scores]]:
    """Requests with noise of all recipes, greedy ones, and unseeded ones under the rules that they get."""
    requests: list[tuple[Verifier, Scores]] = []
    for i, params in enumerate([*RECIPES, *RECIPES[:4]]):
        requests.append((RULE, random_scores(seed + i, params, Noise(seed + 3 * i), nodes=(14, 1, 5)[i % 3])))
    for i, (verifier, params) in enumerate(
        [
            (GreedyVerifier(), SamplingParams()),
            (RULE, SamplingParams()),
            (GreedyVerifier(), SamplingParams(repetition_penalty=1.3)),
            (PointVerifier(), T1),
            (PointVerifier(), RECIPES[2]),
            (PointVerifier(), T1),
        ]
    ):
        requests.append((verifier, random_scores(seed + 50 + i, params, None)))
    for i in range(2):
        chain = grow(Tables(5, seed=seed + i), (1, 1, 1), Kind.IID, Coins(Rng(seed + i)))
        rows = torch.stack([Tables(5, seed=seed).p(prefix) for prefix in prefixes(chain)]).log()
        requests.append((BlockVerifier(), Scores(rows, chain, (0,), Sampler(T1, 1))))
    order = np.random.default_rng(seed).permutation(len(requests))
    return [requests[i] for i in order]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_batch_decides_as_its_requests_do(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts are also the same if every vocabulary counts as large, so that races are run one by one."""
    accepted = 0
    for seed in range(0, 1200, 100):
        alone = [rule.verify(request.tree, request, Rng(i)) for i, (rule, request) in enumerate(mixed(seed))]
        with monkeypatch.context() as patch:
            if large:
                patch.setattr(scores_module, "LARGE", 2)
            verifiers, scores = zip(*mixed(seed), strict=True)
            rngs = [Rng(i) for i in range(len(scores))]
            assert verify_batch(verifiers, scores, rngs) == alone
        for verifier, request in zip(verifiers, scores, strict=True):
            assert (request.chosen is None) or request.sampler.fixed
            if verifier is RULE:
                assert request.batched_p is None
        accepted += sum(len(verdict.path) for verdict in alone)
    assert accepted > 80


def test_the_races_of_a_batch_are_run_by_one_call_per_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    log_probs = Sampler.log_probs

    def counted(self: Sampler, logits: Tensor) -> Tensor:
        calls.append(len(logits))
        return log_probs(self, logits)

    monkeypatch.setattr(Sampler, "log_probs", counted)
    recipes = cycle([T1, RECIPES[1]])
    scores = [random_scores(seed, next(recipes), Noise(seed), nodes=3 + seed) for seed in range(6)]
    verify_batch([RULE] * 6, [chained(request) for request in scores], [Rng(0)] * 6)
    assert sorted(calls) == [3 + 5 + 7, 4 + 6 + 8]
    calls.clear()
    verify_batch([RULE] * 6, scores, [Rng(0)] * 6)  # of trees only the nodes that walks reach are raced
    assert not calls and not any(request.tree.is_chain for request in scores)


# -- large vocabularies, other precisions ----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [T1, RECIPES[2], RECIPES[4]], ids=["T=1", "top-k", "penalty"])
def test_large_vocabularies_race_lazily_and_the_same(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    size = scores_module.LARGE + 100
    raced: list[int] = []
    winners = Sampler.winners

    def counted(self: Sampler, logits: Tensor, lengths: list[int], prefixes: Any) -> list[int]:
        raced.append(len(logits))
        return winners(self, logits, lengths, prefixes)

    monkeypatch.setattr(Sampler, "winners", counted)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(6, size, generator=generator, dtype=torch.float64)
        sampler = Sampler(params, 1, Noise(seed))
        first = plain(Scores(logits, TokenTree.root_only(0), (0,), sampler)).next_token
        tree = TokenTree((0, 5, first, 6, 7, 8), (-1, 0, 0, 1, 2, 3))
        raced.clear()
        scores = Scores(logits, tree, (0,), sampler)
        verdict = fast(scores)
        assert verdict == plain(scores) and verdict.path == (2,)
        assert raced == [1, 1]  # the two nodes that the walk visits
        both = [fresh(scores), fresh(scores)]
        assert verify_batch([RULE] * 2, both, [Rng(0)] * 2) == [verdict] * 2
    small = chained(random_scores(0, T1, Noise(0)))
    raced.clear()
    fast(small)
    assert raced == [len(small.tree)]


@pytest.mark.parametrize("vocab", [5, 300, scores_module.LARGE + 1])
def test_precisions_agree(vocab: int) -> None:
    """Rounded logits are the request's logits: whatever their type, the race on them is run in float64."""
    for seed in range(30 if vocab < 1000 else 3):
        logits = 4 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
        for dtype in (torch.float32, torch.bfloat16):
            rounded = logits.to(dtype)
            for params in (T1, SamplingParams(temperature=0.7, top_k=40)):
                sampler, tree = Sampler(params, 1, Noise(seed)), TokenTree.chain(0, [1, 2, 3])
                verdicts = [fast(Scores(rows, tree, (0,), sampler)) for rows in (rounded, rounded.double())]
                assert verdicts[0] == verdicts[1]
                assert sampler.ranking(rounded, [1] * 4, None).dtype == torch.float64


def test_a_long_tail_races() -> None:
    """A quarter of the mass is spread over 2**15 tokens: in a running sum in bfloat16, say, they would be lost."""
    size = 2**15
    weights = torch.full((size,), 0.25 / size)
    weights[0] = 0.75
    noise = Noise(0)
    tokens = [fast(root_scores(weights.log(), position, noise)).next_token for position in range(600)]
    tail = [token for token in tokens if token]
    assert abs(len(tail) - 150) < 4 * (600 * 0.25 * 0.75) ** 0.5
    counts = np.bincount(np.array(tail) * 8 // size, minlength=8)
    assert chisquare(counts).pvalue > FALSE_ALARM


# -- compatibility ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [False, True])
def test_it_is_right_for_all_proposals(greedy: bool) -> None:
    sorts = [(kind, is_tree) for kind in Kind for is_tree in (False, True)]
    for kind, is_tree in sorts:
        check_proposals([(kind, is_tree)], RULE, "some_drafter", allow_lossy=False, greedy=greedy)
        assert isinstance(auto_verifier(kind, is_tree, False, True), CoupledVerifier)
        assert not isinstance(auto_verifier(kind, is_tree, False, False), CoupledVerifier)
    check_proposals(sorts, RULE, "some_drafter", allow_lossy=False, greedy=greedy)
    assert RULE.lossless and RULE.races and not RULE.chains_only and not RULE.greedy_only
