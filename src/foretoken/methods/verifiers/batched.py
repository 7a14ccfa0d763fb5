"""Verification of a whole batch: distributions, weights and last draws of all requests by one call each.

A request alone costs some ten tensor operations on vectors of the vocabulary's size, which take longer to call than to
run: in a batch of eight they were a tenth of a round.  What is decided is the same, bit for bit, as by
:meth:`foretoken.methods.verifiers.base.Verifier.verify`, request by request.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from foretoken.core import Rng, Scores, TokenTree, Verdict, is_large
from foretoken.core.sampling import fixed_tokens
from foretoken.methods.verifiers.base import Coins, Verifier, draw_all
from foretoken.methods.verifiers.on_device import bring_home


class LateCoins(Coins):
    """Coins of which the draw is made later: the uniform is used now, and the token is still unknown.

    Attributes:
        later: what is to be drawn from, and by which uniform.
    """

    UNKNOWN = -1

    def __init__(self, rng: Rng) -> None:
        super().__init__(rng)
        self.later: tuple[Tensor, float] | None = None

    def draw(self, distribution: Tensor) -> int:
        """Note the distribution or weights [V]."""
        if self.later is not None:
            raise AssertionError("a rule that draws twice does not draw last")
        self.later = (distribution, self._rng.uniform())
        return self.UNKNOWN


def verify_batch(verifiers: Sequence[Verifier], all_scores: Sequence[Scores], rngs: Sequence[Rng]) -> list[Verdict]:
    """What each verifier says of its request; the draws of rules that draw last are made together.

    Raises:
        ValueError: a chain rule met a node with two children.
        NonFiniteLogitsError: NaN logits, or no finite logit left.
    """
    if any(type(one).verify is not Verifier.verify for one in verifiers):
        each = zip(verifiers, all_scores, rngs, strict=True)
        return [verifier.verify(scores.tree, scores, rng) for verifier, scores, rng in each]
    if all_scores[0].logits.device.type != "cpu":
        all_scores = bring_home(verifiers, all_scores)
    elif len(all_scores) == 1:
        return [verifiers[0].verify(all_scores[0].tree, all_scores[0], rngs[0])]
    else:
        make_distributions(verifiers, all_scores)
        make_choices(all_scores)
    verdicts: list[Verdict] = []
    late: dict[int, tuple[Tensor, float]] = {}
    for verifier, scores, rng in zip(verifiers, all_scores, rngs, strict=True):
        coins = LateCoins(rng) if verifier.draws_last(scores.tree) else Coins(rng)
        verdicts.append(verifier.decide_fast(scores.tree, scores, coins))
        if isinstance(coins, LateCoins) and coins.later is not None:
            late[len(verdicts) - 1] = coins.later
    for is_home in (True, False):
        here = {index: one for index, one in late.items() if (one[0].device.type == "cpu") == is_home}
        for index, token in zip(here, draw_all(list(here.values())), strict=True):
            verdicts[index] = replace(verdicts[index], next_token=token)
    return verdicts


def make_distributions(verifiers: Sequence[Verifier], all_scores: Sequence[Scores]) -> None:
    """Make the distributions that the rules will ask for, of all requests that sample alike by one call."""
    alike: dict[Hashable, list[tuple[Scores, int]]] = {}
    for verifier, scores in zip(verifiers, all_scores, strict=True):
        recipe = scores.sampler.recipe
        if recipe is None or scores.sampler.fixed:
            continue
        if not is_large(scores.logits):
            alike.setdefault(recipe, []).append((scores, len(scores.tree) if verifier.needs_all(scores) else 1))
    for group in alike.values():
        counts = [count for _, count in group]
        distributions = group[0][0].sampler.distributions(
            torch.cat([scores.logits[:count] for scores, count in group]), None
        )
        for (scores, _), part in zip(group, distributions.split(counts), strict=True):
            scores.made = part
        read_weights([scores for scores, count in group if count > 1])


def make_choices(all_scores: Sequence[Scores]) -> None:
    """Look up the tokens after all nodes of requests with noise, of all that sample alike by one call."""
    alike: dict[Hashable, list[Scores]] = {}
    for scores in all_scores:
        if scores.sampler.noise is not None and scores.sampler.context_free and scores.races_at_once:
            alike.setdefault(scores.sampler.recipe, []).append(scores)
    for group in alike.values():
        samplers, logits = [scores.sampler for scores in group], [scores.logits for scores in group]
        chosen = fixed_tokens(samplers, logits, [scores.lengths for scores in group])
        for scores, tokens in zip(group, chosen, strict=True):
            scores.chosen = tokens


def read_weights(all_scores: Sequence[Scores]) -> None:
    """p(x) and q(x) of the drafts of chains whose distributions are made, in one transfer."""
    drawn = [scores for scores in all_scores if _distributions_in_order(scores.tree)]
    if len(drawn) < 2:
        return
    counts = [len(scores.tree) - 1 for scores in drawn]
    drafts = torch.tensor([x for scores in drawn for x in scores.tree.tokens[1:]], device=drawn[0].logits.device)
    read: list[Tensor] = []
    for scores, x in zip(drawn, drafts[:, None].split(counts), strict=True):
        if scores.made is None or scores.tree.q is None:
            raise RuntimeError("weights are read of distributions that are made and drawn from")
        read += (scores.made[:-1].gather(1, x), scores.tree.q.gather(1, x))
    weights = iter(torch.cat(read)[:, 0].tolist())
    for scores, count in zip(drawn, counts, strict=True):
        scores.weights = (list(islice(weights, count)), list(islice(weights, count)))


def _distributions_in_order(tree: TokenTree) -> bool:
    """Whether every draft of a chain has a distribution of its own."""
    return tree.q is not None and len(tree.q) == len(tree) - 1 and tuple(tree.q_rows[1:]) == tuple(range(len(tree.q)))
