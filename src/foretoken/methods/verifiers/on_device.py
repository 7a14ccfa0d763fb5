"""What the rules of a batch read of a device, in one transfer: the walks themselves are host code.

A rule that asked the device at every test would wait for it hundreds of times a round (446 times for eight trees of ten
sampled nodes).  So the tokens of greedy requests, and of those with noise, are looked up there for all nodes at once,
distributions are made there, and both are brought to the host together.  Where the prefix counts (penalties,
processors) the logits themselves come, and the request's pipeline runs on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.core import Scores
from foretoken.core.noise import send_together
from foretoken.core.sampling import check_best, checks_later, race
from foretoken.core.transfers import read_together
from foretoken.methods.verifiers.base import Verifier


def bring_home(verifiers: Sequence[Verifier], all_scores: Sequence[Scores]) -> list[Scores]:
    """Scores whose rules need nothing of the device any more, one draw of requests without a draft left out.

    Raises:
        NonFiniteLogitsError: NaN logits, or no finite logit left.
    """
    pairs = list(zip(verifiers, all_scores, strict=True))
    looked_up = [scores for verifier, scores in pairs if _is_looked_up(verifier, scores)]
    drawn = [scores for verifier, scores in pairs if _is_drawn(verifier, scores)]
    with checks_later() as best:
        tokens = _tokens(looked_up, best)
        made = _distributions(drawn)
    stays = {*tokens}
    for verifier, scores in pairs:
        if id(scores) in made and _draws_alone(verifier, scores):
            scores.made = made[id(scores)]
            stays.add(id(scores))
    read: list[Tensor] = [*best, *tokens.values()]
    for scores in all_scores:
        if id(scores) not in stays:
            read += [made.get(id(scores), scores.logits)] + ([] if scores.tree.q is None else [scores.tree.q])
    got = iter(read_together(read))
    check_best([next(got) for _ in best])
    for scores in looked_up:
        scores.chosen = next(got).tolist()
    return [scores if id(scores) in stays else _home(scores, id(scores) in made, got) for scores in all_scores]


def _home(scores: Scores, has_distributions: bool, got: Iterator[Tensor]) -> Scores:
    """The same on the host; rules of sampled requests read distributions alone, which stand where the logits were."""
    rows = next(got)
    tree = scores.tree if scores.tree.q is None else replace(scores.tree, q=next(got))
    return replace(scores, logits=rows, tree=tree, made=rows if has_distributions else None, _distributions={})


def _is_looked_up(verifier: Verifier, scores: Scores) -> bool:
    return verifier.asks_choices and scores.sampler.fixed and scores.sampler.context_free


def _is_drawn(verifier: Verifier, scores: Scores) -> bool:
    return scores.sampler.context_free and not scores.sampler.fixed and not verifier.reads_logits


def _draws_alone(verifier: Verifier, scores: Scores) -> bool:
    """Nothing was drafted: the one draw is made on the device, with those of other such requests."""
    return len(scores.tree) == 1 and verifier.lossless


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
