"""A block drafter gives the same guesses for all places at once and place by place."""

from __future__ import annotations

from typing import Any

import pytest
from block_toys import drafter_of, random_net, started, target

from foretoken.core import Budget
from foretoken.core.sampling import SamplingParams
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.dspark import DsparkDrafter

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dflash": (DflashDrafter, {}),
    "dflash2": (Dflash2Drafter, {"group": 4, "rank": 4, "top": 5}),
    "vanilla": (DsparkDrafter, {"head": "vanilla", "rank": 4, "top": 6}),
    "gated": (DsparkDrafter, {"head": "gated", "rank": 4, "top": 6}),
    "few": (DsparkDrafter, {"head": "vanilla", "rank": 4, "top": 6, "draft_vocab": 9, "own_head": True}),
}
REQUESTS = {
    "greedy": (SamplingParams(), False),
    "seeded": (SamplingParams(temperature=0.9), True),
    "top_p": (SamplingParams(temperature=1.2, top_p=0.6), True),
    "top_k": (SamplingParams(temperature=0.7, top_k=3), True),
    "min_p": (SamplingParams(temperature=1.5, min_p=0.2), True),
}
NODES = 12


def trees_of(kind: Any, net: Any, mode: str, by_path: bool) -> list[Any]:
    """Trees for several texts; ``by_path`` asks node by node."""
    model = target()
    drafter = drafter_of(kind, model, net, nodes=NODES, width=3)
    params, noise = REQUESTS[mode]
    guesses = drafter.predictions

    def tables(*args: Any) -> Any:
        table = guesses(*args)
        table.by_path = table.by_path or by_path
        return table

    drafter.predictions = tables
    trees = []
    for seed in range(4):
        context = started(drafter, model, [3, 1, 4, 1, 5 + seed], params, seed, noise)
        tree = drafter.propose(context, Budget(4, NODES))
        trees.append({tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))})
    return trees


@pytest.mark.parametrize("mode", REQUESTS)
@pytest.mark.parametrize("case", CASES)
def test_the_table_is_what_the_rows_say(case: str, mode: str) -> None:
    kind, changes = CASES[case]
    net = random_net(kind, target(), **changes)
    table = trees_of(kind, net, mode, by_path=False)
    assert table == trees_of(kind, net, mode, by_path=True)
    assert sum(map(len, table)) > 8


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_a_table_of_other_tokens_is_seen(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the row of another token before."""
    kind, changes = CASES["dflash2"]
    net = random_net(kind, target(), **changes)
    rows = trees_of(kind, net, mode, by_path=True)
    monkeypatch.setattr(
        "foretoken.methods.drafters.pairs.PairPredictions._row_of", lambda self, path: len(path) * self.ids.shape[1]
    )
    assert trees_of(kind, net, mode, by_path=False) != rows


def test_rows_that_remember_are_asked_along_their_paths() -> None:
    """The head that sees all tokens before, and a stop by what a path has survived."""
    model = target()
    for head, stop in (("rnn", 0.0), ("vanilla", 0.3), ("vanilla", 0.0)):
        drafter = drafter_of(DsparkDrafter, model, random_net(DsparkDrafter, model, head=head, rank=4), stop=stop)
        context = started(drafter, model)
        drafter.follow([context])
        (guesses,) = drafter._guess([context], 3)
        assert guesses.by_path is (head == "rnn" or stop > 0)


def test_a_seeded_table_is_of_the_noise() -> None:
    """Another seed, another tree."""
    kind, changes = CASES["dflash2"]
    model, net = target(), random_net(kind, target(), **changes)
    drafter = drafter_of(kind, model, net, nodes=NODES, width=3)
    trees = set()
    for seed in range(6):
        context = started(drafter, model, params=SamplingParams(temperature=1.0), seed=seed, noise=True)
        trees.add(tuple(drafter.propose(context, Budget(4, NODES)).tokens))
    assert len(trees) > 3
