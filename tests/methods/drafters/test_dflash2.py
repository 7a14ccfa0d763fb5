"""DFlash2: convolutions that stay inside a block, and q of the selector's scores."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from block_toys import drafter_of, random_net, shape_of, started, taps_of, target, whole_pass
from torch import Tensor

from foretoken.core import Budget
from foretoken.core.sampling import SamplingParams
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net, DynamicConv
from foretoken.models.forward.parts import TargetParts


def fresh(model: Any, **changes: Any) -> Any:
    """A DFlash2 as it begins, over random layers, and the DFlash that it is."""
    plain = random_net(DflashDrafter, model)
    net = Dflash2Net(Dflash2Config(**shape_of(model, group=4, top=32, **changes)))
    net.load_state_dict(plain.state_dict(), strict=False)
    return net.eval(), plain


def test_it_begins_as_dflash_bit_for_bit() -> None:
    model = target()
    net, plain = fresh(model)
    dflash2, dflash = drafter_of(Dflash2Drafter, model, net), drafter_of(DflashDrafter, model, plain)
    for params in (SamplingParams(), SamplingParams(temperature=0.8)):
        context, plain_context = started(dflash2, model, params=params), started(dflash, model, params=params)
        for _ in range(3):
            tree, expected = dflash2.propose(context, Budget(3, 9)), dflash.propose(plain_context, Budget(3, 9))
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            if expected.q is not None:
                assert tree.q is not None and torch.equal(tree.q, expected.q)


@torch.no_grad()
def test_a_convolution_by_hand() -> None:
    """Row i takes taps of rows i, i - 1, .. of its own block, each channel by its group's kernel."""
    config = Dflash2Config(**shape_of(target(), conv=3, group=4))
    conv = DynamicConv(config)
    generator = torch.Generator().manual_seed(0)
    for weight in conv.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    u, y = torch.randn(2, 1, 8, 16, generator=generator)  # two blocks of four
    got = torch.stack([conv(y, kernels) for kernels in conv.kernels(u)])
    z = conv.kernel_projection(u).view(8, 2, 3, 4)
    for side, row, channel in product(range(2), range(8), range(16)):
        expected = 0.0
        for tap in range(3):
            if row % 4 >= tap:
                kernel = conv.base_kernel[side, tap, channel] + z[row, side, tap, channel // 4]
                expected += float(kernel * y[0, row - tap, channel])
        assert float(got[side, 0, row, channel]) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_nothing_leaks_over_a_blocks_start() -> None:
    """Without attention a row depends on the rows before it in its block, and on nothing else."""
    model = target()
    net = random_net(Dflash2Drafter, model, group=4, causal="1")
    for layer in net.layers:
        layer.self_attn.o_proj.weight.zero_()
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(1))
    positions, masks = torch.arange(8)[None], [torch.zeros(1, 1, 8, 8)] * 2

    def states(rows: Tensor) -> Tensor:
        output: Tensor = net(rows, positions, masks, lambda layer, key, value: (key, value))[0]
        return output

    changed = x.clone()
    changed[0, 3] += 1
    before, behind = states(x), states(changed)
    assert torch.equal(before[:3], behind[:3]) and torch.equal(before[4:], behind[4:])
    changed = x.clone()
    changed[0, 4] += 1
    assert torch.equal(states(x)[:4], states(changed)[:4]) and not torch.allclose(states(x)[5], states(changed)[5])


def scores(drafter: Any, model: Any, context: Any) -> tuple[list[list[int]], Any]:
    """Candidates of every place, and ``score(place, before, candidate)`` from the formula."""
    net = drafter.net
    taps = taps_of(model, context.tokens[:-1], drafter.taps)
    with torch.no_grad():
        states = whole_pass(net, drafter.model.parts, drafter.features(taps), context.root, 4)[1:]
        logits = drafter.head(states)
    selector = net.candidate_selector
    hidden = states @ selector.hidden_projection.weight.T

    def score(place: int, before: int, token: int) -> float:
        pair = selector.predecessor_codebook[before] * hidden[place] * selector.successor_codebook[token]
        return float(logits[place, token] + pair.sum())

    return logits.topk(3, -1).indices.tolist(), score


@torch.no_grad()
def test_chains_have_the_product_of_q_as_their_distribution() -> None:
    """Six tokens, three candidates, blocks of four: every chain, by enumeration."""
    model, params, rounds = target(6), SamplingParams(temperature=0.7), 3000
    net = random_net(Dflash2Drafter, model, mask_token=5, group=4, top=3, rank=4)
    drafter = drafter_of(Dflash2Drafter, model, net)
    context = started(drafter, model, [1, 2, 3, 4], params)
    candidates, score = scores(drafter, model, context)
    expected: dict[tuple[int, ...], float] = {}
    for path in product(*candidates):
        chance = 1.0
        for place, token in enumerate(path):
            before = path[place - 1] if place else 4
            weights = {c: math.exp(score(place, before, c) / 0.7) for c in candidates[place]}
            chance *= weights[token] / sum(weights.values())
        expected[path] = chance
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(rounds):
        tree = drafter.propose(context, Budget(3, 3))
        counts[tuple(tree.tokens[1:])] += 1
        assert tree.q is not None and torch.allclose(tree.q.sum(-1), torch.ones(3).to(tree.q))
        assert all(int((row > 0).sum()) <= 3 for row in tree.q)
    assert set(counts) <= set(expected)
    assert sum(abs(counts[path] / rounds - chance) for path, chance in expected.items()) / 2 < 0.05


@torch.no_grad()
@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_the_tree_holds_the_likeliest_prefixes(nodes: int) -> None:
    model = target(6)
    net = random_net(Dflash2Drafter, model, mask_token=5, group=4, top=3, rank=4)
    drafter = drafter_of(Dflash2Drafter, model, net, nodes=nodes)
    context = started(drafter, model, [1, 2, 3, 4])
    candidates, score = scores(drafter, model, context)
    values: dict[tuple[int, ...], float] = {}
    for depth in (1, 2, 3):
        for path in product(*candidates[:depth]):
            total = 0.0
            for place, token in enumerate(path):
                row = {c: score(place, path[place - 1] if place else 4, c) for c in candidates[place]}
                total += row[token] - math.log(sum(map(math.exp, row.values())))
            values[path] = total
    tree = drafter.propose(context, Budget(3, 64))
    paths = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))]
    assert len(paths) == nodes
    left_out = [value for path, value in values.items() if path not in paths]
    assert min(values[path] for path in paths) > max(left_out) - 0.05  # the projection is packed in bfloat16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": 5}, "a group that divides 16 channels"),
        ({"conv": 0}, "conv >= 1"),
        ({"rank": 0}, "rank >= 1 and top >= 1"),
        ({"top": 0}, "rank >= 1 and top >= 1"),
    ],
)
def test_bad_shapes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Dflash2Config(**shape_of(target(), **{"group": 4, **changes}))


def test_the_codebooks_are_by_the_targets_ids() -> None:
    """Whatever can be guessed."""
    model = target()
    parts = TargetParts(model)
    net = random_net(Dflash2Drafter, model, group=4, top=4)
    ids = torch.arange(0, 32, 2)
    drafter = Dflash2Drafter.of(net, parts, model, ids, nodes=4)
    tree = drafter.propose(started(drafter, model), Budget(3, 9))
    assert len(tree) == 5 and all(token % 2 == 0 for token in tree.tokens[1:])
