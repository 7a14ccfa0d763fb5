"""Learned look-ahead tokens behind every draft make the target guess the next drafts while it verifies these.

PaSS, Monea et al. 2023 (https://arxiv.org/abs/2311.13581); a group of its own for every prefix that may be accepted, as
in BiTA, Lin et al. 2024 (https://arxiv.org/abs/2401.12522).

The tree of one round, for k = 2 and two drafts (``a``, ``b`` stand for [LA]_1, [LA]_2)::

    root --- d1 --- d2 --- a --- b
      |       |
      a       a
      |       |
      b       b

Whichever of ``root``, ``d1``, ``d2`` is the last token that is accepted, the look-ahead tokens below it have seen it
and nothing that was rejected.  [LA]_i below the token at position t stands at t + i and predicts t + i + 1: the token
at t + 1, in whose place [LA]_1 stands, is the round's own (bonus or recovered) token, which becomes the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Scores, TokenTree, Verdict, argmaxes, check_least
from foretoken.methods.drafters.base import BuildContext, Drafter, Traits
from foretoken.methods.drafters.drawing import chances_of, distribution_of, draw_without_replacement
from foretoken.methods.drafters.nets.pass_tokens import PassTokens, PassTokensConfig
from foretoken.methods.drafters.nets.store import load_net
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs

TYPICAL = (0.5, 0.4, 0.3, 0.25)
"""Chances that the drafts of look-ahead tokens are right, where training did not measure them."""


def paying_shape(
    accuracies: Sequence[float], cost: Callable[[int], float], k: int = 0, groups: int = 0
) -> tuple[int, int]:
    """How many look-ahead tokens and groups of them give most tokens per time.

    A round accepts i drafts or more with chance s_i, the product of the first i accuracies.  It leaves the next round
    without drafts where it accepts as many as there are groups, so that one round in 1 + s_groups drafts nothing.

    Args:
        accuracies: chance that the guess of each look-ahead token is right.
        cost: v(n), what scoring n nodes costs.
        k: look-ahead tokens where that is decided; 0 where it is not.
        groups: the same of the groups.

    Returns:
        ``k`` and ``groups``.
    """
    choices = [
        (tokens, count)
        for tokens in ([k] if k else range(1, len(accuracies) + 1))
        for count in ([groups] if groups else range(1, tokens + 2))
    ]

    def rate(choice: tuple[int, int]) -> float:
        tokens, count = choice
        reached = [1.0, *(math.prod(accuracies[:i]) for i in range(1, tokens + 1)), 0.0]
        without = reached[min(count, tokens + 1)]  # rounds without drafts for every one with some
        drafting = cost(1 + tokens + min(count, tokens + 1) * tokens)
        return (sum(reached) + without) / (drafting + without * cost(1 + tokens))

    return max(choices, key=rate)


@dataclass
class _LookAhead:
    """One request between two rounds.

    Attributes:
        groups: its nodes with look-ahead tokens below them, and which probes those are.
        logits: [<= k, V] what they said below the last accepted token; ``None`` when there were none.
    """

    proposed: TokenTree | None = None
    groups: dict[int, slice] = field(default_factory=dict)
    logits: Tensor | None = None


class PassTokensDrafter(Drafter):
    """A chain of up to k guesses that were made by the call that verified the chain before.

    Args:
        net: the learned rows; they move to the target's device.
        k: how many of the look-ahead tokens are used; 0: all that were learned, and for a spec as many as pay by the
            acceptance that training measured and by what the target's calls cost on this machine.
        draw: how drafts are made when the request samples: ``"iid"`` (each drawn from what its look-ahead token says)
            or ``"greedy"`` (the most likely ones, verified as point masses).  A greedy request gets greedy drafts.
        groups: how many nodes of the chain, from the root down, have look-ahead tokens below them; 0: all, and for a
            spec as many as pay.  Where the last token that is accepted has none, the next round drafts nothing.
    """

    name = "pass_tokens"

    def __init__(self, net: PassTokens, target: LanguageModel, k: int = 0, draw: str = "iid", groups: int = 0) -> None:
        learned = len(net.rows)
        if not 0 <= k <= learned:
            raise ValueError(f"pass_tokens needs k from 1 to {learned}, which were learned, or 0 for all, not {k}")
        if draw not in ("iid", "greedy"):
            raise ValueError(f"draw must be iid or greedy, not {draw!r}")
        check_least(self.name, 0, groups=groups)
        device = getattr(target, "device", None)
        self.net, self.draw = (net if device is None else net.to(device)).eval(), draw
        # The drafts are a chain, but look-ahead tokens branch from it.
        self.traits = Traits(Kind.POINT if draw == "greedy" else Kind.IID, draws_trees=True)
        self.max_depth = self.max_nodes = k or learned
        self.groups = groups or self.max_depth + 1
        self.first = target.extra_embeddings(net.rows.detach())
        self.vocab_size, self.context_length = target.vocab_size, target.context_length

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> PassTokensDrafter:
        """From a spec ``pass_tokens[:FOLDER]``."""
        net, _, measured = load_net(context, cls.name, path, PassTokensConfig, PassTokens)
        accuracies = measured.get("accuracies") or TYPICAL
        costs = quick_costs(context.target)
        sizes = options.get("k", 0), options.get("groups", 0)
        options["k"], options["groups"] = paying_shape(accuracies[: len(net.rows)], costs.relative, *sizes)
        return cls(net, context.target, **options)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """What the look-ahead tokens said, as a chain, and new ones below its nodes."""
        state: _LookAhead = context.state.setdefault(self, _LookAhead())
        drafts, distributions = self._drafts(context, budget, state.logits)
        tokens, parents = [context.root, *drafts], list(range(-1, len(drafts)))
        room = self.context_length - len(context.tokens)  # positions behind the root
        state.groups = {}
        for node in range(min(len(tokens), self.groups)):
            first = len(tokens)
            count = min(self.max_depth, room - node)
            if count > 0:
                state.groups[node] = slice(first, first + count)
                tokens += range(self.first, self.first + count)
                parents += [node, *range(first, first + count - 1)]
        probes = [False] * (1 + len(drafts)) + [True] * (len(tokens) - 1 - len(drafts))
        if context.sampler.fixed or self.draw == "greedy":
            state.proposed = TokenTree(tuple(tokens), tuple(parents), probes=tuple(probes))
        else:
            q_rows = (-1, *range(len(drafts)), *[-1] * sum(probes))
            nothing = torch.empty(0, self.vocab_size, device=self.net.rows.device)
            q = torch.stack(distributions) if distributions else nothing
            state.proposed = TokenTree(tuple(tokens), tuple(parents), Kind.IID, q, q_rows, tuple(probes))
        return state.proposed

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Keep what the look-ahead tokens below the last accepted node said."""
        state: _LookAhead = context.state.setdefault(self, _LookAhead())
        last = verdict.path[-1] if verdict.path else 0
        group = state.groups.get(last) if tree is state.proposed else None
        state.logits = None if group is None else scores.logits[group]
        state.proposed = None

    def _drafts(self, context: Context, budget: Budget, logits: Tensor | None) -> tuple[list[int], list[Tensor]]:
        """The chain's tokens, and the distributions [V] that they were drawn from where they were drawn."""
        count = 0 if logits is None else min(len(logits), budget.max_depth, budget.max_nodes)
        if logits is None or count == 0:
            return [], []
        sampler, confident = context.sampler, budget.asks_for_confidence
        likeliest = self.draw == "greedy"
        if (sampler.greedy or likeliest) and sampler.context_free and not confident:
            return argmaxes(logits[:count])[0], []
        drafts: list[int] = []
        distributions: list[Tensor] = []
        for row in logits[:count]:
            length = len(context.tokens) + len(drafts)
            prefix = () if sampler.context_free else [*context.tokens, *drafts]
            distribution = (
                distribution_of(sampler, row, prefix) if likeliest else chances_of(sampler, row, prefix, length)
            )
            if distribution is None:
                break  # the request allows nothing here
            if sampler.fixed or likeliest:
                drafts.append(int(distribution.argmax()))
            else:
                drafts += draw_without_replacement(distribution, 1, context)
                distributions.append(distribution)
            # A stop may only suppress what comes after the token: the token itself stays in the draft.
            belief = torch.softmax(row.float(), -1) if confident and sampler.greedy else distribution
            if confident and budget.stops_after(belief, float(belief[drafts[-1]])):
                break
        return drafts, distributions
