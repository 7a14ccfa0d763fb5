"""Planted errors in rules, drafters, models and randomness: cells of the matrix, at their own size, must catch every
one.  ``planted.py`` prints what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from exact_cells import BATCH, CAUGHT, TINY, Reference, differences, reference
from matrix import Pair, pairs, toy_models
from planted import PLANTED, RIGHT, models
from torch import Tensor

from foretoken.core import Kind
from foretoken.models.base import Feed, LanguageModel, Rows
from toys import CAUGHT as UNLIKELY
from toys import FALSE_ALARM, engine

PROPOSING = [pair for pair in pairs(greedy=False) if pair.auto and not pair.races and not pair.learns]
DRAWN = [
    pair
    for pair in PROPOSING
    if any(kind is not Kind.POINT for kind, _ in pair.proposals)
    # An inner rule draws in some; a router tries the member that finds its drafts in the text first.
    and not {pair.drafter, pair.case.label} & {"cascade", "known", "staged", "router"}
]


@cache
def right() -> Reference:
    return reference(models()[0])


@pytest.mark.parametrize("name", RIGHT)
def test_right_cells_pass(name: str) -> None:
    cell = RIGHT[name]
    assert cell.difference(right()) < TINY
    assert cell.chance() > FALSE_ALARM


@pytest.mark.parametrize("name", [name for name, cell in PLANTED.items() if cell.exact])
def test_planted_errors_are_seen_by_the_exact_cell(name: str) -> None:
    assert PLANTED[name].difference(right()) > CAUGHT


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_seen_by_the_sampled_cell(name: str) -> None:
    assert PLANTED[name].chance() < UNLIKELY


# -- every cell sees errors of its own --------------------------------------------------------------------------------


@cache
def own(network: bool) -> Reference:
    pair = next(pair for pair in PROPOSING if pair.case.network == network)
    return reference(toy_models(pair.case)[0])


def largest(pair: Pair, target: LanguageModel, draft: LanguageModel) -> float:
    speculative = engine(target, pair.case.build(target, draft), pair.make_verifier(), max_batch=BATCH)
    return max(result.difference for result in differences(speculative, own(pair.case.network)).values())


@pytest.mark.parametrize("pair", PROPOSING, ids=lambda pair: pair.id)
def test_every_cell_sees_scores_of_the_wrong_node(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is scored as its parent is."""
    target, draft = toy_models(pair.case)
    own(pair.case.network)
    forward = type(target).forward

    def shifted(self: Any, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        outputs = forward(self, feeds, taps)
        if self is target:
            for index, (feed, rows) in enumerate(zip(feeds, outputs, strict=True)):
                parents = feed.parents or range(-1, len(feed.tokens) - 1)
                if len(rows.logits) == len(feed.tokens) > 1:
                    outputs[index] = replace(rows, logits=rows.logits[[max(parent, 0) for parent in parents]])
        return outputs

    monkeypatch.setattr(type(target), "forward", shifted)
    assert largest(pair, target, draft) > CAUGHT


@pytest.mark.parametrize("pair", DRAWN, ids=lambda pair: pair.id)
def test_every_cell_sees_draws_from_something_else_than_q(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = toy_models(pair.case)
    own(pair.case.network)
    called = planted_draws(monkeypatch)
    assert largest(pair, target, draft) > CAUGHT
    assert called


def planted_draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All functions that drafters draw with are given the square of the distribution; which of them were called."""
    import sys

    from foretoken.methods.drafters import drawing

    called: list[str] = []
    for name in ("draw_iid", "draw_each", "draw_without_replacement"):
        right_draw = getattr(drawing, name)

        def wrong(distribution: Tensor, *more: Any, draw: Any = right_draw, name: str = name) -> Any:
            called.append(name)
            return draw(distribution**2, *more)

        for module in [m for key, m in sys.modules.items() if key.startswith("foretoken.methods.drafters")]:
            if getattr(module, name, None) is right_draw:
                monkeypatch.setattr(module, name, wrong)
    return called


@pytest.mark.slow
def test_subtrees_that_share_their_draws_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traversal comes back from a rejected subtree to the next: tokens drawn once for both are no fresh draws there."""
    import foretoken.methods.drafters.drawn_tree as drawn_tree

    pair = next(pair for pair in PROPOSING if pair.drafter == "medusa" and pair.case.label == "wor-tree-fresh")
    target, draft = toy_models(pair.case)
    assert largest(pair, target, draft) < TINY
    draws: dict[Any, list[int]] = {}
    alive: list[Any] = []  # so that no two contexts have one id
    right_one = drawn_tree.draw_without_replacement

    def shared(distribution: Tensor, count: int, context: Any) -> list[int]:
        key = (id(context), len(context.tokens))
        drawn = draws.get(key)
        if drawn is None:  # the root's own children
            alive.append(context)
            draws[key] = []
        elif len(drawn) >= count:
            return drawn[:count]
        fresh = right_one(distribution, count, context)
        draws[key] = [] if drawn is None else fresh
        return fresh

    monkeypatch.setattr(drawn_tree, "draw_without_replacement", shared)
    monkeypatch.setattr(drawn_tree, "draw_iid", shared)
    assert largest(pair, target, draft) > CAUGHT
