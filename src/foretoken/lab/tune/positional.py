"""The best fixed tree for a draft model, from measured acceptance and the costs of nodes and levels.

Sequoia, Chen et al. 2024 (arXiv 2402.12374), sections 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.costs import TargetCost
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.timing import Stopwatch, runs_of
from foretoken.lab.tune.choices import with_option
from foretoken.lab.tune.tree import REPEATS, SIZES, DraftCost, SizeCost, TunedTree, compared, target_costs, target_of
from foretoken.lab.workload import Workload
from foretoken.llm import assemble
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.trees.expansion import expansion_choices
from foretoken.methods.trees.sequoia import BestTrees, best_shape, solve
from foretoken.methods.trees.shapes import Choice, expected_length, medusa_choices
from foretoken.methods.verifiers.base import Coins, SiblingDistributions, Verifier, rest_of
from foretoken.methods.verifiers.without_replacement import WithoutReplacementVerifier
from foretoken.registry import find, options_of, parse_spec


class PositionalCount(Verifier):
    """Recursive rejection that also sums the acceptance probability of each child of the root.

    The probability is computed, not sampled, so that every round informs all ranks.

    Attributes:
        probabilities: sum over rounds of the probability that the child tried first, second, ... is accepted.
        rounds: rounds with a draft.
    """

    name = "positional_count"
    kinds = frozenset({Kind.WITHOUT_REPLACEMENT, Kind.POINT})

    def __init__(self, width: int) -> None:
        self.probabilities, self.rounds = [0.0] * width, 0
        self._rule = WithoutReplacementVerifier()

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        children = tree.children[0]
        if children:
            self.rounds += 1
            for rank, probability in enumerate(acceptance_probabilities(tree, scores, 0)):
                self.probabilities[rank] += probability
        return self._rule.decide(tree, scores, coins)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The positional acceptance vector."""
        return tuple(total / max(self.rounds, 1) for total in self.probabilities)


def acceptance_probabilities(tree: TokenTree, scores: Scores, node: int) -> list[float]:
    """Acceptance probability of every child of ``node``, in the order of trial."""
    rest, drawn, likelihood = scores.p(node), SiblingDistributions(tree), 1.0  # rest: [V]
    probabilities = []
    for child in tree.children[node]:
        token, q = tree.tokens[child], drawn.distribution(child)  # q: [V]
        accepted = min(1.0, float(rest[token]) / (1.0 if q is None else float(q[token])))
        probabilities.append(likelihood * accepted)
        likelihood *= 1.0 - accepted
        rest = rest_of(rest, q, token)
        drawn.remove(child)
    return probabilities


def measured_acceptance(work: Workload, drafter: ModelDrafter, width: int = 8) -> tuple[float, ...]:
    """Probability [width] that the child tried k-th is the accepted one, over text that the target writes.  Raises
    ``ValueError`` if none was ever accepted."""
    counter = PositionalCount(min(width, work.target.vocab_size))
    wide = drafter.reshaped([(rank,) for rank in range(len(counter.probabilities))])
    llm = assemble(work.target, wide, counter, "constant", None)
    for seed, prompt in enumerate(work.prompts):
        llm.generate(list(prompt), max_new_tokens=work.new_tokens, temperature=work.temperature, seed=seed,
                     ignore_eos=True)  # fmt: skip
    if not any(counter.probabilities):
        raise ValueError("no draft was ever accepted: this draft model does not fit the target")
    return counter.acceptance


def tune(
    work: Workload,
    drafter: ModelDrafter,
    sizes: Sequence[int] = SIZES,
    shape: str = "sequoia",
    depth: int = 8,
    tell: Callable[[str], None] = lambda _: None,
) -> TunedTree:
    """Measure acceptance and costs, choose the tree with the most tokens per time, and compare it.

    ``shape`` is ``"medusa"`` or ``"sequoia"``; ``sizes`` and ``depth`` limit the tree.  Raises ``ValueError`` if
    nothing was accepted, or only positions outside trees of these sizes.
    """
    tell("measuring acceptance by trial")
    acceptance = measured_acceptance(work, drafter)
    rows = [list(acceptance)] * depth
    tell("timing trees")
    trees = {size: medusa_choices(rows, size) for size in sizes}
    prompt = max(work.prompts, key=len)
    scoring = target_costs(work, trees, prompt)
    draft = draft_costs(work, drafter, prompt)
    table = solve(acceptance, max(sizes), depth)
    costs: dict[int, SizeCost] = {}
    for size in sizes:
        if shape == "sequoia":
            trees[size] = best_of_size(table, size, scoring[size] + draft.node * size, draft.level)
        if not trees[size]:  # only later children were ever accepted
            continue
        levels = max(map(len, trees[size]))
        cost = scoring[size] + draft.node * len(trees[size]) + draft.level * levels
        costs[size] = SizeCost(cost, expected_length(trees[size], rows))
    if not costs:
        raise ValueError(
            f"no tree of {max(sizes)} nodes has a node that was ever accepted: allow more nodes or prompts"
        )
    best = max(costs, key=lambda size: costs[size].rate)
    tell("comparing")
    speeds = compared(work, drafter, drafter.reshaped(trees[best]))
    return TunedTree(drafter.name, trees[best], rows, costs, speeds, shape, work.temperature, draft, target_of(work))


def best_of_size(table: BestTrees, size: int, cost: float, step: float) -> list[Choice]:
    """The tree of at most ``size`` nodes and of the depth with the most tokens per time; costs in one unit."""
    depths = range(1, len(table.best))
    return table.choices(size, max(depths, key=lambda d: table.expected_length(size, d) / (cost + step * d)))


@torch.inference_mode()
def draft_costs(work: Workload, drafter: ModelDrafter, tokens: Sequence[int]) -> DraftCost:
    """Draft costs from medians of interleaved drafts of two trees."""
    # Two trees of four levels, with 4 and 28 nodes
    chain, bush = [(0,) * depth for depth in range(1, 5)], expansion_choices((4, 2, 1, 1))
    sequence = work.target.open()

    def drafted_s(choices: list[Choice]) -> float:
        arm = drafter.reshaped(choices)
        sampler = Sampler(SamplingParams(work.temperature), len(tokens))
        context = Context(0, list(tokens), len(tokens), sampler, Rng(0), sequence=sequence)
        arm.start(context)
        for _ in range(2):  # the first one reads tokens of the prefill
            watch = Stopwatch(work.target.device)
            arm.propose(context, Budget(arm.max_depth, arm.max_nodes))
            spent = watch.seconds
            work.target.commit(sequence, ())
        arm.finish(context)
        return spent

    try:
        work.target.prefill(sequence, list(tokens[:-1]))
        times = runs_of({len(choices): partial(drafted_s, choices) for choices in (chain, bush)}, REPEATS)
    finally:
        work.target.release(sequence)
    few, many = (1e3 * median(times[len(choices)]) for choices in (chain, bush))
    node = max(0.0, (many - few) / (len(bush) - len(chain)))
    return DraftCost(max(0.0, few / len(chain) - node), node)


def can_fill(spec: str) -> bool:
    """Whether a drafter draws siblings from its own distributions and has no tree in its spec."""
    parsed = parse_spec(spec)
    cls = find("drafter", parsed.name).load()
    return issubclass(cls, ModelDrafter) and "tree" in options_of(cls) and "tree" not in parsed.options


def measured_shape(work: Workload, drafter: Drafter) -> dict[str, Any]:
    """Inputs for choosing a tree: measured ``acceptance``, ``level_s`` and ``node_s`` of drafting.  Raises
    ``ValueError`` for a drafter that cannot draw siblings, and if nothing was accepted."""
    if not isinstance(drafter, ModelDrafter):
        raise ValueError(f"{drafter.name} draws no siblings")
    acceptance = measured_acceptance(work, drafter)
    level_ms, node_ms = draft_costs(work, drafter, max(work.prompts, key=len))
    return {"acceptance": list(acceptance), "level_s": level_ms / 1e3, "node_s": node_ms / 1e3}


def sequoia_spec(spec: str, shape: Mapping[str, Any], target: TargetCost) -> str | None:
    """The drafter's spec with the tree of most expected tokens per time; ``None`` if that is a chain or no draft."""
    trees = solve(shape["acceptance"], 64, 8)
    nodes, depth, _ = best_shape(trees, lambda n: target.of(n) + shape["node_s"] * (n - 1), shape["level_s"])
    if nodes <= depth:
        return None
    vector = " ".join(f"{probability:.3g}" for probability in shape["acceptance"])
    return with_option(spec, "tree", f"sequoia,nodes={nodes},depth={depth},acceptance={vector}")
