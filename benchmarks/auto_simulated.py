"""The default controller on a simulated busy machine: what it loses by what it believes, in seconds instead of hours.

Requests of 96 tokens are decoded in fixed batches by a draft model and n-grams whose tokens are accepted by chance, at
the costs of the built-in target and draft model.  Rounds take longer by chance as beside another process: in short
bursts, upwards, drafts nearly as much as the target; and every few hundred rounds the machine changes its speed.  The
controller sees these times; it is scored by what its rounds cost without them, beside the best fixed length.
``--bursts 3`` is a machine that is much too busy.

    python benchmarks/auto_simulated.py [--kind chats code ...] [--batch 1 4 8] [--controllers 40] [--bursts 1]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core import Budget, Context, Limits, Rng, StepRecord
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.controllers.auto import AutoController
from foretoken.methods.controllers.base import Controller

NEW_TOKENS, WARM_UP, DEEPEST = 96, 250, 16
SHORT, LONG = 40, 90
"""Tokens that prompts have."""


@dataclass(frozen=True)
class Kind:
    """Chances of a text: that the first draft token of the model is accepted and that a further one does, how far the
    first differs between requests, and that n-grams have a guess and a token of it is accepted."""

    first: float
    further: float
    apart: float
    answers: float
    copies: float


KINDS = {
    "chats": Kind(0.575, 0.62, 0.08, 0.18, 0.5),
    "code": Kind(0.57, 0.61, 0.08, 0.15, 0.35),
    "prose": Kind(0.73, 0.72, 0.03, 0.05, 0.3),
    "weak": Kind(0.45, 0.5, 0.05, 0.05, 0.3),
    "poor": Kind(0.36, 0.4, 0.05, 0.05, 0.2),
    "copied": Kind(0.7, 0.7, 0.1, 0.6, 0.85),
}


@dataclass
class Machine:
    """How much longer rounds take than they cost: calls of the target, and drafts."""

    rng: random.Random
    bursts: float
    level: float = 0.0
    burst: float = 0.0
    until: int = 0
    round: int = 0

    def slow(self) -> tuple[float, float]:
        """The next round."""
        if self.round >= self.until:
            self.level = self.rng.choice([0.0, 0.0, self.rng.uniform(0.0, 0.35)])
            self.until = self.round + self.rng.randrange(80, 500)
        self.round += 1
        self.burst = 0.8 * self.burst + (self.rng.expovariate(1 / 0.12) if self.rng.random() < 0.07 else 0.0)
        target, draft = (self.burst + self.rng.gauss(0.0, noise) for noise in (0.035, 0.06))
        return math.exp(self.level + self.bursts * target), math.exp(self.level + self.bursts * draft)


@dataclass
class Request:
    """A request: its context, the chance that a first draft token is accepted, and how much of it the model has
    read."""

    context: Context
    first: float
    read: int


@dataclass
class Score:
    """Seconds without what made rounds longer, and tokens."""

    seconds: float = 0.0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Fixed(Controller):
    """Always so many tokens of the draft model."""

    name = "fixed"

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(self.depth, self.depth, member=0) if self.depth else Budget(0, 0)


class World:
    """Batches of one kind and size on one machine."""

    def __init__(self, kind: Kind, size: int, seed: int, bursts: float) -> None:
        self.kind, self.size, self.rng = kind, size, random.Random(seed)
        self.machine = Machine(self.rng, bursts)
        self.begun = 0

    def request(self, prompt: int) -> Request:
        context = Context(
            self.begun, [0] * (prompt + 1), prompt, Sampler(SamplingParams(temperature=1.0)), Rng(0),
            max_length=prompt + NEW_TOKENS,
        )  # fmt: skip
        self.begun += 1
        first = self.rng.gauss(self.kind.first, self.kind.apart)
        return Request(context, min(max(first, 0.1), 1.0), len(context.tokens))

    def batch(self, controller: Controller, score: Score) -> None:
        """Decode a batch to its end."""
        even = self.rng.random() < 0.5
        prompts = [SHORT if even else self.rng.randrange(SHORT, LONG) for _ in range(self.size)]
        running = [self.request(prompt) for prompt in prompts]
        while running:
            self.step(controller, running, score)
            for request in running:
                if is_done(request.context):
                    controller.finish(request.context)
            running = [request for request in running if not is_done(request.context)]

    def step(self, controller: Controller, running: Sequence[Request], score: Score) -> None:
        """A round: its cost in milliseconds, and what the controller sees of it."""
        contexts = [request.context for request in running]
        count, even = len(running), len(running) > 1 and len({len(c.tokens) for c in contexts}) == 1
        budgets = controller.budgets(contexts)
        drafts = [self.draft(budget, request) for budget, request in zip(budgets, running, strict=True)]
        nodes = sum(1 + depth for _, depth, _ in drafts)
        target = (5.1 + 0.9 * count + 0.27 * nodes) * (0.97 if even and nodes == count else 1.0)
        rest = 0.35 + 0.075 * count + 0.045 * nodes
        drafting = [(r, depth) for r, (member, depth, _) in zip(running, drafts, strict=True) if member == 0]
        draft = 0.15 * any(member == 1 for member, _, _ in drafts)
        if drafting:
            draft += 0.5 + max(depth for _, depth in drafting) * (1.0 + 0.3 * len(drafting))
            draft += 0.06 * sum(max(len(r.context.tokens) - r.read - 2, 0) for r, _ in drafting)
        score.seconds += (target + draft + rest) / 1e3
        slow, slow_draft = self.machine.slow()
        target_s, draft_s, rest_s = slow * target / 1e3, slow_draft * draft / 1e3, slow * rest / 1e3
        for request, (member, depth, stood) in zip(running, drafts, strict=True):
            if member == 0:
                request.read = len(request.context.tokens)
            request.context.tokens.extend([0] * (1 + stood))
            score.tokens += 1 + stood
            if count == self.size:
                score.drafted.append(depth)
            record = StepRecord(
                request.context.request_id, 1 + depth, depth, stood, count, draft_s, target_s, 0.0,
                target_s + draft_s + rest_s, nodes, member if depth else -1, depth,
            )  # fmt: skip
            controller.observe(request.context, record)

    def draft(self, budget: Budget, request: Request) -> tuple[int, int, int]:
        """Who drafts for a request, how many tokens, and how many of them are accepted.  N-grams have guesses in
        stretches of four tokens."""
        context, choice = request.context, budget
        room = context.max_length - len(context.tokens)
        while choice is not None and (depth := min(choice.max_depth, room - 1)) > 0:
            if not choice.member:
                return 0, depth, self.stood(depth, request.first, self.kind.further)
            if random.Random(1000 * context.request_id + len(context.tokens) // 4).random() < self.kind.answers:
                depth = min(depth, 4)
                return 1, depth, self.stood(depth, self.kind.copies, self.kind.copies)
            choice = choice.otherwise
        return -1, 0, 0

    def stood(self, depth: int, first: float, further: float) -> int:
        stood = 0
        while stood < depth and self.rng.random() < (further if stood else first):
            stood += 1
        return stood


def is_done(context: Context) -> bool:
    """Whether a request has all its tokens."""
    return len(context.tokens) >= context.max_length


def best_fixed(kind: Kind, size: int) -> dict[int, float]:
    """Tokens per second by length."""
    found = {}
    for depth in (0, 1, 2, 3, 4):
        world, score = World(kind, size, 999, 0.0), Score()
        for _ in range(400 // size):
            world.batch(Fixed(depth), score)
        found[depth] = score.rate
    return found


def one_controller(kind: Kind, size: int, seed: int, bursts: float) -> tuple[Score, float]:
    """What a new controller does after its first rounds, and the common factor that it ends with."""
    world, controller, score = World(kind, size, seed, bursts), AutoController(), Score()
    members = (Limits("model", DEEPEST, DEEPEST, relative_cost=0.2), Limits("ngram", 10, 10, relative_cost=0.0))
    controller.attach(Limits("router", DEEPEST, 64, members=members))
    while world.machine.round < WARM_UP:
        world.batch(controller, Score())
    for _ in range(max(32 // size, 4)):
        world.batch(controller, score)
    return score, controller.costs.drift


def main() -> None:
    """Print a row per cell."""
    parser = argparse.ArgumentParser(description="The default controller on a simulated busy machine.")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of text")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8], help="requests that are decoded together")
    parser.add_argument("--controllers", type=int, default=40, help="controllers per cell, each with its own luck")
    parser.add_argument("--bursts", type=float, default=1.0, help="how strong bursts are; 0: none, 3: much too busy")
    args = parser.parse_args()
    if min(*args.batch, args.controllers) < 1 or args.bursts < 0:
        parser.error("--batch and --controllers must be at least 1, and --bursts at least 0")
    print("| text | batch | best fixed / plain | auto / plain | auto / best | its 5 % | plain rounds | factor |")
    print("|---|---|---|---|---|---|---|---|")
    every = []
    for name in args.kind:
        for size in args.batch:
            fixed = best_fixed(KINDS[name], size)
            best = max(fixed.values())
            found = [one_controller(KINDS[name], size, seed, args.bursts) for seed in range(args.controllers)]
            rates = sorted(score.rate for score, _ in found)
            drafted = [depth for score, _ in found for depth in score.drafted]
            mean, low = statistics.mean(rates), rates[len(rates) // 20]
            every.append(mean / best)
            print(
                f"| {name} | {size} | {best / fixed[0]:.3f} | {mean / fixed[0]:.3f} | {mean / best:.3f} "
                f"| {low / best:.3f} | {drafted.count(0) / len(drafted):.2f} "
                f"| {statistics.median(factor for _, factor in found):.1f} |",
                flush=True,
            )
    print(f"mean of auto / best: {statistics.mean(every):.4f}")


if __name__ == "__main__":
    main()
