"""Trees that follow the draft's confidence: equal to brute force, to the published procedure, and to their costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from foretoken.core.costs import TargetCost
from foretoken.methods.trees.base import Candidates, Growth
from foretoken.methods.trees.cost_aware import CostAware, PayingNodes, best_count, paying_count
from foretoken.methods.trees.eagle2 import Eagle2
from foretoken.methods.trees.opt_tree import OptTree
from foretoken.registry import make

Path = tuple[int, ...]


class Guesser:
    """A draft distribution over three tokens after every path, the same whenever it is asked."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        self.seed, self.sharpness, self.read = seed, sharpness, 0

    def distribution(self, path: Path) -> list[float]:
        rng = random.Random(hash((self.seed, path)))
        weights = [math.exp(self.sharpness * rng.random()) for _ in range(3)]
        return [weight / sum(weights) for weight in weights]

    def value(self, path: Path) -> float:
        return math.prod(self.distribution(path[:i])[token] for i, token in enumerate(path))


def grown(growth: Growth, guesser: Guesser, nodes: int, depth: int, width: int) -> tuple[Candidates, list[Path]]:
    """Runs a growth as a drafter does: all candidates, and the paths of the kept nodes."""
    seen, frontier, paths = Candidates([-1]), [0], [()]
    for _ in range(depth):
        first = len(seen)
        for node in frontier:
            distribution = guesser.distribution(paths[node])
            guesser.read += 1
            best = sorted(range(3), key=lambda token: -distribution[token])[:width]
            seen.add(node, best, [seen.scores[node] + math.log(distribution[token]) for token in best])
            paths.extend((*paths[node], token) for token in best)
        frontier = growth.frontier(seen, first, width, nodes)
        if not frontier:
            break
    return seen, [paths[node] for node in growth.kept(seen, nodes)]


def is_tree(paths: Sequence[Path]) -> bool:
    return all(path[:-1] in {(), *paths} for path in paths)


def most_expected(guesser: Guesser, nodes: int, depth: int) -> float:
    """The best sum of values over all trees of ``nodes`` nodes, by trying every one of them."""
    everything = [p for d in range(1, depth + 1) for p in itertools.product(range(3), repeat=d)]
    return max(
        sum(map(guesser.value, chosen)) for chosen in itertools.combinations(everything, nodes) if is_tree(chosen)
    )


# -- OPT-Tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_opt_tree_is_the_best_tree_of_its_size(seed: int, nodes: int) -> None:
    guesser = Guesser(seed)
    _, kept = grown(OptTree(threshold=0.0), guesser, nodes, depth=3, width=3)
    assert len(kept) == nodes and is_tree(kept)
    assert sum(map(guesser.value, kept)) == pytest.approx(most_expected(guesser, nodes, 3))


def test_opt_tree_reads_no_node_in_vain() -> None:
    """Reading everything would take 1 + 3 + 9 calls for three levels."""
    guesser = Guesser(1)
    grown(OptTree(threshold=0.0), guesser, 4, depth=3, width=3)
    assert guesser.read < 8


def test_opt_tree_stops_when_a_level_adds_too_little() -> None:
    """E_d - E_(d-1) <= threshold ends the draft behind level d, not before it."""
    guesser, nodes = Guesser(2, sharpness=4.0), 6
    depths = {}
    for threshold in (0.0, 0.1, 0.3, 0.6, 2.0):
        seen, _ = grown(OptTree(threshold), guesser, nodes, depth=8, width=3)
        sums = [0.0]
        for d in range(1, max(seen.depths) + 1):
            shallow = sorted((math.exp(s) for s, e in zip(seen.scores, seen.depths, strict=True) if 0 < e <= d))[
                -nodes:
            ]
            sums.append(sum(shallow))
        gains = [after - before for before, after in itertools.pairwise(sums)]
        assert all(gain > threshold for gain in gains[:-1])
        assert gains[-1] <= threshold or len(gains) == 8
        depths[threshold] = len(gains)
    assert list(depths.values()) == sorted(depths.values(), reverse=True) and depths[2.0] == 1 and depths[0.0] > 2


# -- EAGLE-2 ---------------------------------------------------------------------------------------------------------


def as_published(guesser: Guesser, nodes: int, depth: int, width: int) -> list[Path]:
    """Expansion and re-ranking written out once more, over paths."""
    level = sorted(((t,) for t in range(3)), key=guesser.value, reverse=True)[:width]
    paths = list(level)
    for _ in range(depth - 1):
        fresh = []
        for path in level:
            distribution = guesser.distribution(path)
            fresh += [(*path, token) for token in sorted(range(3), key=lambda t, p=distribution: -p[t])[:width]]
        paths += fresh
        level = sorted(fresh, key=guesser.value, reverse=True)[:width]
    return sorted(paths, key=guesser.value, reverse=True)[:nodes]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("nodes", "depth", "width"), [(4, 2, 2), (6, 3, 2), (9, 4, 3), (3, 4, 1)])
def test_eagle2_is_the_published_procedure(seed: int, nodes: int, depth: int, width: int) -> None:
    guesser = Guesser(seed)
    _, kept = grown(Eagle2(), guesser, nodes, depth, width)
    assert sorted(kept) == sorted(as_published(guesser, nodes, depth, width)) and is_tree(kept)


def test_a_certain_child_never_pushes_out_its_parent() -> None:
    """Draft probability 1.0 makes child and parent equal: the parent, which was made earlier, comes first."""
    seen = Candidates([0])
    seen.add(0, [7, 8], [math.log(0.5), math.log(0.5)])
    seen.add(2, [9], [math.log(0.5)])
    seen.add(1, [6], [math.log(0.5)])
    for count in range(5):
        kept = seen.best(count)
        tree = seen.tree(kept)
        assert len(tree) == count + 1 and kept == [1, 2, 3, 4][:count]
    assert seen.tree([3, 2]).parents == (-1, 0, 1) and seen.tree([3, 2]).tokens == (0, 8, 9)


# -- costs -----------------------------------------------------------------------------------------------------------


def stairs(nodes: int) -> float:
    return 1.0 + 0.3 * ((nodes - 1) // 3)


@pytest.mark.parametrize("cost", [lambda n: 1.0, lambda n: 0.9 + 0.1 * n, stairs, lambda n: 1 + 0.02 * n * n])
@pytest.mark.parametrize("seed", range(4))
def test_pruning_finds_the_tree_of_most_tokens_per_time(seed: int, cost: Callable[[int], float]) -> None:
    """All trees within two levels are tried: their rate is never above that of the pruned one."""
    guesser = Guesser(seed)
    everything = [p for d in (1, 2) for p in itertools.product(range(3), repeat=d)]
    rates = [
        (1 + sum(map(guesser.value, chosen))) / (cost(1 + count) + 0.2)
        for count in range(7)
        for chosen in itertools.combinations(everything, count)
        if is_tree(chosen)
    ]
    values = sorted(map(guesser.value, everything), reverse=True)[:6]
    count, rate = best_count(values, cost, spent=0.2)
    assert rate == pytest.approx(max(rates)) and 0 <= count <= 6


def test_on_a_convex_cost_it_is_the_marginal_rule() -> None:
    values, node = [0.6, 0.36, 0.3, 0.2, 0.1, 0.05, 0.01], 0.08
    count, rate = best_count(values, lambda n: 1 + node * (n - 1))
    assert values[count - 1] > rate * node >= values[count]


def test_free_nodes_are_all_kept_and_expensive_ones_not() -> None:
    assert best_count([0.5, 0.1], lambda n: 1.0)[0] == 2
    assert best_count([0.5, 0.1], lambda n: float(n)) == (0, 1.0)
    seen = Candidates([0])
    seen.add(0, [1, 2], [math.log(0.5), math.log(0.1)])
    assert CostAware(node_cost=2.0).kept(seen, 8) == []
    assert CostAware(node_cost=0.2).kept(seen, 8) == [1]
    assert CostAware(node_cost=0.2, free=1).kept(seen, 8) == [1]
    assert CostAware(node_cost=0.2, free=2).kept(seen, 8) == [1, 2]
    assert CostAware(cost=lambda n: 1.0 + 9 * (n > 2)).kept(seen, 8) == [1]


def test_a_level_is_drafted_while_the_last_one_raised_the_rate() -> None:
    guesser, depths = Guesser(3, sharpness=4.0), []
    for step in (0.0, 0.05, 0.2, 0.5, 3.0):
        growth = CostAware(node_cost=0.0, step_cost=step)
        seen, _ = grown(growth, guesser, 6, depth=8, width=3)
        rates = [1.0]
        for d in range(1, max(seen.depths) + 1):
            values = sorted((math.exp(s) for s, e in zip(seen.scores, seen.depths, strict=True) if 0 < e <= d))[-6:]
            rates.append((1 + sum(values)) / (1 + step * d))
        assert all(after > before for before, after in itertools.pairwise(rates[:-1]))
        assert rates[-1] <= rates[-2] or len(rates) == 9
        depths.append(len(rates) - 1)
    assert depths == sorted(depths, reverse=True) and depths[0] > 3 and depths[-1] == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("opt_tree,threshold=-1", "threshold >= 0"),
        ("opt_tree,threshold=nan", "threshold >= 0"),
        ("opt_tree,threshold=inf", "threshold >= 0"),
        ("cost_aware,step_cost=-1", "step_cost >= 0"),
        ("cost_aware,step_cost=nan", "step_cost >= 0"),
        ("cost_aware,node_cost=nan", "node_cost >= 0"),
        ("cost_aware,node_cost=inf", "node_cost >= 0"),
        ("cost_aware,free=-1", "free >= 0"),
        ("eagle2,width=3", "unknown option 'width' of tree 'eagle2'"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make("tree", spec)


@pytest.mark.parametrize("batch", [1, 3])
def test_nodes_are_looked_at_as_long_as_they_may_pay(batch: int) -> None:
    """The same number of nodes is kept as if all were looked at, for costs with steps and slopes of all kinds."""
    draws, looked_at = random.Random(batch), 0
    for _ in range(300):
        seconds, total = {1: 1.0}, 1.0
        for nodes in sorted(draws.sample(range(2, 90), 6)):
            total += draws.choice([0.0, 0.02, 0.5, 2.0]) * draws.random()
            seconds[nodes] = total
        costs, most = TargetCost(seconds), 40
        values = sorted((draws.random() ** draws.choice([1, 4, 12]) for _ in range(most)), reverse=True)
        paying = PayingNodes(costs, batch, most)
        prefix = list(itertools.takewhile(paying.add, values))
        assert paying.count == paying_count(values, costs, batch) <= max(len(prefix), 1)
        assert paying.start().count == 1
        looked_at += len(prefix)
    assert looked_at < 0.8 * 300 * most, "it stops early"
