"""The model drafter: shapes, budgets, recorded distributions, draws, its own cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters.drawing import draw_each, draw_iid, draw_without_replacement, drawn_at
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.trees.expansion import parse_widths
from foretoken.models.base import Feed, LanguageModel
from toys import engine, fixed_tables, llamas, next_logits, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SamplingParams(temperature=1.0)
RICH = SamplingParams(0.7, 3, 0.95, 0.05, 1.3, 0.3, 0.2, {1: 0.5})


def propose(
    drafter: ModelDrafter, params: SamplingParams = T1, budget: Budget | None = None, seed: int = 0
) -> tuple[Context, TokenTree]:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(params, len(PROMPT)), Rng(seed))
    drafter.start(context)
    tree = drafter.propose(context, budget or Budget(10, 64))
    drafter.finish(context)
    return context, tree


def children_per_depth(tree: TokenTree) -> list[list[int]]:
    counts: list[list[int]] = []
    for node, depth in enumerate(tree.depths):
        counts.extend([] for _ in range(depth + 1 - len(counts)))
        counts[depth].append(len(tree.children[node]))
    return counts


# -- shapes and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "params", "kind", "trees"),
    [
        ({"k": 3}, T1, Kind.IID, False),
        ({"k": 3, "draw": "greedy"}, T1, Kind.POINT, False),
        ({"k": 3}, SamplingParams(), Kind.POINT, False),
        ({"tree": "3x2"}, T1, Kind.WITHOUT_REPLACEMENT, True),
        ({"tree": "3x2", "draw": "iid"}, T1, Kind.IID, True),
        ({"tree": "3x2", "draw": "greedy"}, T1, Kind.POINT, True),
        ({"tree": "3x2"}, SamplingParams(), Kind.POINT, True),
        ({"tree": "1x1"}, T1, Kind.IID, False),
    ],
)
def test_kinds(options: dict[str, str], params: SamplingParams, kind: Kind, trees: bool) -> None:
    drafter = ModelDrafter(tables()[1], **options)  # type: ignore[arg-type]
    _, tree = propose(drafter, params)
    assert tree.kind is kind
    assert (tree.q is None) == (kind is Kind.POINT)
    assert drafter.traits.draws_trees is trees
    if params.temperature:
        assert drafter.traits.kind is kind


@pytest.mark.parametrize("draw", ["iid", "without_replacement", "greedy"])
@pytest.mark.parametrize("tree", ["1", "3", "2x2x1", "3x1x2", "1x1x1x1"])
def test_every_node_of_a_level_has_its_width(tree: str, draw: str) -> None:
    widths = parse_widths(tree)
    _, drawn = propose(ModelDrafter(tables(vocab=5)[1], tree=tree, draw=draw), budget=Budget(10, 1000))
    levels = children_per_depth(drawn)
    assert len(levels) == len(widths) + 1
    assert all(counts == [width] * len(counts) for counts, width in zip(levels, [*widths, 0], strict=True))


@pytest.mark.parametrize("draw", ["iid", "without_replacement", "greedy"])
@pytest.mark.parametrize(("depth", "nodes"), [(1, 64), (2, 64), (3, 1), (3, 2), (3, 5), (3, 7), (0, 64), (3, 0)])
def test_budgets_limit_depth_and_nodes(draw: str, depth: int, nodes: int) -> None:
    _, tree = propose(ModelDrafter(tables(vocab=5)[1], tree="3x2x2", draw=draw), budget=Budget(depth, nodes))
    full = [0, 3, 3 + 6, 3 + 6 + 12][depth]
    assert len(tree) - 1 == min(full, nodes)
    assert max(tree.depths) <= depth


@pytest.mark.parametrize(("options", "size"), [({"tree": "5x5x5"}, 155), ({"k": 100}, 100), ({"tree": "3x2"}, 9)])
def test_levels_are_not_cut(options: dict[str, Any], size: int) -> None:
    """Trees given by levels once lost all nodes after the 64th."""
    drafter = ModelDrafter(tables(vocab=7)[1], draw="greedy", **options)
    _, tree = propose(drafter, budget=Budget(drafter.max_depth, drafter.max_nodes))
    assert tree.num_drafts == size and drafter.max_nodes == max(64, size)


SHAPE = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,), (2, 0)]
"""The root has three children, the first of them two, the second none, the third one."""


def ranks_of(tree: TokenTree) -> set[tuple[int, ...]]:
    """Every node as the ranks on its path, in sibling order."""
    rank = {child: i for children in tree.children for i, child in enumerate(children)}
    return {tuple(rank[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))}


@pytest.mark.parametrize("draw", ["iid", "without_replacement", "greedy"])
@pytest.mark.parametrize("params", [T1, SamplingParams()], ids=["sampled", "greedy"])
def test_every_place_of_a_shape_is_filled(draw: str, params: SamplingParams, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"method": "model", "choices": SHAPE}))
    drafter = ModelDrafter(tables(vocab=5)[1], tree=str(file), draw=draw)
    assert (drafter.max_nodes, drafter.max_depth, drafter.traits.draws_trees) == (7, 3, True)
    for seed in range(3):
        assert ranks_of(propose(drafter, params, seed=seed)[1]) == set(SHAPE)
    assert ranks_of(propose(drafter, params, Budget(2, 64))[1]) == {c for c in SHAPE if len(c) < 3}
    for nodes in range(7):  # a smaller budget keeps the first ones of the list
        assert ranks_of(propose(drafter, params, Budget(9, nodes))[1]) == set(SHAPE[:nodes])


def test_a_full_expansion_is_the_same_tree_either_way() -> None:
    for seed in range(3):
        trees = [
            propose(ModelDrafter(tables(vocab=5)[1], tree=tree), seed=seed)[1]
            for tree in ("3x2x1", "expansion,widths=3x2x1")
        ]
        assert trees[0].tokens == trees[1].tokens and trees[0].parents == trees[1].parents


def test_reshaped() -> None:
    chain = ModelDrafter(tables(vocab=5)[1], k=2)
    other = chain.reshaped(SHAPE)
    assert ranks_of(propose(other)[1]) == set(SHAPE) and other.traits.kind is Kind.WITHOUT_REPLACEMENT
    assert len(propose(chain)[1]) == 3 and chain.traits.kind is Kind.IID
    with pytest.raises(ValueError, match="without rank 0"):
        chain.reshaped([(1,)])


def test_depths_beyond_k_are_not_drafted() -> None:
    _, tree = propose(ModelDrafter(tables()[1], k=2), budget=Budget(30, 64))
    assert len(tree) == 3


# -- distributions
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"k": 4}, {"tree": "3x2x1", "draw": "iid"}, {"tree": "2x2x2"}], ids=str)
@pytest.mark.parametrize("params", [T1, RICH], ids=["T=1", "pipeline"])
def test_recorded_distributions_are_the_distributions_of_the_prefixes(
    options: dict[str, str], params: SamplingParams
) -> None:
    """Every node's row of q is the draft model's distribution after its parent's path, by the request's own
    pipeline."""
    _, draft = tables()
    for seed in range(5):
        context, tree = propose(ModelDrafter(draft, **options), params, seed=seed)  # type: ignore[arg-type]
        assert tree.q_rows[0] == -1 and len(tree.q_rows) == len(tree)
        for node in range(1, len(tree)):
            prefix = [*PROMPT, *(tree.tokens[i] for i in tree.path(tree.parents[node])[1:])]
            distribution = tree.distribution(node)
            assert distribution is not None
            torch.testing.assert_close(distribution, context.sampler.distribution(next_logits(draft, prefix), prefix))
            assert float(distribution[tree.tokens[node]]) > 0
        for siblings in tree.children:
            assert len({tree.q_rows[node] for node in siblings}) <= 1


def test_networks_record_the_same_distributions_in_a_batch() -> None:
    _, draft = llamas()
    drafter = ModelDrafter(draft, tree="2x2x1")
    contexts = [
        Context(i, list(prompt), len(prompt), Sampler(T1, len(prompt)), Rng(i))
        for i, prompt in enumerate([[5, 6, 7, 8, 9], [3], [4, 4, 4]])
    ]
    for context in contexts:
        drafter.start(context)
    for context, tree in zip(contexts, drafter.propose_batch(contexts, [Budget(9, 64)] * 3), strict=True):
        assert len(tree) == 11
        for node in range(1, len(tree)):
            prefix = [*context.tokens, *(tree.tokens[i] for i in tree.path(tree.parents[node])[1:])]
            distribution = tree.distribution(node)
            assert distribution is not None
            torch.testing.assert_close(
                distribution, torch.softmax(next_logits(draft, prefix), -1), rtol=1e-9, atol=1e-12
            )


def test_greedy_drafts_are_the_likeliest_tokens() -> None:
    _, draft = tables()
    _, tree = propose(ModelDrafter(draft, tree="2x2"), SamplingParams())
    for node, children in enumerate(tree.children):
        if children:
            prefix = [*PROMPT, *(tree.tokens[i] for i in tree.path(node)[1:])]
            assert [tree.tokens[c] for c in children] == next_logits(draft, prefix).topk(2).indices.tolist()


# -- draws -----------------------------------------------------------------------------------------------------------


def counted(tree: str, draw: str, distribution: Sequence[float], count: int) -> Counter[tuple[int, ...]]:
    _, draft = fixed_tables(distribution, distribution)
    drafter = ModelDrafter(draft, tree=tree, draw=draw)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        counts[tuple(propose(drafter, seed=seed)[1].tokens[1:])] += 1
    return counts


def test_siblings_without_replacement_come_in_sampling_order() -> None:
    """P(a then b) = q(a) q(b) / (1 - q(a)); false alarm 1e-4."""
    distribution = [0.5, 0.3, 0.15, 0.05]
    counts = counted("2", "without_replacement", distribution, 1500)
    expected = {(a, b): distribution[a] * distribution[b] / (1 - distribution[a]) for a, b in permutations(range(4), 2)}
    assert set(counts) <= set(expected)
    keys = sorted(expected)
    assert chisquare([counts[k] for k in keys], [1500 * expected[k] for k in keys]).pvalue > 1e-4
    assert counts[(1, 0)] > 100  # not sorted by probability


def test_independent_siblings_repeat() -> None:
    distribution = [0.5, 0.3, 0.2]
    counts = counted("2", "iid", distribution, 1500)
    keys = [(a, b) for a in range(3) for b in range(3)]
    assert (
        chisquare([counts[k] for k in keys], [1500 * distribution[a] * distribution[b] for a, b in keys]).pvalue > 1e-4
    )


def test_a_small_support_gives_fewer_siblings() -> None:
    _, draft = fixed_tables([1, 1, 1, 1], [0.6, 0.4, 0.0, 0.0])
    for seed in range(20):
        _, tree = propose(ModelDrafter(draft, tree="3x1"), seed=seed)
        assert sorted(tree.tokens[c] for c in tree.children[0]) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_draws_never_hit_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    distribution = torch.tensor([0.0, 1e-30, 0.0, 0.7, 0.0, 0.3, 0.0], dtype=dtype)
    context = Context(0, [0], 1, None, Rng(0))
    for _ in range(300):
        tokens = draw_without_replacement(distribution, 5, context)
        assert len(set(tokens)) == len(tokens)
        assert all(float(distribution[token]) > 0 for token in tokens)
        assert {3, 5} <= set(tokens)


class Edge(Rng):
    """Uniforms at the very ends of [0, 1)."""

    def uniform(self) -> float:
        self.low = not getattr(self, "low", False)
        return 0.0 if self.low else 1.0 - 2**-53


@pytest.mark.parametrize("draw", ["iid", "without_replacement"])
def test_uniforms_at_the_ends(draw: str) -> None:
    _, draft = fixed_tables([1, 1, 1, 1], [0.0, 0.5, 0.5, 0.0])
    drafter = ModelDrafter(draft, tree="2x2", draw=draw)
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(T1), Edge(0))
    drafter.start(context)
    tree = drafter.propose(context, Budget(5, 64))
    assert set(tree.tokens[1:]) <= {1, 2}


# -- confidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [T1, SamplingParams()], ids=["sampled", "greedy"])
def test_a_stop_keeps_the_drawn_token(params: SamplingParams) -> None:
    """All tokens are unlikely: the draft is one token long, not empty."""
    _, draft = fixed_tables([1, 1, 1, 1], [0.25, 0.26, 0.25, 0.24])
    _, tree = propose(ModelDrafter(draft, k=5), params, Budget(5, 64, min_confidence=0.4))
    assert len(tree) == 2


def test_drafting_ends_behind_the_first_unlikely_token() -> None:
    _, draft = tables()
    stopped, full = ModelDrafter(draft, k=6), ModelDrafter(draft, k=6)
    lengths = set()
    for seed in range(40):
        _, long = propose(full, seed=seed)
        _, short = propose(stopped, budget=Budget(6, 64, min_confidence=0.3), seed=seed)
        chances = [float(long.distribution(node)[long.tokens[node]]) for node in range(1, len(long))]  # type: ignore[index]
        first = next((i for i, chance in enumerate(chances) if chance < 0.3), 5)
        assert short.tokens == long.tokens[: first + 2]
        lengths.add(len(short))
    assert len(lengths) > 3


def test_a_branch_may_end_while_others_go_on() -> None:
    _, draft = fixed_tables([1, 1, 1], [0.6, 0.3, 0.1])
    _, tree = propose(ModelDrafter(draft, tree="3x1", draw="greedy"), T1, Budget(5, 64, min_confidence=0.5))
    assert [len(tree.children[node]) for node in (1, 2, 3)] == [1, 0, 0]


def test_a_richer_stop_sees_distribution_and_probability() -> None:
    seen: list[tuple[int, float]] = []

    def stop(distribution: torch.Tensor | None, probability: float) -> bool:
        assert distribution is not None
        seen.append((len(distribution), probability))
        return len(seen) == 2

    _, tree = propose(ModelDrafter(tables()[1], k=5), T1, Budget(5, 64, stop=stop))
    assert len(tree) == 3 and len(seen) == 2
    assert all(size == 4 and 0 < chance < 1 for size, chance in seen)


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
def test_the_confidence_controller_shortens_drafts(seeded: bool) -> None:
    target, draft = tables()
    torch.manual_seed(0)
    requests = [Request(PROMPT, T1, 60, seed=i if seeded else None) for i in range(20)]
    lengths, rates = [], []
    for controller in (None, ConfidenceController(0.4)):
        stats = [run.stats for run in serve(engine(target, ModelDrafter(draft, k=6), controller=controller), requests)]
        drafts = sum(each.num_draft_tokens for each in stats)
        lengths.append(drafts / sum(each.num_drafts for each in stats))
        rates.append(sum(each.num_accepted_tokens for each in stats) / drafts)
    assert lengths[1] < lengths[0] and rates[1] > rates[0]


# -- its own cache ---------------------------------------------------------------------------------------------------


class Spy:
    """Counts the tokens that a model is fed."""

    def __init__(self, model: LanguageModel) -> None:
        self.fed: list[list[int]] = []
        forward = model.forward

        def counting(feeds: Sequence[Feed], taps: Sequence[str] = ()) -> object:
            self.fed.append([len(feed.tokens) for feed in feeds])
            return forward(feeds, taps)

        model.forward = counting  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("draws_itself", [True, False], ids=["all-accepted", "some-rejected"])
def test_nothing_is_fed_twice(draws_itself: bool) -> None:
    """After the prefill a chain is one feed of at most two tokens and k - 1 feeds of one, whatever was accepted."""
    target, draft = llamas()
    drafter = ModelDrafter(target if draws_itself else draft, k=3)
    speculative = engine(target, drafter)
    speculative.add(Request([3, 4, 5, 6], T1, 60, seed=0))
    speculative.step()
    spy = Spy(drafter.model)
    accepted = set()
    while speculative.busy:
        spy.fed.clear()
        gained = speculative.step()
        if draws_itself:
            spy.fed.pop()  # the target's own call
        accepted.add(gained[0][1].origins.count("accepted"))
        if spy.fed:
            assert spy.fed[0][0] <= 2
            assert all(feed == [1] for feed in spy.fed[1:])
            assert len(spy.fed) <= 3
    assert 3 in accepted or not draws_itself


def test_one_forward_a_level_for_the_whole_batch() -> None:
    target, draft = llamas()
    speculative = engine(target, ModelDrafter(draft, tree="2x2x1"))
    for i in range(3):
        speculative.add(Request([3 + i, 4], T1, 30, seed=i))
    speculative.step()
    spy = Spy(draft)
    speculative.step()
    assert len(spy.fed) == 3
    assert spy.fed[1:] == [[2, 2, 2], [4, 4, 4]]


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k >= 1"),
        ({"draw": "sorted"}, "draw must be iid, without_replacement or greedy, not 'sorted'"),
        ({"tree": "3xx2"}, "positive child counts per level"),
        ({"tree": "0x2"}, "positive child counts per level"),
        ({"tree": "100x100x100"}, "1,010,100 nodes, of which one call checks at most 1,024"),
        ({"tree": "a"}, "positive child counts per level"),
        ({"tree": "a"}, "expansion, medusa_tree, sequoia, eagle2, opt_tree, cost_aware with its options"),
        ({"tree": "none.json"}, "cannot read the tree none.json"),
        ({"tree": "opt_tree,size=1"}, "unknown option 'size' of tree 'opt_tree'"),
        ({"tree": "sequoia,nodes=0"}, "nodes >= 1"),
    ],
)
def test_bad_options(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelDrafter(tables()[1], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "widths"), [("3x2x1", (3, 2, 1)), ("4", (4,)), ("2X2", (2, 2))])
def test_widths(text: str, widths: tuple[int, ...]) -> None:
    assert parse_widths(text) == widths


# -- batches ---------------------------------------------------------------------------------------------------------


def test_draws_made_together_are_those_made_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (2, 40, 9000, 40_000):
        distributions = torch.rand(6, size, generator=generator).softmax(-1)
        distributions[0, size // 2 :] = 0.0
        contexts = [Context(i, [0], 1, Sampler(T1, 1), Rng(i)) for i in range(6)]
        for _ in range(50):
            alone = [
                draw_iid(distribution, 1, Context(0, [0], 1, Sampler(T1, 1), deepcopy(c.rng)))[0]
                for distribution, c in zip(distributions, contexts, strict=True)
            ]
            assert draw_each(distributions, contexts) == alone


class Uniforms(Rng):
    """These, one after another."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        self._left = list(uniforms)[::-1]

    def uniform(self) -> float:
        return self._left.pop()


@pytest.mark.parametrize("size", [32_000, 50_000])
def test_every_token_of_a_large_vocabulary_can_be_drawn(size: int) -> None:
    """A uniform from the middle of a token's share draws it: in float32 a sixth of the tokens had none."""
    q = torch.softmax(3 * torch.randn(size, generator=torch.Generator().manual_seed(0)), -1)
    cdf = q.double().cumsum(0)
    tokens = list(range(0, size, 53))
    uniforms = [float((cdf[token] - q[token].double() / 2) / cdf[-1]) for token in tokens]
    contexts = [Context(0, [0], 1, Sampler(T1, 1), Uniforms([uniform])) for uniform in uniforms]
    assert drawn_at(q, uniforms) == tokens
    assert draw_each(q.expand(len(tokens[:40]), -1), contexts[:40]) == tokens[:40]
    assert [draw_without_replacement(q, 1, context)[0] for context in contexts[-40:]] == tokens[-40:]


def test_a_batch_drafts_what_its_requests_draft_alone() -> None:
    _, draft = llamas()
    several = [T1, RICH, T1, SamplingParams(), SamplingParams(temperature=0.5, top_k=3), T1]
    budgets = [Budget(4, 64), Budget(4, 64), Budget(2, 64), Budget(4, 64), Budget(4, 64), Budget(4, 1)]
    for drafter in (
        ModelDrafter(draft, k=4),
        ModelDrafter(draft, tree="1x2x1"),
        ModelDrafter(draft, k=4, draw="greedy"),
    ):
        contexts = [Context(i, list(PROMPT), 6, Sampler(p, 6), Rng(i)) for i, p in enumerate(several)]
        for context in contexts:
            drafter.start(context)
        trees = drafter.propose_batch(contexts, budgets)
        for context in contexts:
            drafter.finish(context)
        for seed, (params, budget, tree) in enumerate(zip(several, budgets, trees, strict=True)):
            _, alone = propose(drafter, params, budget, seed)
            assert (tree.tokens, tree.parents, tree.q_rows) == (alone.tokens, alone.parents, alone.q_rows)
            assert (tree.q is None) == (alone.q is None)
            assert tree.q is None or alone.q is None or torch.allclose(tree.q, alone.q, atol=1e-6)
