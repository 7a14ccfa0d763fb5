"""Verification of a whole batch: distributions, weights and last draws of all requests in one call each.

Some ten tensor operations per request on vectors of the vocabulary's size take longer to call than to run: in a batch
of eight they were a tenth of a round. The decisions equal those of
:meth:`foretoken.methods.verifiers.base.Verifier.verify` per request, bit for bit.

Who computes what a rule reads, by the kind of request:

    on a CPU, alone or greedy    the rule itself, as also where prefixes count or rows are large
    on a CPU, with noise         :func:`_make_choices`: the tokens after all nodes of a chain
    on a CPU, drawing            :func:`_make_distributions`: of all nodes, or of the root
    on a device                  :func:`_bring_home`, which copies tokens, distributions or logits to the host
    on a device, without drafts  the same, and the last draw is made on the device

The walks are host code, and a device read at every test would wait hundreds of times a round (446 times for eight trees
of ten sampled nodes). So the device computes the tokens of greedy requests and of those with noise, and the
distributions of others, for all nodes at once, and one transfer copies them. Where the prefix counts (penalties,
processors), the logits are copied, and the pipeline runs on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from foretoken.core import Rng, Scores, TokenTree, Verdict, is_large
from foretoken.core.noise import send_together
from foretoken.core.outside import is_outside
from foretoken.core.race import fixed_tokens, race
from foretoken.core.sampling import check_best, checks_later
from foretoken.core.transfers import read_together
from foretoken.methods.verifiers.base import Coins, Verifier, draw_all


class LateCoins(Coins):
    """Coins whose draw is deferred: the uniform is used now, and the token is not known yet.

    Attributes:
        later: the distribution to draw from, and the uniform.
    """

    UNKNOWN = -1

    def __init__(self, rng: Rng) -> None:
        super().__init__(rng)
        self.later: tuple[Tensor, float] | None = None

    def draw(self, distribution: Tensor) -> int:
        if self.later is not None:
            raise AssertionError("a rule that draws twice cannot defer its draw")
        self.later = (distribution, self._rng.uniform())
        return self.UNKNOWN


def verify_batch(verifiers: Sequence[Verifier], all_scores: Sequence[Scores], rngs: Sequence[Rng]) -> list[Verdict]:
    """The verdict of each request's verifier; the draws of rules that draw last are batched.

    Raises:
        ValueError: a chain rule met a node with two children.
        NonFiniteLogitsError: NaN logits, or no finite logit left.
    """
    if all_scores[0].logits.device.type != "cpu":
        all_scores = _bring_home(verifiers, all_scores)
    elif len(all_scores) == 1:
        return [verifiers[0].verify(all_scores[0].tree, all_scores[0], rngs[0])]
    else:
        _make_distributions(verifiers, all_scores)
        _make_choices(all_scores)
    verdicts: list[Verdict] = []
    late: dict[int, tuple[Tensor, float]] = {}
    for verifier, scores, rng in zip(verifiers, all_scores, rngs, strict=True):
        # A rule from outside may not support a token that is drawn later.
        if is_outside(type(verifier)) or not verifier.draws_last(scores.tree):
            verdicts.append(verifier.verify(scores.tree, scores, rng))
            continue
        coins = LateCoins(rng)
        verdicts.append(verifier.decide_fast(scores.tree, scores, coins))
        if coins.later is not None:
            late[len(verdicts) - 1] = coins.later
    for is_home in (True, False):
        drawings = {index: drawing for index, drawing in late.items() if (drawing[0].device.type == "cpu") == is_home}
        for index, token in zip(drawings, draw_all(list(drawings.values())), strict=True):
            verdicts[index] = replace(verdicts[index], next_token=token)
    return verdicts


def _make_distributions(verifiers: Sequence[Verifier], all_scores: Sequence[Scores]) -> None:
    """Compute the distributions that the rules will read, in one call per sampling recipe."""
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
            scores.batched_p = part
        _read_weights([scores for scores, count in group if count > 1])


def _make_choices(all_scores: Sequence[Scores]) -> None:
    """Compute the tokens after all nodes of requests with noise, in one call per sampling recipe."""
    alike: dict[Hashable, list[Scores]] = {}
    for scores in all_scores:
        if scores.sampler.noise is not None and scores.sampler.context_free and scores.races_at_once:
            alike.setdefault(scores.sampler.recipe, []).append(scores)
    for group in alike.values():
        samplers, logits = [scores.sampler for scores in group], [scores.logits for scores in group]
        chosen = fixed_tokens(samplers, logits, [scores.lengths for scores in group])
        for scores, tokens in zip(group, chosen, strict=True):
            scores.chosen = tokens


def _read_weights(all_scores: Sequence[Scores]) -> None:
    """Read p(x) and q(x) of the drafts of chains with computed distributions, in one transfer."""
    drawn = [scores for scores in all_scores if _distributions_in_order(scores.tree)]
    if len(drawn) < 2:
        return
    counts = [len(scores.tree) - 1 for scores in drawn]
    drafts = torch.tensor([x for scores in drawn for x in scores.tree.tokens[1:]], device=drawn[0].logits.device)
    read: list[Tensor] = []
    for scores, x in zip(drawn, drafts[:, None].split(counts), strict=True):
        if scores.batched_p is None or scores.tree.q is None:
            raise RuntimeError("weights are read from distributions that were drawn from")
        read += (scores.batched_p[:-1].gather(1, x), scores.tree.q.gather(1, x))
    weights = iter(torch.cat(read)[:, 0].tolist())
    for scores, count in zip(drawn, counts, strict=True):
        scores.weights = (list(islice(weights, count)), list(islice(weights, count)))


def _distributions_in_order(tree: TokenTree) -> bool:
    """Whether every draft of a chain has its own distribution, in order."""
    return tree.q is not None and len(tree.q) == len(tree) - 1 and tuple(tree.q_rows[1:]) == tuple(range(len(tree.q)))


def _bring_home(verifiers: Sequence[Verifier], all_scores: Sequence[Scores]) -> list[Scores]:
    """Scores on the host, except those of requests without a draft, of which one draw remains on the device.

    Raises:
        NonFiniteLogitsError: NaN logits, or no finite logit left.
    """
    pairs = list(zip(verifiers, all_scores, strict=True))
    free = [(verifier, scores) for verifier, scores in pairs if scores.sampler.context_free]
    looked_up = [scores for verifier, scores in free if scores.sampler.fixed and verifier.asks_choices]
    drawn = [scores for verifier, scores in free if not scores.sampler.fixed and not verifier.reads_logits]
    with checks_later() as best:
        tokens = _tokens(looked_up, best)
        distributions = _distributions(drawn)
    stays = {*tokens}
    for verifier, scores in pairs:
        # Without a draft, the only draw is made on the device, with those of other such requests.
        if id(scores) in distributions and len(scores.tree) == 1 and verifier.lossless:
            scores.batched_p = distributions[id(scores)]
            stays.add(id(scores))
    read: list[Tensor] = [*best, *tokens.values()]
    for scores in all_scores:
        if id(scores) not in stays:
            read += [distributions.get(id(scores), scores.logits)] + ([] if scores.tree.q is None else [scores.tree.q])
    got = iter(read_together(read))
    check_best([next(got) for _ in best])
    for scores in looked_up:
        scores.chosen = next(got).tolist()
    return [scores if id(scores) in stays else _home(scores, id(scores) in distributions, got) for scores in all_scores]


def _home(scores: Scores, has_distributions: bool, got: Iterator[Tensor]) -> Scores:
    """The scores on the host. Rules of sampled requests read only distributions, which replace the logits."""
    rows = next(got)
    tree = scores.tree if scores.tree.q is None else replace(scores.tree, q=next(got))
    return replace(scores, logits=rows, tree=tree, batched_p=rows if has_distributions else None, _distributions={})


def _alike(all_scores: Sequence[Scores]) -> Mapping[Hashable, list[Scores]]:
    groups: dict[Hashable, list[Scores]] = {}
    for scores in all_scores:
        groups.setdefault((scores.sampler.greedy, scores.sampler.recipe), []).append(scores)
    return groups


def _tokens(all_scores: Sequence[Scores], best: list[Tensor]) -> dict[int, Tensor]:
    """The tokens [N] after all nodes, by the identity of the scores, in their order."""
    by_scores: dict[int, Tensor] = {}
    noises = [(scores.sampler.noise, scores.positions) for scores in all_scores if scores.sampler.noise is not None]
    if noises:
        send_together(noises, all_scores[0].logits)
    for group in _alike(all_scores).values():
        logits = [scores.logits for scores in group]
        is_greedy = group[0].sampler.greedy
        rows = torch.cat(logits) if is_greedy else race([s.sampler for s in group], logits, [s.lengths for s in group])
        values, tokens = rows.max(-1)
        best.append(values)
        by_scores |= {id(scores): part for scores, part in zip(group, tokens.split([*map(len, logits)]), strict=True)}
    return {id(scores): by_scores[id(scores)] for scores in all_scores}


def _distributions(all_scores: Sequence[Scores]) -> dict[int, Tensor]:
    """The distributions [N, V] after all nodes, by the identity of the scores."""
    by_scores: dict[int, Tensor] = {}
    for group in _alike(all_scores).values():
        logits = [scores.logits for scores in group]
        parts = group[0].sampler.distributions(torch.cat(logits), None).split([*map(len, logits)])
        by_scores |= {id(scores): part for scores, part in zip(group, parts, strict=True)}
    return by_scores
