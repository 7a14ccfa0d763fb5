"""Which fixed tree should a draft model fill?  Acceptance by trial, what nodes and levels cost here, the best shape.

Sequoia, Chen et al. 2024 (arXiv 2402.12374), sections 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch

from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.tune.tree import REPEATS, DraftCost, Outcome, SizeCost, Workload, compared, target_costs
from foretoken.llm import assemble
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.trees.expansion import expansion_choices
from foretoken.methods.trees.sequoia import BestTrees, solve
from foretoken.methods.trees.shapes import Choice, expected_length, medusa_choices
from foretoken.methods.verifiers.base import Coins, SiblingDistributions, Verifier, rest_of
from foretoken.methods.verifiers.without_replacement import WithoutReplacementVerifier

WIDTH = 8
"""Children of the wide node that is measured."""
CHAIN = [(0,) * depth for depth in range(1, 5)]
BUSH = expansion_choices((4, 2, 1, 1))
"""Two trees of four levels, of 4 and of 28 nodes, whose drafting is timed."""


class PositionalCount(Verifier):
    """Recursive rejection that also counts: how likely was each child of the root to be the accepted one?

    The chance is taken over the rule's coins, not from their outcome, so that every round tells about all ranks.

    Attributes:
        chances: sum over rounds of the chance that the child tried first, second, ... is accepted.
        rounds: rounds with a draft.
    """

    name = "positional_count"
    kinds = frozenset({Kind.WITHOUT_REPLACEMENT, Kind.POINT})

    def __init__(self, width: int) -> None:
        self.chances, self.rounds = [0.0] * width, 0
        self._rule = WithoutReplacementVerifier()

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """Count, then decide as the rule does."""
        children = tree.children[0]
        if children:
            self.rounds += 1
            for rank, chance in enumerate(acceptance_chances(tree, scores, 0)):
                self.chances[rank] += chance
        return self._rule.decide(tree, scores, coins)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The positional acceptance vector."""
        return tuple(chance / max(self.rounds, 1) for chance in self.chances)


def acceptance_chances(tree: TokenTree, scores: Scores, node: int) -> list[float]:
    """Chance of every child of ``node`` to be the accepted one, in the order in which they are tried."""
    rest, drawn, likelihood = scores.p(node), SiblingDistributions(tree), 1.0  # rest: [V]
    found = []
    for child in tree.children[node]:
        token, q = tree.tokens[child], drawn.distribution(child)  # q: [V]
        accepted = min(1.0, float(rest[token]) / (1.0 if q is None else float(q[token])))
        found.append(likelihood * accepted)
        likelihood *= 1.0 - accepted
        rest = rest_of(rest, q, token)
        drawn.remove(child)
    return found


def measured_acceptance(work: Workload, width: int = WIDTH) -> tuple[float, ...]:
    """[width] chance that the child tried k-th is the accepted one, over text that the target writes.

    Raises:
        ValueError: nothing was ever accepted.
    """
    counter = PositionalCount(min(width, work.target.vocab_size))
    wide = _model(work).reshaped([(rank,) for rank in range(len(counter.chances))])
    llm = assemble(work.target, wide, counter, "constant", None)
    for seed, prompt in enumerate(work.prompts):
        llm.generate(list(prompt), max_new_tokens=work.new_tokens, temperature=work.temperature, seed=seed,
                     ignore_eos=True)  # fmt: skip
    if not any(counter.chances):
        raise ValueError("no draft was ever accepted: this draft model does not fit the target")
    return counter.acceptance


def tune(work: Workload, on_progress: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measure acceptance and costs, take the shape of most tokens per time, and compare it."""
    on_progress("measuring acceptance by trial")
    acceptance = measured_acceptance(work)
    rows = [list(acceptance)] * work.depth
    on_progress("timing trees")
    trees = {size: medusa_choices(rows, size) for size in work.sizes}
    text = max(work.prompts, key=len)
    scoring = target_costs(work, trees, text)
    draft = draft_costs(work, text)
    table = solve(acceptance, max(work.sizes), work.depth)
    sizes: dict[int, SizeCost] = {}
    for size in work.sizes:
        if work.shape == "sequoia":
            trees[size] = best_of_size(table, size, scoring[size] + draft.node * size, draft.level)
        depth = max(map(len, trees[size]))
        cost = scoring[size] + draft.node * len(trees[size]) + draft.level * depth
        sizes[size] = SizeCost(cost, expected_length(trees[size], rows))
    best = max(trees, key=lambda size: sizes[size].rate)
    on_progress("comparing")
    speeds = compared(work, trees[best])
    return Outcome(work.drafter.name, trees[best], rows, sizes, speeds, work.shape, work.temperature, draft)


def best_of_size(table: BestTrees, size: int, cost: float, step: float) -> list[Choice]:
    """The tree of at most ``size`` nodes whose depth gives most tokens per time; costs in one unit."""
    depths = range(1, len(table.best))
    return table.choices(size, max(depths, key=lambda d: table.expected_length(size, d) / (cost + step * d)))


@torch.inference_mode()
def draft_costs(work: Workload, text: Sequence[int]) -> DraftCost:
    """What drafting takes: medians of interleaved drafts of two trees."""
    drafter = _model(work)
    times: dict[int, list[float]] = {len(CHAIN): [], len(BUSH): []}
    sequence = work.target.open()
    try:
        work.target.prefill(sequence, list(text[:-1]))
        for _ in range(REPEATS):
            for choices in (CHAIN, BUSH):
                arm = drafter.reshaped(choices)
                sampler = Sampler(SamplingParams(work.temperature), len(text))
                context = Context(0, list(text), len(text), sampler, Rng(0), sequence=sequence)
                arm.start(context)
                for _ in range(2):  # the first one reads what the prefill left
                    began = perf_counter()
                    arm.propose(context, Budget(arm.max_depth, arm.max_nodes))
                    spent = perf_counter() - began
                    work.target.commit(sequence, ())
                times[len(choices)].append(spent)
                arm.finish(context)
    finally:
        work.target.release(sequence)
    few, many = (1e3 * median(times[len(choices)]) for choices in (CHAIN, BUSH))
    node = max(0.0, (many - few) / (len(BUSH) - len(CHAIN)))
    return DraftCost(max(0.0, few / len(CHAIN) - node), node)


def _model(work: Workload) -> ModelDrafter:
    if not isinstance(work.drafter, ModelDrafter):
        raise ValueError(f"{work.drafter.name} draws no siblings: give a draft model")
    return work.drafter
