"""Planted errors in rules, drafters, models and randomness: the distribution test of the matrix must catch every
one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from matrix import SAMPLED_MODES
from torch import Tensor

from foretoken import registry
from foretoken.controllers.base import Controller
from foretoken.controllers.confidence import ConfidenceController
from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.drafters.base import Drafter, Traits
from foretoken.drafters.model import ModelDrafter
from foretoken.models.base import SequenceState
from foretoken.verifiers.base import Coins, Verifier, draw, drawn_chance, leftover, residual, scaled
from foretoken.verifiers.block import pass_chance
from toys import CAUGHT, FALSE_ALARM, MarkovTable, engine, joint_distribution, next_logits, sampled_p_value, tables

PROMPT = [0, 1, 2, 3, 0, 1]
TOKENS = 4
SAMPLES = 1000


def models() -> tuple[MarkovTable, MarkovTable]:
    """A target and a draft model that is mostly something else, so that errors weigh much."""
    return tables(closeness=0.1, seed=3)


def chance_of(
    drafter: Drafter,
    verifier: Verifier | None = None,
    controller: Controller | None = None,
    target: MarkovTable | None = None,
    mode: str = "T=1",
) -> float:
    """The p-value of the distribution test with these parts."""
    target = target or models()[0]
    params = {mode: SAMPLED_MODES[mode]}
    distributions = {mode: joint_distribution(target, params[mode], PROMPT, TOKENS)}
    speculative = engine(target, drafter, verifier, controller, max_batch=4)
    return sampled_p_value(speculative, params, distributions, PROMPT, TOKENS, SAMPLES)


# -- rules -----------------------------------------------------------------------------------------------------------


class ChainRule(Verifier):
    """Token verification with its parts exchanged for others."""

    name = "rejection"
    kinds = frozenset({Kind.IID})
    chains_only = True

    def accepts(self, p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return coins.accept(float(p[x]), float(q[x]))

    def rest(self, p: Tensor, q: Tensor) -> Tensor:
        return residual(p, q)

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        for node in range(1, len(tree)):
            p, q, x = scores.p(node - 1), tree.distribution(node), tree.tokens[node]
            assert q is not None
            if not self.accepts(p, q, x, coins):
                return Verdict(tuple(range(1, node)), coins.draw(self.rest(p, q)), False)
        return Verdict(tuple(range(1, len(tree))), coins.draw(scores.p(len(tree) - 1)), True)


class Swapped(ChainRule):
    def accepts(self, p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return coins.accept(float(q[x]), float(p[x]))


class NoResidual(ChainRule):
    def rest(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class AcceptsAll(ChainRule):
    def accepts(self, p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return True


class FirstFailureBlock(ChainRule):
    """Block verification's tests, from the front, stopping at the first that fails."""

    name = "block"

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        last = len(tree) - 1
        keep = 1.0
        for node in range(1, last + 1):
            p, x = scores.p(node - 1), tree.tokens[node]
            before, keep = keep, scaled(keep, float(p[x]), drawn_chance(tree, node))
            chance = keep
            if node < last:
                rest = leftover(scores.p(node), tree.distribution(node + 1), tree.tokens[node + 1], keep)
                chance = pass_chance(float(rest.sum()), keep)
            if not coins.accept(chance):
                rest = leftover(p, tree.distribution(node), x, before)
                return Verdict(tuple(range(1, node)), coins.draw(rest if float(rest.sum()) > 0 else p), False)
        return Verdict(tuple(range(1, last + 1)), coins.draw(scores.p(last)), True)


def test_the_right_rule_passes() -> None:
    assert chance_of(ModelDrafter(models()[1], k=3), ChainRule()) > FALSE_ALARM


@pytest.mark.parametrize("rule", [Swapped, NoResidual, AcceptsAll, FirstFailureBlock])
def test_wrong_rules_are_caught(rule: type[Verifier]) -> None:
    assert chance_of(ModelDrafter(models()[1], k=3), rule()) < CAUGHT


# -- drafters --------------------------------------------------------------------------------------------------------


class PlainDrafter(Drafter):
    """A chain of draws or a level of siblings in its plainest form, with every step open to error."""

    name = "model"

    def __init__(self, model: MarkovTable, width: int = 1, depth: int = 3) -> None:
        self.model, self.width, self.max_depth = model, width, depth
        self.traits = Traits(Kind.WITHOUT_REPLACEMENT if width > 1 else Kind.IID, draws_trees=width > 1)

    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return draw(distribution, rng.uniform())

    def order(self, distribution: Tensor, siblings: list[int]) -> list[int]:
        return siblings

    def ends(self, distribution: Tensor, token: int, budget: Budget) -> tuple[bool, bool]:
        """Whether the token stays in the draft, and whether the draft goes on."""
        return True, not budget.stops_after(distribution, float(distribution[token]))

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        return self.siblings(context) if self.width > 1 else self.chain(context, budget)

    def distribution(self, context: Context, drafts: Sequence[int]) -> Tensor:
        prefix = [*context.tokens, *drafts]
        distribution: Tensor = context.maker.distribution(next_logits(self.model, prefix), prefix)
        return distribution

    def chain(self, context: Context, budget: Budget) -> TokenTree:
        drafts: list[int] = []
        distributions: list[Tensor] = []
        goes_on = True
        while goes_on and len(drafts) < min(self.max_depth, budget.max_depth):
            distribution = self.distribution(context, drafts)
            token = self.choose(distribution, context.rng)
            stays, goes_on = self.ends(distribution, token, budget)
            if stays:
                drafts.append(token)
                distributions.append(distribution)
        return TokenTree.chain(context.root, drafts, torch.stack(distributions) if distributions else None)

    def siblings(self, context: Context) -> TokenTree:
        distribution = self.distribution(context, ())
        rest, tokens = distribution.clone(), []
        for _ in range(self.width):
            tokens.append(self.choose(rest, context.rng))
            rest[tokens[-1]] = 0.0
        tokens = self.order(distribution, tokens)
        none, all_ = [-1], [0] * self.width
        return TokenTree((context.root, *tokens), (*none, *all_), self.traits.kind, distribution[None], (*none, *all_))


class ArgmaxWithSoftDistribution(PlainDrafter):
    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return int(distribution.argmax())


class FilteredDrawUnfilteredDistribution(PlainDrafter):
    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return draw(distribution.where(distribution >= distribution.topk(2).values[-1], 0.0), rng.uniform())


class SharperDraw(PlainDrafter):
    """Draws at another temperature than it says."""

    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return draw(distribution**2, rng.uniform())


class DropsUnlikely(PlainDrafter):
    """A confidence stop that takes the unlikely token out of the draft."""

    def ends(self, distribution: Tensor, token: int, budget: Budget) -> tuple[bool, bool]:
        stays = float(distribution[token]) >= 0.3
        return stays, stays


class DropsAtStop(PlainDrafter):
    """The same by the controller's threshold."""

    def ends(self, distribution: Tensor, token: int, budget: Budget) -> tuple[bool, bool]:
        stays = not budget.stops_after(distribution, float(distribution[token]))
        return stays, stays


class SortedSiblings(PlainDrafter):
    def order(self, distribution: Tensor, siblings: list[int]) -> list[int]:
        return sorted(siblings, key=lambda token: -float(distribution[token]))


def without_replacement() -> Verifier:
    verifier: Verifier = registry.make("verifier", "without_replacement")
    return verifier


@pytest.mark.parametrize("controller", [None, ConfidenceController(0.4)], ids=["constant", "confidence"])
def test_the_plain_drafter_passes(controller: Controller | None) -> None:
    assert chance_of(PlainDrafter(models()[1]), None, controller) > FALSE_ALARM


@pytest.mark.parametrize("verifier", [None, without_replacement()], ids=["traversal", "without_replacement"])
def test_plain_siblings_pass(verifier: Verifier | None) -> None:
    assert chance_of(PlainDrafter(models()[1], width=2), verifier) > FALSE_ALARM


@pytest.mark.parametrize(
    "drafter", [ArgmaxWithSoftDistribution, FilteredDrawUnfilteredDistribution, SharperDraw, DropsUnlikely]
)
def test_wrong_drafters_are_caught(drafter: type[PlainDrafter]) -> None:
    assert chance_of(drafter(models()[1])) < CAUGHT


def test_a_confidence_stop_that_drops_is_caught() -> None:
    assert chance_of(DropsAtStop(models()[1]), None, ConfidenceController(0.4)) < CAUGHT


def test_sorted_siblings_are_caught() -> None:
    assert chance_of(SortedSiblings(models()[1], width=2), without_replacement()) < CAUGHT


# -- models, prefixes, randomness ------------------------------------------------------------------------------------


class ForgetfulTarget(MarkovTable):
    """Loses the last accepted token."""

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        super().commit(sequence, path if len(path) < 2 or not sequence.tokens else list(path)[:-1])


class UnwoundTree(MarkovTable):
    """Scores a tree as if every node hung from the one before it."""

    @staticmethod
    def _prefix(sequence: SequenceState, node: int) -> list[int]:
        return sequence.tokens + sequence.scratch_tokens[: node + 1]


@pytest.mark.parametrize(("wrong", "tree"), [(ForgetfulTarget, ""), (UnwoundTree, "2x2x1")])
def test_wrong_models_are_caught(wrong: type[MarkovTable], tree: str) -> None:
    right, draft = models()
    target = wrong(right.table, right.vocab_size)
    params, distributions = (
        {"T=1": SAMPLED_MODES["T=1"]},
        {"T=1": joint_distribution(right, SAMPLED_MODES["T=1"], PROMPT, TOKENS)},
    )
    speculative = engine(target, ModelDrafter(draft, k=3, tree=tree))
    assert sampled_p_value(speculative, params, distributions, PROMPT, TOKENS, SAMPLES) < CAUGHT


@pytest.mark.parametrize("mode", ["penalties", "processor"])
def test_distributions_of_the_committed_prefix_only_are_caught(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ModelDrafter(tables(closeness=0.7, seed=3)[1], k=3)  # deep nodes are reached often
    assert chance_of(drafter, mode=mode) > FALSE_ALARM
    monkeypatch.setattr(Scores, "node_prefix", lambda self, node: self.prefix)
    assert chance_of(drafter, mode=mode) < CAUGHT


def repeated(method: Callable[[Rng], float]) -> Callable[[Rng], float]:
    """Every uniform is handed out twice."""
    last: dict[Rng, float] = {}

    def uniform(self: Rng) -> float:
        if self in last:
            return last.pop(self)
        last[self] = method(self)
        return last[self]

    return uniform


def test_reused_randomness_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rng, "uniform", repeated(Rng.uniform))
    assert chance_of(PlainDrafter(models()[1])) < CAUGHT
