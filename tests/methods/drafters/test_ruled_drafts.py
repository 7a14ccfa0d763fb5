"""Drafts of a request whose rules rule out tokens: a grammar, banned words, a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from block_toys import random_net, started, target
from test_features import FAMILIES, PROMPT, new_drafter
from torch import Tensor

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.bpd import BpdDrafter
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.drawing import raced_ahead, ranker
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nets.bpd import BpdConfig, BpdHeads
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.swift import SwiftDrafter
from foretoken.models.forward.parts import TargetParts
from toys import engine, llamas

CLASSES = 4
ON_THE_DRAFT_MODEL = {
    "model": lambda target, draft: ModelDrafter(draft, tree="3x2"),
    "early_exit": lambda target, draft: EarlyExitDrafter(target, layer=1, tree="3x2"),
    "swift": lambda target, draft: SwiftDrafter(target, k=3, threshold=0.0, nodes=12, keep=0),
}


def by_place(ids: Tensor, scores: Tensor) -> Tensor:
    """The token behind n tokens must be n modulo 4."""
    tokens = torch.arange(scores.shape[-1])
    return scores.masked_fill(tokens % CLASSES != ids.shape[-1] % CLASSES, -torch.inf)


RULED, SAMPLED = (SamplingParams(temperature=t, processors=(by_place,)) for t in (0.0, 0.6))


class ByPlace:
    """The same as a grammar."""

    ends: frozenset[int] = frozenset()

    def processor(self, ids: Tensor, scores: Tensor) -> Tensor:
        return by_place(ids, scores)

    def forced(self, output: Sequence[int]) -> list[int]:
        return []

    def may_end(self, output: Sequence[int]) -> bool:
        return True


def depths_of(tree: TokenTree) -> list[int]:
    return [len(tree.path(node)) - 1 for node in range(len(tree))]


def follows_rule(tree: TokenTree, length: int) -> bool:
    """Whether every draft is what the rule allows behind its own path."""
    pairs = zip(tree.tokens[1:], depths_of(tree)[1:], strict=True)
    return all(token % CLASSES == (length + depth - 1) % CLASSES for token, depth in pairs)


def begun(drafter: Any, model: Any, params: SamplingParams, noise: Noise | None = None) -> Context:
    sequence = model.open()
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(params, len(PROMPT), noise), Rng(0))
    context.hidden = model.prefill(sequence, PROMPT[:-1], drafter.taps)
    model.release(sequence)
    drafter.start(context)
    return context


@pytest.mark.parametrize("family", FAMILIES)
def test_feature_trees_of_a_greedy_request_follow_its_rules(family: Any) -> None:
    model = target()
    drafter = new_drafter(family, model, nodes=8, depth=3, width=2)
    tree = drafter.propose(begun(drafter, model, RULED), Budget(3, 8))
    assert len(tree) == 9 and follows_rule(tree, len(PROMPT))


@pytest.mark.parametrize("name", ON_THE_DRAFT_MODEL)
def test_siblings_of_a_greedy_request_follow_its_rules(name: str) -> None:
    """They once were the likeliest tokens whatever the rules say, of which none is ever accepted."""
    model, draft = llamas()
    drafter: Drafter = ON_THE_DRAFT_MODEL[name](model, draft)
    tree, length = next_draft(model, drafter, Budget(3, 12))
    assert len(tree) > 7 and len(tree.children[0]) > 2 and follows_rule(tree, length)


@pytest.mark.parametrize("name", ON_THE_DRAFT_MODEL)
def test_a_stop_rule_judges_a_draft_among_the_allowed_tokens(name: str) -> None:
    model, draft = llamas()
    seen: list[Tensor | None] = []

    def never(distribution: Tensor | None, probability: float) -> bool:
        seen.append(distribution)
        return False

    next_draft(model, ON_THE_DRAFT_MODEL[name](model, draft), Budget(2, 9, stop=never))
    allowed = [{t % CLASSES for t in torch.nonzero(row)[:, 0].tolist()} for row in seen if row is not None]
    assert allowed and all(len(classes) == 1 for classes in allowed)


def next_draft(model: Any, drafter: Drafter, budget: Budget) -> tuple[TokenTree, int]:
    """The draft of a greedy request with a rule, and the number of its tokens."""
    speculative = engine(model, drafter)
    speculative.add(Request(PROMPT, RULED, 60, ignore_eos=True))
    speculative.step()
    (run,) = speculative.requests.running
    return drafter.propose(run.context, budget), len(run.context.tokens)


def test_lattices_of_a_greedy_request_follow_its_rules() -> None:
    model = target()
    drafter = DflashDrafter.of(random_net(DflashDrafter, model), TargetParts(model), model, nodes=6, width=2)
    tree = drafter.propose(started(drafter, model, PROMPT, RULED), Budget(3, 6))
    assert len(tree) == 7 and follows_rule(tree, len(PROMPT))


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "dflash"])
def test_the_likeliest_drafts_of_a_request_that_samples_follow_its_rules(family: Any, noise: bool) -> None:
    """With ``draw=greedy`` its noise has no influence, and its rules do."""
    model, options = target(), {"nodes": 8, "width": 3, "draw": "greedy"}
    drafter: Any
    if family == "dflash":
        drafter = DflashDrafter.of(random_net(DflashDrafter, model), TargetParts(model), model, **options)
    else:
        drafter = new_drafter(family, model, depth=3, **options)
    trees = [
        drafter.propose(begun(drafter, model, SAMPLED, n), Budget(3, 8)) for n in (Noise(4) if noise else None, None)
    ]
    assert trees[0] == trees[1] and len(trees[0]) == 9 and follows_rule(trees[0], len(PROMPT))


def test_pair_drafters_ask_the_rules_of_requests_with_noise_alone() -> None:
    """A greedy request would wait for the rules behind every path of candidates that were chosen without them."""
    model = target()
    net = random_net(Dflash2Drafter, model, rank=4, top=16, group=4)
    drafter = Dflash2Drafter.of(net, TargetParts(model), model, nodes=6, width=2)
    free, ruled = (drafter.propose(started(drafter, model, PROMPT, p), Budget(3, 6)) for p in (SamplingParams(), RULED))
    assert free == ruled and len(free) == 7 and not follows_rule(free, len(PROMPT))
    params = SamplingParams(temperature=1.0, processors=(by_place,))
    raced = drafter.propose(started(drafter, model, PROMPT, params, noise=True), Budget(3, 6))
    assert len(raced) == 7 and follows_rule(raced, len(PROMPT))


def heads_drafter(name: str, model: Any) -> Drafter:
    parts = TargetParts(model)
    if name == "medusa":
        heads: Any = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
        return MedusaDrafter(scattered(heads), parts, nodes=6)
    return BpdDrafter(scattered(BpdHeads(BpdConfig(parts.hidden_size, k=4, width=8))), parts)


def scattered(net: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return net


@pytest.mark.parametrize("noise", [None, Noise(4)])
@pytest.mark.parametrize("name", ["medusa", "bpd"])
def test_heads_ask_a_grammar_about_the_next_token_alone(name: str, noise: Noise | None) -> None:
    """What it says there is not true further on, where the heads do not know the text."""
    model = target()
    drafter, temperature = heads_drafter(name, model), 0.0 if noise is None else 1.0
    trees = []
    for processors in ((by_place,), ()):
        context = begun(drafter, model, SamplingParams(temperature=temperature, processors=processors), noise)
        context.constraint = ByPlace() if processors else None
        trees.append(drafter.propose(context, Budget(3, 6)))
    depths = depths_of(trees[0])
    assert all(t % CLASSES == len(PROMPT) % CLASSES for t, d in zip(trees[0].tokens, depths, strict=True) if d == 1)
    below = [[t for t, d in zip(tree.tokens, depths_of(tree), strict=True) if d > 1] for tree in trees]
    assert below[0] == below[1] and below[0]


def test_a_bias_counts_everywhere_and_penalties_alone_nowhere() -> None:
    """A greedy request's penalties change a flat draft's ranks far more than the target's."""
    banned = Sampler(SamplingParams(logit_bias={5: -100.0}))
    context = Context(0, list(PROMPT), len(PROMPT), banned, Rng(0))
    logits = torch.zeros(2, 8)
    logits[:, 5] = 1.0
    ranking, _ = raced_ahead(logits, [context, context], [0, 2])
    assert ranking[:, 5].tolist() == [-99.0, -99.0]
    assert ranker(banned) is banned and ranker(Sampler(SamplingParams(repetition_penalty=1.3))) is None


def test_who_ranks_the_candidates_of_requests_that_sample() -> None:
    seeded, unseeded = (Sampler(SamplingParams(temperature=1.0), noise=noise) for noise in (Noise(1), None))
    assert ranker(seeded) is seeded and ranker(unseeded) is None
    assert ranker(seeded, likeliest=True) is None and ranker(unseeded, likeliest=True) is None
    ruled = [Sampler(SAMPLED, noise=noise) for noise in (Noise(1), None)]
    assert ranker(ruled[0]) is ruled[0] and ranker(ruled[1]) is None
    by_rules = [ranker(sampler, likeliest=True) for sampler in ruled]
    assert by_rules[1] is ruled[1] and by_rules[0] is not None and by_rules[0].noise is None
