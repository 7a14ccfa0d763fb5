"""DSpark: corrections by the token before, and stopping by confidence."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from block_toys import drafter_of, random_net, shape_of, started, taps_of, target, whole_pass
from torch import Tensor

from foretoken.core import Budget, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet

T = 0.7


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_without_a_correction_it_is_dflash_from_the_anchor(head: str) -> None:
    model = target()
    plain = random_net(DflashDrafter, model, from_anchor=True)
    net = DsparkNet(DsparkConfig(**shape_of(model, head=head, top=32)))  # W2 begins as zeros
    net.load_state_dict(plain.state_dict(), strict=False)
    dspark, dflash = drafter_of(DsparkDrafter, model, net.eval()), drafter_of(DflashDrafter, model, plain)
    for params in (SamplingParams(), SamplingParams(temperature=0.8)):
        context, plain_context = (started(drafter, model, params=params) for drafter in (dspark, dflash))
        for _ in range(3):
            tree, expected = dspark.propose(context, Budget(4, 9)), dflash.propose(plain_context, Budget(4, 9))
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            assert max(tree.depths) <= 4


@torch.no_grad()
def chances(drafter: Any, model: Any, context: Any, depth: int) -> dict[tuple[int, ...], float]:
    """Every chain and its chance, from the formulas."""
    net, parts = drafter.net, drafter.model.parts
    taps = taps_of(model, context.tokens[:-1], drafter.taps)
    states = whole_pass(net, parts, drafter.features(taps), context.root, 4)
    logits, head = drafter.head(states), net.markov_head
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight

    def correction(place: int, path: tuple[int, ...]) -> Tensor:
        memory = torch.zeros(w1.shape[1])
        for k in range(place + 1):
            e = w1[path[k - 1] if k else context.root]
            if net.config.head == "vanilla":
                read = e
            elif net.config.head == "gated":
                read = torch.sigmoid(head.gate_proj(torch.cat([states[k], e]))) * e
            else:
                gate, new, out = head.joint_proj(torch.cat([memory, e, states[k]])).chunk(3)
                memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                read = torch.tanh(out)
        return w2 @ read

    by_path = {}
    for path in product(range(len(w2)), repeat=depth):
        chance = 1.0
        for place, token in enumerate(path):
            scores = logits[place] + correction(place, path)
            kept = logits[place].topk(net.config.top).indices
            if token not in kept.tolist():
                chance = 0.0
                break
            weights = torch.exp(scores[kept] / T)
            chance *= float(torch.exp(scores[token] / T) / weights.sum())
        by_path[path] = chance
    return by_path


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_chains_by_enumeration(head: str) -> None:
    """Five tokens, drafts of three, four candidates: the restricted q sums to 1 and is what is drawn from."""
    model, rounds = target(5), 3000
    drafter = drafter_of(DsparkDrafter, model, random_net(DsparkDrafter, model, mask_token=4, head=head, top=4, rank=3))
    context = started(drafter, model, [1, 2, 3, 4], SamplingParams(temperature=T))
    expected = chances(drafter, model, context, 3)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(rounds):
        tree = drafter.propose(context, Budget(3, 3))
        counts[tuple(tree.tokens[1:])] += 1
        assert tree.q is not None and torch.allclose(tree.q.sum(-1), torch.ones(3).to(tree.q))
    assert sum(abs(counts[path] / rounds - chance) for path, chance in expected.items()) / 2 < 0.06


@torch.no_grad()
def test_a_place_is_left_out_by_what_is_known_before_it_is_drawn() -> None:
    """The chance of survival is the product of the confidences; the last drafted token has no say in it."""
    model = target()
    net = random_net(DsparkDrafter, model)
    context = started(drafter_of(DsparkDrafter, model, net), model, params=SamplingParams(temperature=1.0))
    taps = taps_of(model, context.tokens[:-1], ("layer:1", "layer:2"))
    parts = drafter_of(DsparkDrafter, model, net).model.parts
    states = whole_pass(net, parts, net.context([taps[t].float() for t in ("layer:1", "layer:2")]), context.root, 4)
    lengths = Counter[int]()
    for stop in (0.05, 0.2, 0.5):
        drafter = drafter_of(DsparkDrafter, model, net, stop=stop)
        for seed in range(40):
            context = started(drafter, model, params=SamplingParams(temperature=1.0), seed=seed)
            drafts = drafter.propose(context, Budget(4, 4)).tokens[1:]
            survival, length = 1.0, 0
            while length < 4:
                before = drafts[length - 1] if length else context.root
                if length > len(drafts):
                    break
                joined = torch.cat([states[length], net.markov_head.markov_w1.weight[before]])
                survival *= float(torch.sigmoid(net.confidence_head.proj(joined)))
                if survival < stop:
                    break
                length += 1
            assert len(drafts) == length
            lengths[length] += 1
    assert len(lengths) > 1


@torch.no_grad()
def test_a_tree_stops_on_every_path_by_itself() -> None:
    """Of the whole tree of two candidates a place, exactly the nodes whose own path survives that far are left."""
    model, stop = target(), 0.2
    net = random_net(DsparkDrafter, model)
    whole = drafter_of(DsparkDrafter, model, net, nodes=64, width=2)
    cut = drafter_of(DsparkDrafter, model, net, nodes=64, width=2, stop=stop)
    context = started(whole, model)
    all_paths, kept = (paths_of(d.propose(started(d, model), Budget(4, 64))) for d in (whole, cut))
    taps = taps_of(model, context.tokens[:-1], whole.taps)
    states = whole_pass(net, whole.model.parts, whole.features(taps), context.root, 4)

    def survives(path: tuple[int, ...]) -> bool:
        befores = [context.root, *path[:-1]]
        rows = [torch.cat([states[k], net.markov_head.markov_w1.weight[t]]) for k, t in enumerate(befores)]
        return math.prod(float(torch.sigmoid(net.confidence_head.proj(row))) for row in rows) >= stop

    assert len(all_paths) == 2 + 4 + 8 + 16
    assert kept == {path for path in all_paths if survives(path)} and 0 < len(kept) < len(all_paths)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))}


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"head": "lstm"}, {}, "head=vanilla or head=gated or head=rnn"),
        ({"confidence": "no"}, {}, "confidence=state, both or neither"),
        ({}, {"stop": 1.0}, "stop from 0 to below 1"),
        ({}, {"stop": math.nan}, "stop from 0 to below 1"),
        ({"confidence": ""}, {"stop": 0.5}, "no confidence head to stop by"),
    ],
)
def test_bad_shapes_and_options(changes: dict[str, Any], options: dict[str, Any], words: str) -> None:
    model = target()
    with pytest.raises(ValueError, match=words):
        drafter_of(DsparkDrafter, model, random_net(DsparkDrafter, model, **changes), **options)
