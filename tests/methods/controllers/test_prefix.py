"""The prefix scheduler: the set that brute force finds, the first fall, what is cut of which tree, and a simulated
batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from worlds import contexts

from foretoken.core import Budget, Context, Kind, Limits, StepRecord, TokenTree
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.goodput import GoodputController
from foretoken.methods.controllers.outside import ControllerError, check_kept
from foretoken.methods.controllers.prefix import DraftPart, PrefixController, scheduled


def parts_of(survivals: Sequence[Sequence[float]]) -> list[DraftPart]:
    return [DraftPart(tree, (j + 1,), value) for tree, row in enumerate(survivals) for j, value in enumerate(row)]


@pytest.mark.parametrize("seed", range(60))
def test_brute_force_over_all_prefixes_gives_the_same_set(seed: int) -> None:
    """Three requests, three drafts each, steps per second concave in the rows."""
    rng = random.Random(seed)
    survivals = []
    for _ in range(3):
        chances = [rng.random() for _ in range(3)]
        survivals.append([math.prod(chances[: j + 1]) for j in range(3)])
    curve = rng.uniform(0.0, 0.01)
    slope = rng.uniform(0.0, 0.06)

    def steps_per_s(rows: int) -> float:
        return 1.0 - slope * (rows - 3) - curve * (rows - 3) ** 2

    def rate(lengths: Sequence[int]) -> float:
        tokens = 3 + sum(sum(row[:count]) for row, count in zip(survivals, lengths, strict=True))
        return tokens * steps_per_s(3 + sum(lengths))

    best = max(product(range(4), repeat=3), key=rate)
    admitted = scheduled(parts_of(survivals), 3, 3, steps_per_s)
    assert tuple(sum(part.tree == tree for part in admitted) for tree in range(3)) == best
    assert all(part.nodes[0] <= best[part.tree] for part in admitted)


def test_it_stops_at_the_first_fall_not_at_the_best_of_all() -> None:
    seconds = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    parts = parts_of([[0.9, 0.9, 0.9]])
    assert (1 + 2.7) / 2.0 > 1.0  # all three together would pay
    assert scheduled(parts, 1, 1, lambda rows: 1.0 / seconds[rows]) == []
    assert scheduled(parts, 1, 1, lambda rows: 1.0) == parts


def test_equal_survival_keeps_the_order_of_a_path() -> None:
    admitted = scheduled(parts_of([[0.5, 0.5], [0.5, 0.5]]), 2, 2, lambda rows: 1.0 if rows < 5 else 0.1)
    assert [(part.tree, part.nodes) for part in admitted] == [(0, (1,)), (1, (1,))]


class Costed(PrefixController):
    """Rounds that cost a given share of a plain one for every further row."""

    def __init__(self, row: float) -> None:
        super().__init__()
        self.row = row

    def _steps_per_s(self, requests: int, drafted: int):  # type: ignore[no-untyped-def]
        return lambda rows: 1.0 / (1.0 + self.row * (rows - requests))


def kept(row: float, trees: Sequence[TokenTree], beside: Sequence[TokenTree] = ()) -> list[list[int]]:
    return [list(nodes) for nodes in Costed(row).kept(contexts(len(trees)), trees, beside)]


def chain(*survival: float) -> TokenTree:
    return TokenTree((0,) * (len(survival) + 1), tuple(range(-1, len(survival))), survival=(1.0, *survival))


def test_every_request_gets_what_it_is_good_for() -> None:
    assert kept(0.05, [chain(0.9, 0.8, 0.7), chain(0.3, 0.1, 0.0)]) == [[0, 1, 2, 3], [0, 1]]
    assert kept(10.0, [chain(0.9, 0.8), chain(0.3, 0.1)]) == [[0], [0]]
    assert kept(0.0, [chain(0.9, 0.8), chain(0.3, 0.1)]) == [[0, 1, 2], [0, 1, 2]]


def test_other_requests_of_the_round_count() -> None:
    """With more tokens a round, a row that costs a share of a plain round must bring more."""
    trees = [chain(0.5, 0.25)]
    assert kept(0.3, trees) == [[0, 1]] and kept(0.3, trees, [TokenTree.root_only(0)] * 3) == [[0]]


def test_estimates_that_rise_along_a_path_are_held_down() -> None:
    assert kept(0.35, [chain(0.2, 0.9, 0.9)]) == [[0]]
    assert kept(0.25, [chain(0.6, 2.0, 0.1)]) == [[0, 1, 2]]


def test_a_point_tree_loses_nodes_and_keeps_parents() -> None:
    tree = TokenTree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 2), survival=(1.0, 0.8, 0.15, 0.7, 0.1))
    assert kept(0.3, [tree]) == [[0, 1, 3]]


def test_without_estimates_levels_are_cut_by_acceptance() -> None:
    """Also of drawn trees that branch, whose siblings could bias a finer cut."""
    q = torch.full((2, 4), 0.25)
    drawn = TokenTree(
        (0, 1, 2, 3), (-1, 0, 0, 1), Kind.WITHOUT_REPLACEMENT, q, (-1, 0, 0, 1), survival=(1, 0.9, 0.9, 0)
    )
    plain = TokenTree.chain(0, [1, 2, 3])
    controller = Costed(0.15)
    requests = contexts(2)
    for _ in range(200):
        for context in requests:
            controller.observe(context, StepRecord(context.request_id, 4, 3, 1, 2, 0, 0, 0, 1.0, 8, -1, 3))
        controller._digest()
    nodes = controller.kept(requests, [drawn, plain], [])
    assert [list(each) for each in nodes] == [[0, 1, 2], [0, 1]]


def test_probes_stay() -> None:
    tree = TokenTree((0, 1, 2), (-1, 0, 0), probes=(False, False, True), survival=(1.0, 0.0, 0.0))
    assert kept(10.0, [tree, chain(0.5)]) == [[0, 1, 2], [0]]


def test_it_asks_for_estimates_and_the_longest_draft() -> None:
    controller = PrefixController()
    controller.attach(Limits("dspark", 6, 16))
    budgets: list[Budget] = []
    for _ in range(30):
        budgets += controller.budgets(contexts(2))
    assert any(budget.max_depth for budget in budgets)
    assert all(budget.survival for budget in budgets if budget.max_depth)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([[0]], "one list for each"),
        (3, "returned int"),
        ([[0], [0, 2]], "kept node 2 without its parent 1"),
        ([[0], [1]], "must begin with the root"),
        ([[0], [0, 3]], "must begin with the root and ascend"),
        ([[0], [0, 1.0]], "must be a list of nodes"),
    ],
)
def test_what_a_controller_from_outside_may_keep(nodes: object, words: str) -> None:
    class Cutting(Controller):
        name = "cutting"

        def budget(self, context: Context, batch_size: int) -> Budget:
            return Budget()

    with pytest.raises(ControllerError, match=words):
        check_kept(nodes, [chain(0.5), chain(0.5, 0.5)], Cutting())
    check_kept([[0], [0, 1]], [chain(0.5), chain(0.5, 0.5)], Cutting())


# -- a simulated batch -------------------------------------------------------------------------------------------------


def tokens_per_s(
    controller: Controller, draft_s: float, row_s: float, rounds: int = 500, estimates: bool = True
) -> float:
    """A batch of eight in which a draft is now likely and now not, as the drafter knows: mean of the last rounds."""
    rng = random.Random(1)
    requests = contexts(8)
    controller.attach(Limits("dspark", 6, 6))
    tokens, seconds = 0, 0.0
    for number in range(rounds):
        trees, budgets = [], controller.budgets(requests)
        for budget in budgets:
            chance = rng.choice([0.95, 0.2])
            survival = [chance ** (j + 1) for j in range(budget.max_depth)]
            tree = chain(*survival) if survival else TokenTree.root_only(0)
            trees.append(tree)
        drafted = any(len(tree) > 1 for tree in trees)
        chosen = controller.kept(requests, trees, []) if drafted else [[0]] * 8
        rows = sum(map(len, chosen))
        took = draft_s * drafted
        total = (1.0 + row_s * rows + took) * rng.lognormvariate(0.0, 0.03)
        gained = 0
        for context, tree, nodes in zip(requests, trees, chosen, strict=True):
            chance = tree.survival[1] if len(tree) > 1 else 0.0
            count = 0
            while count < len(nodes) - 1 and rng.random() < chance:
                count += 1
            gained += 1 + count
            depth = len(nodes) - 1
            record = StepRecord(
                context.request_id, len(nodes), depth, count, 8, took, total - took, 0.0, total, rows, -1, depth
            )
            controller.observe(context, record)
        if number > rounds // 2:
            tokens, seconds = tokens + gained, seconds + total
    return tokens / seconds


def test_it_beats_one_length_for_all_where_requests_differ() -> None:
    assert tokens_per_s(PrefixController(), 0.1, 0.05) > 1.1 * tokens_per_s(GoodputController(), 0.1, 0.05)


def test_it_decodes_plainly_where_drafts_do_not_pay() -> None:
    plain = 8 / (1 + 0.05 * 8)
    assert tokens_per_s(PrefixController(), 3.0, 0.05) > 0.95 * plain
    assert tokens_per_s(PrefixController(), 0.1, 1.5) > 0.9 * 8 / (1 + 1.5 * 8)
