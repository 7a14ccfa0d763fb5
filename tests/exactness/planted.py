"""Planted errors of rules, drafters, models and randomness, and what the cells of the matrix make of them.

    PYTHONPATH=tests:tests/exactness python tests/exactness/planted.py

prints the figures of docs/explain/exactness.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from exact_cells import BATCH, Reference, differences, reference
from matrix import SAMPLED_BATCH, sampled_chance
from torch import Tensor

from foretoken import registry
from foretoken.core import Budget, Context, Kind, Rng, Scores, StepRecord, TokenTree, Verdict
from foretoken.engine.loop import Engine
from foretoken.methods.controllers import prefix
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.controllers.prefix import DraftPart, PrefixController
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.verifiers.base import Coins, Verifier, draw, drawn_probability, leftover, residual, scaled
from foretoken.methods.verifiers.block import pass_probability
from foretoken.models.base import Feed, LanguageModel, Rows, SequenceState
from toys import MarkovTable, engine, next_logits, tables


def models(closeness: float = 0.1) -> tuple[MarkovTable, MarkovTable]:
    """A target and a draft model that is mostly something else, so that errors weigh much."""
    return tables(closeness=closeness, seed=3)


# -- rules -----------------------------------------------------------------------------------------------------------


class ChainRule(Verifier):
    """Token verification with its parts exchanged for others."""

    name = "rejection"
    kinds = frozenset({Kind.IID})
    chains_only = True

    def accepts(self, p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return coins.accept(float(p[x]), float(q[x]))

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return residual(p, q)

    def bonus_row(self, tree: TokenTree) -> int:
        return len(tree) - 1

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        for node in range(1, len(tree)):
            p, q, x = scores.p(node - 1), tree.distribution(node), tree.tokens[node]
            assert q is not None
            if not self.accepts(p, q, x, coins):
                return Verdict(tuple(range(1, node)), coins.draw(self.residual(p, q)), False)
        return Verdict(tuple(range(1, len(tree))), coins.draw(scores.p(self.bonus_row(tree))), True)


class Swapped(ChainRule):
    def accepts(self, p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return coins.accept(float(q[x]), float(p[x]))


class NoResidual(ChainRule):
    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class ResidualAsItIs(ChainRule):
    """The residual is not normalised: a uniform beyond the sum finds the last token."""

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        rest = (p - q).clamp(min=0.0)
        rest[-1] += 1.0 - rest.sum()
        return rest


class BonusOfTheRowBefore(ChainRule):
    def bonus_row(self, tree: TokenTree) -> int:
        return max(len(tree) - 2, 0)


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
            before, keep = keep, scaled(keep, float(p[x]), drawn_probability(tree, node))
            chance = keep
            if node < last:
                rest = leftover(scores.p(node), tree.distribution(node + 1), tree.tokens[node + 1], keep)
                chance = pass_probability(float(rest.sum()), keep)
            if not coins.accept(chance):
                rest = leftover(p, tree.distribution(node), x, before)
                return Verdict(tuple(range(1, node)), coins.draw(rest if float(rest.sum()) > 0 else p), False)
        return Verdict(tuple(range(1, last + 1)), coins.draw(scores.p(last)), True)


# -- drafters --------------------------------------------------------------------------------------------------------


class PlainDrafter(Drafter):
    """A chain of draws or a level of siblings in its plainest form, with every step open to error."""

    name = "model"

    def __init__(self, model: LanguageModel, width: int = 1, depth: int = 3) -> None:
        self.model, self.width, self.max_depth = model, width, depth
        self.traits = Traits(Kind.WITHOUT_REPLACEMENT if width > 1 else Kind.IID, draws_trees=width > 1)

    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return draw(distribution, rng.uniform())

    def order(self, distribution: Tensor, siblings: list[int]) -> list[int]:
        return siblings

    def stated(self, distributions: Tensor) -> Tensor:
        """The distributions that it says the draws of a chain came from."""
        return distributions

    def ends(self, distribution: Tensor, token: int, budget: Budget) -> tuple[bool, bool]:
        """Whether the token stays in the draft, and whether the draft goes on."""
        return True, not budget.stops_after(distribution, float(distribution[token]))

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        if not budget.max_depth:
            return TokenTree.chain(context.root, [])
        return self.siblings(context) if self.width > 1 else self.chain(context, budget)

    def distribution(self, context: Context, drafts: Sequence[int]) -> Tensor:
        prefix = [*context.tokens, *drafts]
        distribution: Tensor = context.sampler.distribution(next_logits(self.model, prefix), prefix)
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
        return TokenTree.chain(context.root, drafts, self.stated(torch.stack(distributions)) if drafts else None)

    def siblings(self, context: Context) -> TokenTree:
        distribution = self.distribution(context, ())
        rest, tokens = distribution.clone(), []
        for _ in range(min(self.width, int((distribution > 0).sum()))):
            tokens.append(self.choose(rest, context.rng))
            rest[tokens[-1]] = 0.0
        tokens = self.order(distribution, tokens)
        none, all_ = [-1], [0] * len(tokens)
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


class DistributionOfTheWrongRow(PlainDrafter):
    """Every draw is said to come from the distribution of the place after it."""

    def stated(self, distributions: Tensor) -> Tensor:
        return distributions.roll(-1, 0)


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


class Foreseeing(PlainDrafter):
    """A chain whose survival is estimated, as it truly is, from the tokens before each position."""

    late = 0
    """The tokens that an estimate sees beyond those."""

    def __init__(self, model: LanguageModel, width: int = 1, depth: int = 3) -> None:
        super().__init__(model, width, depth)
        self.right = models()[0]

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        tree = super().propose(context, budget)
        survival = [1.0]
        for node in range(1, len(tree)):
            prefix = [*context.tokens, *tree.tokens[1 : min(node + self.late, len(tree))]]
            p = context.sampler.distribution(next_logits(self.right, prefix), prefix)
            q = context.sampler.distribution(next_logits(self.model, prefix), prefix)
            survival.append(survival[-1] * float(torch.minimum(p, q).sum()))
        return replace(tree, survival=survival)


class SeesItself(Foreseeing):
    """The estimate of a token's survival looks at this token."""

    late = 1


class SteadyPrefix(PrefixController):
    """The prefix scheduler with costs that do not change: a draft token costs ``first`` of a request's share of a
    plain round, and ``further`` where there are more of them than requests."""

    first = further = 0.4

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        return [Budget(3, 3, survival=True)] * len(contexts)

    def _steps_per_s(self, requests: int, drafted: int) -> Callable[[int], float]:
        def steps_per_s(rows: int) -> float:
            more = rows / requests - 1.0
            return 1.0 / (1.0 + self.first * min(more, 1.0) + self.further * max(more - 1.0, 0.0))

        return steps_per_s

    def observe(self, context: Context, record: StepRecord) -> None:
        """What it learns from others cannot be enumerated."""


class JumpyPrefix(SteadyPrefix):
    """Where the first row of a request costs more than it brings, and the further ones next to nothing."""

    first, further = 0.8, 0.05


def best_of_all(
    candidates: Sequence[DraftPart], requests: int, rows: int, steps_per_s: Callable[[int], float]
) -> list[DraftPart]:
    """The prefixes with the most tokens per second, although shorter ones lower them."""
    ordered = sorted(candidates, key=lambda candidate: candidate.order)
    rates = [
        (requests + sum(part.gain for part in ordered[:count])) * steps_per_s(rows + count)
        for count in range(len(ordered) + 1)
    ]
    return ordered[: rates.index(max(rates))]


def retrospective_search() -> AbstractContextManager[Any]:
    return mock.patch.object(prefix, "scheduled", best_of_all)


def without_replacement() -> Verifier:
    verifier: Verifier = registry.make("verifier", "without_replacement")
    return verifier


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


class TemperedTwice(MarkovTable):
    """Logits that had been divided by a temperature of .7 before the pipeline divides them."""

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        return [Rows(rows.logits / 0.7) for rows in super().forward(feeds, taps)]


def committed_prefix_only() -> AbstractContextManager[Any]:
    """Penalties and processors that do not see the drafts before a node."""
    return mock.patch.object(Scores, "node_prefix", lambda self, node: self.prefix)


def reused_uniforms() -> AbstractContextManager[Any]:
    """Every uniform is handed out twice."""
    last: dict[Rng, float] = {}
    fresh = Rng.uniform

    def uniform(self: Rng) -> float:
        if self in last:
            return last.pop(self)
        last[self] = fresh(self)
        return last[self]

    return mock.patch.object(Rng, "uniform", uniform)


# -- the cells -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell of the matrix, as it is or with one part exchanged.

    Attributes:
        drafter: makes the drafter of the draft model.
        verifier: makes the rule; ``None`` leaves the choice to the engine.
        target: the class of the target; the right one is a ``MarkovTable``.
        plant: what is patched while the engine runs.
        mode: the sampling that a sampled cell looks at; an exact one looks at all.
        closeness: of the draft model to the target.
        exact: whether the outcomes can be enumerated, which they cannot be with randomness of another kind.
        alone: whether requests depend on those beside them: then one at a time is enumerated, with longer texts.
        batch: requests at a time in the sampled cell.
    """

    drafter: Callable[[LanguageModel], Drafter] = PlainDrafter
    verifier: Callable[[], Verifier | None] = lambda: None
    controller: Callable[[], Controller | None] = lambda: None
    target: type[MarkovTable] = MarkovTable
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    mode: str = "T=1"
    closeness: float = 0.1
    exact: bool = True
    alone: bool = False
    batch: int = SAMPLED_BATCH

    def engine(self, batch: int) -> Engine:
        right, draft = models(self.closeness)
        target = self.target(right.table, right.vocab_size)
        built = engine(target, self.drafter(draft), self.verifier(), self.controller(), max_batch=batch)
        built.drafting.has_outside = False  # a lie about q is to be seen in what is written, not where it is proposed
        return built

    def difference(self, right: Reference) -> float:
        """The total variation that the exact cell finds, the largest of all sampling modes."""
        speculative = self.engine(1 if self.alone else BATCH)
        with self.plant():
            if self.alone:
                return differences(speculative, right, (self.mode,), lengths=(3,))[self.mode].difference
            return max(result.difference for result in differences(speculative, right).values())

    def chance(self) -> float:
        """The p-value of the sampled cell."""
        speculative = self.engine(self.batch)
        right = models()[0]
        with self.plant():
            return sampled_chance(speculative, right, self.mode)


def chain(draft: LanguageModel) -> Drafter:
    return ModelDrafter(draft, k=3)


def confident() -> Controller:
    return ConfidenceController(0.4, adapt=False)  # what it learns from others cannot be enumerated


def siblings(kind: type[PlainDrafter] = PlainDrafter) -> Callable[[LanguageModel], Drafter]:
    return lambda draft: kind(draft, width=2)


RIGHT = {
    "token verification": Cell(chain, ChainRule),
    "a plain drafter": Cell(),
    "a plain drafter with a confidence stop": Cell(controller=confident),
    "plain siblings, traversal": Cell(siblings()),
    "plain siblings, without replacement": Cell(siblings(), without_replacement),
    "the prefix scheduler": Cell(Foreseeing, controller=SteadyPrefix, alone=True),
    "the prefix scheduler, where costs jump": Cell(Foreseeing, controller=JumpyPrefix, alone=True),
    "penalties": Cell(chain, mode="penalties", closeness=0.7),
    "processor": Cell(chain, mode="processor", closeness=0.7),
}
PLANTED = {
    "p and q swapped": Cell(chain, Swapped),
    "no residual": Cell(chain, NoResidual),
    "residual not normalised": Cell(chain, ResidualAsItIs),
    "bonus from the row before": Cell(chain, BonusOfTheRowBefore, closeness=0.7),
    "everything accepted": Cell(chain, AcceptsAll),
    "block rule stops at its first failure": Cell(chain, FirstFailureBlock),
    "argmax drafts with a soft q": Cell(ArgmaxWithSoftDistribution),
    "filtered drafts with an unfiltered q": Cell(FilteredDrawUnfilteredDistribution),
    "drafts of another temperature than q": Cell(SharperDraw),
    "q of the wrong row": Cell(DistributionOfTheWrongRow),
    "unlikely draft taken back": Cell(DropsUnlikely),
    "draft taken back at a confidence stop": Cell(DropsAtStop, controller=confident),
    "prefixes by an estimate that sees the draft": Cell(SeesItself, controller=SteadyPrefix, alone=True, batch=1),
    "best prefixes found in retrospect": Cell(
        Foreseeing, controller=JumpyPrefix, plant=retrospective_search, alone=True, batch=1
    ),
    "siblings sorted after the draw": Cell(siblings(SortedSiblings), without_replacement),
    "target loses the last accepted token": Cell(chain, target=ForgetfulTarget),
    "tree scored as a chain": Cell(lambda draft: ModelDrafter(draft, tree="2x2x1"), target=UnwoundTree),
    "temperature applied twice": Cell(chain, target=TemperedTwice),
    "penalties blind to drafts": Cell(chain, plant=committed_prefix_only, mode="penalties", closeness=0.7),
    "processor blind to drafts": Cell(chain, plant=committed_prefix_only, mode="processor", closeness=0.7),
    "uniforms used twice": Cell(plant=reused_uniforms, exact=False),
}


def main() -> None:
    """Print the table."""
    right = reference(models()[0])
    print("| planted error | difference in the exact cell | p-value of the sampled cell |\n|---|---|---|")
    for cells in (RIGHT, PLANTED):
        for name, cell in cells.items():
            exact = f"{cell.difference(right):.1g}" if cell.exact else "(none: it is an error of the numbers drawn)"
            print(f"| {'none: ' * (cells is RIGHT)}{name} | {exact} | {cell.chance():.1g} |", flush=True)


if __name__ == "__main__":
    main()
