"""DSpark's confidence may end a draft before a token is drawn, never by what is drawn: the exact distribution of the
whole engine, with the right rule and with one that looks at the token itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import block
from exact_cells import BATCH, CAUGHT, TINY, Reference, differences, reference
from planted import SteadyPrefix

from foretoken.core import Budget, TokenTree
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.parallel import Predictions
from foretoken.methods.trees.operations import first_nodes
from toys import engine, llamas

STOP = 0.3


def survival_after(drafter: DsparkDrafter, prediction: Predictions, tree: TokenTree, node: int) -> float:
    """Survival of a node by the confidence behind its own token."""
    odds = drafter.net.confidences(torch.tensor(tree.tokens[node]), prediction.states[node - 1])  # type: ignore
    return tree.survival[node - 1] * float(torch.sigmoid(odds))


class LooksAtTheToken(DsparkDrafter):
    """Draws a token, asks the confidence head what follows it, and takes the token back if that is not likely."""

    def drafted(self, prediction: Predictions, budget: Budget, depth: int, sharing: int) -> TokenTree:
        tree = super().drafted(prediction, replace(budget, survival=True), depth, sharing)
        dull = [node for node in range(1, len(tree)) if survival_after(self, prediction, tree, node) < STOP]
        return first_nodes(tree, min(dull, default=len(tree)) - 1)


class LateSurvival(DsparkDrafter):
    """The same for the scheduler: states the survival behind each token as that of the token itself."""

    def drafted(self, prediction: Predictions, budget: Budget, depth: int, sharing: int) -> TokenTree:
        tree = super().drafted(prediction, budget, depth, sharing)
        late = [survival_after(self, prediction, tree, node) for node in range(1, len(tree))]
        return replace(tree, survival=[1.0, *late])


@cache
def right() -> Reference:
    return reference(llamas(vocab=4)[0], ("T=1",), lengths=(2, 3))


def difference(kind: type[DsparkDrafter], controller: Controller, batch: int, length: int, **options: float) -> float:
    target = llamas(vocab=4)[0]
    drafter: Drafter = block(kind, target, {"top": 4, "from_anchor": True}, **options)
    assert isinstance(drafter, DsparkDrafter)
    drafter.temperatures = [1.5, 1.2, 1.1, 1.0]
    speculative = engine(target, drafter, None, controller, max_batch=batch)
    speculative.drafting.has_outside = False
    return differences(speculative, right(), ("T=1",), lengths=(length,))["T=1"].difference


def test_dsparks_stop_is_exact() -> None:
    assert difference(DsparkDrafter, ConstantController(), BATCH, 2, stop=STOP) < TINY


def test_a_stop_that_looks_at_the_token_is_caught() -> None:
    assert difference(LooksAtTheToken, ConstantController(), BATCH, 2) > CAUGHT


@pytest.mark.slow
def test_the_prefix_scheduler_is_exact_with_dsparks_confidence() -> None:
    assert difference(DsparkDrafter, SteadyPrefix(), 1, 3) < TINY


def test_the_prefix_scheduler_with_a_late_confidence_is_caught() -> None:
    assert difference(LateSurvival, SteadyPrefix(), 1, 2) > CAUGHT
