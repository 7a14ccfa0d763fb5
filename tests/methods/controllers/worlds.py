"""Simulated worlds in which what rounds cost and how likely drafts are accepted is known.

Rounds are drawn from a world and shown to the controller as the engine would show them.  Seconds are the world's own:
no clock is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from foretoken.core import Budget, Context, Limits, Rng, StepRecord, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.controllers.base import Controller


@dataclass(frozen=True)
class Member:
    """A drafter of a world: seconds per round and per level, chance of the first token and of further ones, share of
    the text that it has guesses for; with ``copied`` the chance of all tokens in every fourth request, whose text
    repeats itself."""

    step_s: float
    accepts: float
    answers: float = 1.0
    deepest: int = 8
    call_s: float = 0.0
    further: float | None = None
    is_free: bool = False
    copied: float | None = None

    def chances(self, request: int) -> tuple[float, float]:
        """Of the first token and of further ones."""
        if self.copied is not None and request % 4 == 3:
            return self.copied, self.copied
        return self.accepts, self.accepts if self.further is None else self.further


@dataclass
class World:
    """What rounds cost and give; a target whose weights a draft has pushed out of the processor's cache takes
    ``evicted`` times as long, then and in the next round.  With ``shows`` free members are guessed beside others.
    So many ``others`` in every round bring their own tree, of one node: the controller is not asked about them."""

    members: list[Member]
    node_s: float = 0.001
    call_s: float = 0.1
    noise: float = 0.05
    speed: Callable[[int], float] = lambda _: 1.0
    seed: int = 0
    evicted: float = 1.0
    rounds: int = 0
    is_warm: bool = True
    shows: bool = False
    others: int = 0
    rng: random.Random = field(init=False)
    written: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def limits(self) -> Limits:
        """As a router would state them."""
        members = tuple(
            Limits(f"m{i}", m.deepest, m.deepest, relative_cost=0.0 if m.is_free else 0.1)
            for i, m in enumerate(self.members)
        )
        return Limits("router", max(m.deepest for m in self.members), 64, members=members)

    def play(self, controller: Controller, contexts: list[Context], rounds: int) -> float:
        """Tokens per second over some rounds of a batch."""
        tokens, seconds = 0, 0.0
        for _ in range(rounds):
            gained, took = self.round(controller, contexts)
            tokens, seconds = tokens + gained, seconds + took
        return tokens / seconds

    def round(self, controller: Controller, contexts: list[Context], grows: bool = False) -> tuple[int, float]:
        """Tokens and seconds of one round; texts stay as they are unless they are to grow."""
        self.rounds += 1
        budgets = controller.budgets(contexts)
        drafts = [self.drafted(budget, c) for budget, c in zip(budgets, contexts, strict=True)]
        nodes = sum(1 + depth for _, depth, _ in drafts) + self.others
        slow = self.speed(self.rounds) * self.rng.lognormvariate(0.0, self.noise)
        depths = {member: depth for member, depth, _ in drafts if depth}
        ran = any(not self.members[member].is_free for member in depths)
        cold, self.is_warm = ran or not self.is_warm, not ran
        target_s = slow * (self.call_s + self.node_s * nodes) * (self.evicted if cold else 1.0)
        draft_s = slow * sum(self.members[m].call_s + self.members[m].step_s * depth for m, depth in depths.items())
        total_s = target_s + draft_s + 0.002 * slow
        tokens = 0
        for context, (member, depth, accepted) in zip(contexts, drafts, strict=True):
            record = StepRecord(
                context.request_id, 1 + depth, depth, accepted, len(contexts) + self.others, draft_s, target_s, 0.0,
                total_s, nodes, member if depth else -1, depth,
            )  # fmt: skip
            if self.shows and depth and not self.members[member].is_free:
                free = [i for i, candidate in enumerate(self.members) if candidate.is_free]
                context.beside = {i: self.beside(i, context, 1 + accepted) for i in free}
                context.tokens.extend([0] * (1 + accepted))
            elif grows:
                context.tokens.extend([0] * (1 + accepted))
            controller.observe(context, record)
            tokens += 1 + accepted
            self.written[context.request_id] = self.written.get(context.request_id, 0) + 1 + accepted
        return tokens, total_s

    def drafted(self, budget: Budget, context: Context) -> tuple[int, int, int]:
        """Who drafts, how many tokens, how many are accepted.  A text consists of stretches of twelve tokens."""
        choice: Budget | None = budget
        stretch = self.written.get(context.request_id, 0) // 12
        while choice is not None and choice.max_depth > 0:
            index = choice.member or 0
            member = self.members[index]
            if random.Random(1000 * context.request_id + 10 * stretch + index).random() < member.answers:
                depth = min(choice.max_depth, member.deepest)
                return index, depth, self.accepted(member, context.request_id, depth)
            choice = choice.otherwise
        return -1, 0, 0

    def accepted(self, member: Member, request: int, depth: int) -> int:
        """How many of ``depth`` tokens are accepted."""
        first, further = member.chances(request)
        count = 0
        while count < depth and self.rng.random() < (further if count else first):
            count += 1
        return count

    def beside(self, index: int, context: Context, length: int) -> TokenTree:
        """A guess that begins as the text goes on, and then differs."""
        right = self.accepted(self.members[index], context.request_id, min(length, self.members[index].deepest))
        return TokenTree.chain(0, [0] * right + [1] * (self.members[index].deepest - right))


def contexts(count: int, start: int = 0, written: int = 99, max_length: int = 0) -> list[Context]:
    """Requests that sample and have ``written`` so many tokens, each one more than the last."""
    sampler = Sampler(SamplingParams(temperature=1.0))
    return [
        Context(start + i, [0] * (1 + written + i), 1, sampler, Rng(0), max_length=max_length) for i in range(count)
    ]


class Fixed(Controller):
    """Always one member and length."""

    name = "fixed"

    def __init__(self, member: int, depth: int) -> None:
        self.member, self.depth = member, depth

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(self.depth, self.depth, member=self.member)


def best_fixed(world: Callable[[], World], batch: int, rounds: int = 600) -> float:
    """Tokens per second of the best member and length, plain decoding included."""
    members = world().members
    choices = [(0, 0), *((i, depth) for i in range(len(members)) for depth in (1, 2, 3, 4, 6, 8))]
    return max(world().play(Fixed(*choice), contexts(batch), rounds) for choice in choices)
