"""Runs drafters with one budget on a user's prompts and turns their rounds into costs.

A round of a drafter costs v(its nodes), the rest of a plain round, and what is left: that is the drafter's own share
(drafting, verifying a draft, moving accepted keys).  Two draft lengths tell what a call costs from what a step costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from foretoken.controllers.base import Controller
from foretoken.controllers.constant import ConstantController
from foretoken.core import Budget, Context, StepRecord
from foretoken.core.noise import unseeded_from
from foretoken.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.drafters.base import Drafter
from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, assemble
from foretoken.models.base import LanguageModel

TRIMMED = 0.05
"""Share of the rounds at either end that a mean leaves out: pauses of the machine are no costs."""


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        target: the model.
        prompts: token ids of every prompt.
        new_tokens: generated per prompt, ends of text ignored.
        temperature: 0 is greedy.
        seed: what sampled outputs are drawn from.  Requests have none of their own, for they would then be coupled
            (:mod:`foretoken.core.noise`), and other drafts be the best ones.
    """

    target: LanguageModel
    prompts: Sequence[Sequence[int]]
    new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def rounds(self, drafter: Drafter | None, depth: int, nodes: int) -> list[StepRecord]:
        """Decode every prompt once with a constant budget; the rounds that had room for the whole budget."""
        recorder = Recorder(depth, nodes, self.new_tokens)
        llm = Llm(self.target, drafter, None, recorder, None)
        with unseeded_from(self.seed):
            for prompt in self.prompts:
                llm.generate(list(prompt), **self.options)
        return recorder.rounds

    def speed(self, drafter: Drafter | None, controller: str | Controller, costs: RoundCosts | None = None) -> float:
        """Decode every prompt once, the controller starting from ``costs``; tokens per second of the rounds."""
        llm = assemble(self.target, drafter, "auto", controller, None)
        if costs is not None and llm.engine.controller is not None:
            llm.engine.controller.start_from(costs)
        total = SpecStats()
        with unseeded_from(self.seed):
            for prompt in self.prompts:
                total.merge(llm.generate(list(prompt), **self.options).stats)
        return total.tokens_per_s

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``generate``."""
        return {
            "max_new_tokens": self.new_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
        }

    def cut(self, prompts: int, new_tokens: int) -> Workload:
        """With fewer prompts, spread over the list, and shorter outputs."""
        count = min(prompts, len(self.prompts))
        chosen = [self.prompts[i * len(self.prompts) // count] for i in range(count)]
        return replace(self, prompts=chosen, new_tokens=min(new_tokens, self.new_tokens))


class Recorder(ConstantController):
    """A constant budget that keeps the rounds; those near the end of an output, which get less, are left out."""

    def __init__(self, depth: int, nodes: int, new_tokens: int) -> None:
        super().__init__(depth, nodes)
        self.depth, self.new_tokens = depth, new_tokens
        self.rounds: list[StepRecord] = []
        self._counts = True

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The budget, whether or not there is room for it."""
        written = len(context.tokens) - context.prompt_length
        self._counts = self.new_tokens - written - 1 >= self.depth
        return super().budget(context, batch_size)

    def observe(self, context: Context, record: StepRecord) -> None:
        """Keep a round that had room."""
        if self._counts:
            self.rounds.append(record)


@dataclass(frozen=True)
class Run:
    """Rounds of one drafter with one budget, in short.

    Attributes:
        depth: longest draft that was asked for.
        rounds: how many there were.
        round_s: mean seconds of a round.
        draft_s: of them, in the drafter.
        nodes: mean nodes that the target scored, the root included.
        proposes: share of the rounds with any guess.
        survival: per depth the share of all rounds in which at least that many draft tokens were accepted.
    """

    depth: int
    rounds: int
    round_s: float
    draft_s: float
    nodes: float
    proposes: float
    survival: Sequence[float]

    @classmethod
    def of(cls, records: Sequence[StepRecord], depth: int) -> Run:
        """Summed up.

        Raises:
            ValueError: no round at all.
        """
        if not records:
            raise ValueError(f"no round had room for {depth} draft tokens: ask for more new tokens")
        count = len(records)
        return cls(
            depth,
            count,
            trimmed_mean([r.total_s for r in records]),
            trimmed_mean([r.draft_s for r in records]),
            fmean(r.num_nodes for r in records),
            sum(r.num_draft_tokens > 0 for r in records) / count,
            [sum(r.num_accepted_tokens >= d for r in records) / count for d in range(1, depth + 1)],
        )


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest few."""
    ordered = sorted(values)
    out = int(TRIMMED * len(ordered))
    return fmean(ordered[out : len(ordered) - out])


@dataclass(frozen=True)
class Measured:
    """A drafter's runs with its whole budget and with a shorter one.

    Attributes:
        spec: how it was built.
        nodes: most draft nodes that it makes.
        trees: whether its drafts branch, so that a shorter draft is another tree and no piece of the longer one.
        copies: whether it copies from text instead of running a network.
        long, short: the two runs; the same one where the drafter is one step deep.
    """

    spec: str
    nodes: int
    trees: bool
    copies: bool
    long: Run
    short: Run

    def as_dict(self) -> dict[str, Any]:
        """As the state of an interrupted run keeps it."""
        return {**vars(self), "long": vars(self.long), "short": vars(self.short)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Measured:
        """What :meth:`as_dict` made."""
        return cls(**{**found, "long": Run(**found["long"]), "short": Run(**found["short"])})

    def cost(self, target: TargetCost, rest_s: float, run: Run | None = None) -> DrafterCost:
        """What the drafter costs and promises; survival is that of ``run`` (the long one by default)."""
        run = run or self.long
        long, short = (_share_s(one, target, rest_s) for one in (self.long, self.short))
        steps = self.long.depth - self.short.depth
        own = long if run is self.long else short
        # Neither a call nor a step costs less than nothing, and both together what was measured at this length.
        step_s = min(max((long - short) / steps, 0.0), own / run.depth) if steps else 0.0
        call_s = own - step_s * run.depth
        per_depth = (run.nodes - 1) / (run.depth * run.proposes) if run.proposes else 1.0
        return DrafterCost(call_s, step_s, list(run.survival), run.proposes, per_depth)


def _share_s(run: Run, target: TargetCost, rest_s: float) -> float:
    """Seconds of a round that are the drafter's."""
    return max(0.0, run.round_s - rest_s - target.of(1 + round(run.nodes - 1)))


def measure_drafter(
    work: Workload, spec: str, make: Callable[[], Drafter], copies: Callable[[Drafter], bool]
) -> Measured:
    """Run a drafter with its whole budget on all prompts, and with a shorter one on half of them.

    Args:
        work: what is decoded.
        spec: names the result.
        make: builds the drafter.  One that learns across requests is built anew for every pass: it would know the
            prompts' answers by heart.
        copies: whether a drafter copies from text.

    Raises:
        ValueError: the drafter does not fit, or no round had room for its drafts.
    """
    drafter = make()
    depth, nodes = drafter.max_depth, drafter.max_nodes
    flags = (drafter.traits.draws_trees, copies(drafter))
    few = work.cut(max(1, len(work.prompts) // 2), work.new_tokens)
    warm = work.cut(1, depth + 2)
    warm.rounds(drafter, depth, nodes)
    if drafter.traits.shares_state:
        drafter = make()
    long = Run.of(work.rounds(drafter, depth, nodes), depth)
    if depth == 1:
        return Measured(spec, nodes, *flags, long, long)
    if drafter.traits.shares_state:
        drafter = make()
    shorter = max(1, depth // 2 if flags[0] else depth // 4)
    return Measured(spec, nodes, *flags, long, Run.of(few.rounds(drafter, shorter, nodes), shorter))


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        drafter: spec.
        depth: draft length; 0 is plain decoding.
        nodes: most draft nodes.
        predicted: tokens per second over plain decoding's, by the cost model.
        cost: the drafter's cost that the prediction is made of.
    """

    drafter: str
    depth: int
    nodes: int
    predicted: float
    cost: DrafterCost

    @property
    def controller(self) -> str:
        """A controller that asks for just this."""
        return f"constant,k={self.depth},nodes={self.nodes}"


def best_candidate(measured: Measured, target: TargetCost, rest_s: float) -> Candidate:
    """The depth with the best predicted goodput.

    A chain's shorter drafts are pieces of its longest one, so that every depth can be judged.  Of a tree only the two
    that were measured are known.
    """

    def at(depth: int, run: Run) -> Candidate:
        cost = measured.cost(target, rest_s, run)
        costs = RoundCosts(target, {measured.spec: cost}, rest_s)
        return Candidate(measured.spec, depth, measured.nodes, costs.speedup(measured.spec, depth), cost)

    if measured.trees:
        known = [at(run.depth, run) for run in (measured.short, measured.long)]
    else:
        known = [at(depth, measured.long) for depth in range(1, measured.long.depth + 1)]
    return max(known, key=lambda candidate: candidate.predicted)
