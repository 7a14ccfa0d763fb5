"""Learned look-ahead tokens after every draft token make the target predict the next draft during verification.

PaSS, Monea et al. 2023 (https://arxiv.org/abs/2311.13581); with a separate group for every prefix that may be accepted,
as in BiTA, Lin et al. 2024 (https://arxiv.org/abs/2401.12522).

The tree of one round, for k = 2 and two draft tokens (``a``, ``b`` are [LA]_1, [LA]_2)::

    root --- d1 --- d2 --- a --- b
      |       |
      a       a
      |       |
      b       b

Whichever of ``root``, ``d1``, ``d2`` is the last accepted token, the look-ahead tokens below it attend to it and to no
rejected token.  [LA]_i below the token at position t has position t + i and predicts t + i + 1: the token at t + 1, the
position of [LA]_1, is the round's (bonus or recovered) token, which becomes the root.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Scores, TokenTree, Verdict, argmaxes, check_least
from foretoken.methods.drafters.base import BuildContext, Drafter, Traits
from foretoken.methods.drafters.drawing import distribution_of, draw_without_replacement, probabilities_of
from foretoken.methods.drafters.nets.pass_tokens import PassTokens, PassTokensConfig
from foretoken.methods.drafters.nets.store import load_net
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs


def paying_shape(
    accuracies: Sequence[float], cost: Callable[[int], float], k: int = 0, groups: int = 0
) -> tuple[int, int]:
    """The number of look-ahead tokens and of their groups with the most tokens per time.

    A round accepts i draft tokens or more with probability s_i, the product of the first i accuracies.  It leaves the
    next round without a draft if it accepts as many as there are groups, so that one round in 1 + s_groups drafts
    nothing.

    Args:
        accuracies: accuracy of each look-ahead token's prediction.
        cost: v(n), cost of scoring n nodes.
        k: fixed number of look-ahead tokens; 0 to choose it.
        groups: the same for the groups.

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
        without = reached[min(count, tokens + 1)]  # rounds without a draft for every one with a draft
        drafting = cost(1 + tokens + min(count, tokens + 1) * tokens)
        return (sum(reached) + without) / (drafting + without * cost(1 + tokens))

    return max(choices, key=rate)


@dataclass
class _LookAhead:
    """One request between two rounds.

    Attributes:
        groups: the probes with look-ahead tokens below each node that has some.
        logits: [<= k, V] of the probes below the last accepted token; ``None`` if there were none.
    """

    proposed: TokenTree | None = None
    groups: dict[int, slice] = field(default_factory=dict)
    logits: Tensor | None = None


class PassTokensDrafter(Drafter):
    """A chain of up to k tokens, predicted by the forward that verified the previous chain.

    Args:
        net: the learned rows; they move to the target's device.
        k: number of look-ahead tokens; 0: in a spec as many as pay off by the measured accuracies of
            training and the costs of the target's calls on this machine, else all learned ones.
        draw: how tokens are chosen if the request samples: ``"iid"`` (each drawn from its look-ahead token's
            distribution) or ``"greedy"`` (the most likely ones, verified as point masses).  A greedy request gets
            greedy drafts.
        groups: number of nodes of the chain, from the root down, with look-ahead tokens below them; 0: in a spec as
            many as pay off, else all.  If the last accepted token has none, the next round drafts nothing.
    """

    name = "pass_tokens"
    net_config = PassTokensConfig
    net_class = PassTokens

    def __init__(self, net: PassTokens, target: LanguageModel, k: int = 0, draw: str = "iid", groups: int = 0) -> None:
        learned = len(net.rows)
        if not 0 <= k <= learned:
            raise ValueError(f"pass_tokens needs k from 1 to {learned}, which were learned, or 0 for all, not {k}")
        if draw not in ("iid", "greedy"):
            raise ValueError(f"draw must be iid or greedy, not {draw!r}")
        check_least(self.name, 0, groups=groups)
        self.net, self.draw = (net if target.device is None else net.to(target.device)).eval(), draw
        # The drafts are a chain, but look-ahead tokens branch from it.
        self.traits = Traits(Kind.POINT if draw == "greedy" else Kind.IID, draws_trees=True)
        self.max_depth = self.max_nodes = k or learned
        self.groups = groups or self.max_depth + 1
        self.first = target.extra_embeddings(net.rows.detach(), self)
        self.vocab_size, self.context_length = target.vocab_size, target.context_length

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> PassTokensDrafter:
        """Build from a spec ``pass_tokens[:FOLDER]``."""
        net, _, measured = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        accuracies = measured.get("accuracies") or (0.5, 0.4, 0.3, 0.25)  # typical ones if training did not measure
        costs = quick_costs(context.target)
        sizes = options.get("k", 0), options.get("groups", 0)
        options["k"], options["groups"] = paying_shape(accuracies[: len(net.rows)], costs.relative, *sizes)
        return cls(net, context.target, **options)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """The look-ahead tokens' predictions as a chain, and new look-ahead tokens below its nodes."""
        state: _LookAhead = context.state.setdefault(self, _LookAhead())
        drafts, distributions = self._drafts(context, budget, state.logits)
        tokens, parents = [context.root, *drafts], list(range(-1, len(drafts)))
        room = self.context_length - len(context.tokens)  # positions after the root
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
        """Keep the logits of the look-ahead tokens below the last accepted node."""
        state: _LookAhead = context.state.setdefault(self, _LookAhead())
        last = verdict.path[-1] if verdict.path else 0
        nodes = None if state.proposed is None else tree.nodes_in(state.proposed)
        group = None if nodes is None else state.groups.get(nodes[last])
        state.logits = state.proposed = None
        if nodes is not None and group is not None:
            # A group is a chain, so what a cut left of it are its first look-ahead tokens, still side by side.
            rows = slice(bisect_left(nodes, group.start), bisect_left(nodes, group.stop))
            state.logits = scores.logits[rows] if rows.start < rows.stop else None

    def _drafts(self, context: Context, budget: Budget, logits: Tensor | None) -> tuple[list[int], list[Tensor]]:
        """The chain's tokens, and the distributions [V] of drawn tokens."""
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
                distribution_of(sampler, row, prefix) if likeliest else probabilities_of(sampler, row, prefix, length)
            )
            if distribution is None:
                break  # the request allows nothing here
            if sampler.fixed or likeliest:
                drafts.append(int(distribution.argmax()))
            else:
                drafts += draw_without_replacement(distribution, 1, context)
                distributions.append(distribution)
            # A stop may only suppress the tokens after this one, which stays in the draft.
            belief = torch.softmax(row.float(), -1) if confident and sampler.greedy else distribution
            if confident and budget.stops_after(belief, float(belief[drafts[-1]])):
                break
        return drafts, distributions
