"""DFlash: the network against Transformers' own, its cache, what rows see, the lattice, chains, options."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_toys import PROMPT, drafter_of, random_net, shape_of, started, taps_of, target, whole_pass
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from foretoken.core import Budget, Kind
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.blocks import BlockDrafter
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.methods.trees.lattice import Continuations, lattice
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from toys import engine, serve

# -- the network -------------------------------------------------------------------------------------------------------

WINDOW = 5


def stock_twin(layer_types: list[str]) -> tuple[Any, BlockNet]:
    """Transformers' network with random weights, and ours with the same ones."""
    torch.manual_seed(3)
    config = MuseGlimmerAssistantConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=len(layer_types), num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, sliding_window=WINDOW, layer_types=layer_types,
        block_size=4, mask_token_id=7, target_layer_ids=[0, 1], rope_parameters={"rope_type": "default",
        "rope_theta": 500.0}, attn_implementation="eager",
    )  # fmt: skip
    stock = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, weight in stock.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.4 + ("norm" in name))
    reach = ",".join(str(WINDOW if kind == "sliding_attention" else 0) for kind in layer_types)
    net = BlockNet(
        BlockConfig(16, 4, 2, 8, 24, 500.0, 1e-5, vocab_size=32, layers=len(layer_types), taps="1,2", block=4,
                    mask_token=7, reach=reach)
    )  # fmt: skip
    names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
    weights = {}
    for name, weight in stock.state_dict().items():
        prefix = next((p for p in names if name.startswith(p)), None)
        weights[name if prefix is None else names[prefix] + name.removeprefix(prefix)] = weight
    net.load_state_dict(weights)
    return stock, net.eval()


@pytest.mark.parametrize(
    "layers", [["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]]
)
@torch.no_grad()
def test_the_network_is_transformers_own(layers: list[str]) -> None:
    """Three rounds, which append 9, 1 and 3 places of the text, through both caches."""
    stock, net = stock_twin(layers)
    model = target()
    parts = TargetParts(model)
    block_model = BlockModel(net, parts, model)
    sequence, cache, length = block_model.open(), DFlashCache(config=stock.config), 0
    cache.activate_past_recording()
    generator = torch.Generator().manual_seed(1)
    for new in (9, 1, 3):
        taps = [torch.randn(new, 16, generator=generator) for _ in range(2)]
        anchor = new + 10
        block_model.forward([Feed(sequence, [0] * new, wanted=0, states=net.context(taps))])
        block_model.commit(sequence, range(new))
        got = block_model.blocks([sequence], [anchor], 4)[0].taps["state"]
        cache.set_previous_accepted_tokens(new)
        ids = torch.tensor([[anchor, 7, 7, 7]])
        expected = stock(
            noise_embeds=parts.embed.weight[ids].float(),
            context_hidden_states=torch.cat(taps, -1)[None],
            position_ids=torch.arange(length, length + new + 4)[None],
            cache=cache,
        ).last_hidden_state[0]
        cache.crop(-4)
        length += new
        assert torch.allclose(got, expected, atol=1e-5), float((got - expected).abs().max())


@pytest.mark.parametrize("changes", [{}, {"reach": "0,3"}, {"causal": "1"}, {"sinks": True, "own_mask": True}])
@torch.no_grad()
def test_rounds_through_the_cache_equal_a_fresh_pass(changes: dict[str, Any]) -> None:
    model = target()
    parts = TargetParts(model)
    net = random_net(DflashDrafter, model, **changes)
    block_model = BlockModel(net, parts, model)
    places = torch.randn(12, 16, generator=torch.Generator().manual_seed(2))
    texts = [block_model.open() for _ in range(2)]
    at = [0, 0]
    for news in ((1, 4), (3, 1), (7, 2)):  # texts of two lengths in one call
        feeds = [Feed(s, [5] * n, wanted=0, states=places[a : a + n]) for s, n, a in zip(texts, news, at, strict=True)]
        block_model.forward(feeds)
        for index, new in enumerate(news):
            block_model.commit(texts[index], range(new))
            at[index] += new
        got = block_model.blocks(texts, [9, 11], 4)
        for index, anchor in enumerate((9, 11)):
            expected = whole_pass(net, parts, places[: at[index]], anchor, 4)
            assert torch.allclose(got[index].taps["state"], expected, atol=1e-5)
    assert [len(text.tokens) for text in texts] == [11, 7] and not texts[0].scratch_tokens


@torch.no_grad()
def test_sinks_are_those_of_transformers() -> None:
    """One logit a head in the softmax, as gpt-oss has it."""
    torch.manual_seed(5)
    net = random_net(DflashDrafter, target(), sinks=True)
    attention, dim = net.layers[0].self_attn, net.config.head_dim
    attention.attention_sink_bias.copy_(torch.randn(net.config.heads) + 1)
    x, mask = torch.randn(2, 5, net.config.hidden_size), torch.zeros(2, 1, 5, 5)
    mask[1, :, :, 3] = -torch.inf
    cos, sin = torch.ones(2, 1, 5, dim), torch.zeros(2, 1, 5, dim)
    query = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, dim))).transpose(1, 2)
    key, value = attention.keys(x, cos, sin)
    stock = SimpleNamespace(
        num_key_value_groups=net.config.heads // net.config.kv_heads,
        sinks=attention.attention_sink_bias,
        training=False,
    )
    heads = eager_attention_forward(stock, query, key, value, mask, dim**-0.5)[0]
    got = attention(x, cos, sin, mask, lambda key, value: (key, value))
    assert torch.allclose(got, attention.o_proj(heads.flatten(2)), atol=1e-5)


@torch.no_grad()
def test_what_a_row_sees() -> None:
    model = target()
    parts = TargetParts(model)
    places = torch.randn(12, 16, generator=torch.Generator().manual_seed(2))
    far = places.clone()
    far[:4] = far[:4].flip(0) + 1
    window = random_net(DflashDrafter, model, reach="5")
    near, moved = (whole_pass(window, parts, rows, 9, 4) for rows in (places, far))
    assert torch.equal(near[1:], moved[1:])  # rows behind the anchor are at 13, 14, 15: they see no place before 8
    assert not torch.allclose(
        *(whole_pass(random_net(DflashDrafter, model), parts, rows, 9, 4) for rows in (places, far))
    )
    for causal in ("0", "1"):
        net = random_net(DflashDrafter, model, causal=causal)
        few, many = whole_pass(net, parts, places, 9, 3), whole_pass(net, parts, places, 9, 4)
        assert torch.allclose(few, many[:3], atol=1e-6) is (causal == "1")


def test_the_hidden_state_of_the_last_token_is_not_asked_for() -> None:
    """The target has not run it: before every draft there is one place per token before it."""
    model = target()
    drafter = drafter_of(DflashDrafter, model, random_net(DflashDrafter, model))
    checked, propose = 0, drafter.propose_batch

    def watched(contexts: Any, budgets: Any) -> Any:
        nonlocal checked
        trees = propose(contexts, budgets)
        for context in contexts:
            assert context.state[drafter].tokens == context.tokens[1:]
            if len(context.tokens) > 1:
                taps = taps_of(model, context.tokens[:-1], drafter.taps)
                rows = whole_pass(drafter.net, drafter.model.parts, drafter.features(taps), context.root, 4)
                got = drafter.model.blocks([context.state[drafter]], [context.root], 4)[0].taps["state"]
                assert torch.allclose(got, rows, atol=1e-4)
                checked += 1
        return trees

    drafter.propose_batch = watched
    serve(engine(model, drafter), [Request(PROMPT[:n], SamplingParams(), 12, seed=n) for n in (1, 4, 8)])
    assert checked > 6


# -- the lattice -------------------------------------------------------------------------------------------------------


def paths_by_hand(tables: list[dict[int, dict[int, float]]], count: int) -> set[tuple[int, ...]]:
    """The likeliest prefixes, by trying all; ``tables[slot][before][token]`` is a log-probability."""
    candidates = []
    for depth in range(1, len(tables) + 1):
        for path in product(range(6), repeat=depth):
            steps = zip(range(depth), (0, *path), path, strict=False)
            values = [tables[slot].get(before, {}).get(token, -math.inf) for slot, before, token in steps]
            candidates.append((sum(values), path))
    return {path for value, path in sorted(candidates, reverse=True)[:count] if value > -math.inf}


@pytest.mark.parametrize("count", [1, 4, 9, 20])
def test_best_first_is_the_best_of_all(count: int) -> None:
    """Three places, three candidates of six tokens, each place's chances depend on the token before."""
    generator = torch.Generator().manual_seed(count)
    tables: list[dict[int, dict[int, float]]] = []
    for _ in range(3):
        rows = torch.log_softmax(torch.randn(6, 3, generator=generator), -1).tolist()
        tables.append({before: dict(zip((1, 3, 4), row, strict=True)) for before, row in enumerate(rows)})

    def place(path: Any, state: Any) -> Continuations:
        row = tables[len(path)][path[-1] if path else 0]
        order = sorted(row, key=lambda token: -row[token])
        return Continuations(order, [row[token] for token in order], [False] * 3)

    seen = lattice(0, place, 3, count)
    assert {tuple(seen.path_tokens(node)) for node in range(1, len(seen))} == paths_by_hand(tables, count)
    assert seen.scores == sorted(seen.scores, reverse=True)


def test_ties_and_ends() -> None:
    def place(path: Any, state: Any) -> Continuations:
        return Continuations([4, 2], [math.log(0.5)] * 2, [False, True], (state or 0) + 1)

    seen = lattice(0, place, 3, 7)
    paths = [tuple(seen.path_tokens(node)) for node in range(1, len(seen))]
    assert paths == [(4,), (2,), (4, 4), (4, 2), (4, 4, 4), (4, 4, 2)]  # nothing behind a 2
    assert len(lattice(0, place, 0, 7)) == 1


def test_the_tree_is_that_of_the_networks_chances() -> None:
    model = target()
    drafter = drafter_of(DflashDrafter, model, random_net(DflashDrafter, model), nodes=7, width=3)
    context = started(drafter, model)
    tree = drafter.propose(context, Budget(8, 64))
    rows = block_logits(drafter, context)
    sure = torch.log_softmax(rows, -1)
    assert len(tree) == 8 and tree.kind is Kind.POINT
    scores = {}
    for node in range(1, 8):
        path = [tree.tokens[i] for i in tree.path(node)[1:]]
        scores[tuple(path)] = sum(float(sure[slot, token]) for slot, token in enumerate(path))
    best = sorted((float(sure[0, token]) for token in range(32)), reverse=True)[:3]
    assert max(scores.values()) == pytest.approx(best[0], abs=0.05)
    worst = min(scores.values())
    for first in range(32):  # no token at the first place that is likelier than the worst node was left out
        assert (first,) in scores or float(sure[0, first]) <= worst + 0.05 or float(sure[0, first]) < best[-1] + 0.05


def block_logits(drafter: BlockDrafter, context: Any) -> Tensor:
    """[k, V] of a request's block, from a fresh pass."""
    taps = taps_of(target(), context.tokens[:-1], drafter.taps)
    states = whole_pass(drafter.net, drafter.model.parts, drafter.features(taps), context.root, 4)
    with torch.no_grad():
        return drafter.head(states[0 if drafter.net.config.from_anchor else 1 :])


# -- chains ------------------------------------------------------------------------------------------------------------


def test_chains_are_drawn_from_what_they_carry() -> None:
    """And that is the network's distribution at the request's temperature, place by place."""
    model = target(6)
    drafter = drafter_of(DflashDrafter, model, random_net(DflashDrafter, model, mask_token=5))
    counts: Counter[tuple[int, ...]] = Counter()
    params, rounds = SamplingParams(temperature=0.7), 2000
    context = started(drafter, model, [1, 2, 3, 4], params)
    for _ in range(rounds):
        tree = drafter.propose(context, Budget(3, 3))
        counts[tuple(tree.tokens[1:])] += 1
    q = torch.softmax(block_logits_of(drafter, model, context) / 0.7, -1)
    assert tree.q is not None and torch.allclose(tree.q.float(), q, atol=0.02)
    wrong = sum(
        abs(counts[path] / rounds - float(q[0, path[0]] * q[1, path[1]] * q[2, path[2]]))
        for path in product(range(6), repeat=3)
    )
    assert wrong / 2 < 0.12


def block_logits_of(drafter: BlockDrafter, model: Any, context: Any) -> Tensor:
    taps = taps_of(model, context.tokens[:-1], drafter.taps)
    states = whole_pass(drafter.net, drafter.model.parts, drafter.features(taps), context.root, 4)
    with torch.no_grad():
        return drafter.head(states[1:])


def test_a_stop_keeps_the_token_that_it_stops_after() -> None:
    model = target()
    drafter = drafter_of(DflashDrafter, model, random_net(DflashDrafter, model), width=3)
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        context = started(drafter, model, params=params)
        assert max(drafter.propose(context, Budget(3, 9, min_confidence=1.1)).depths) == 1
        assert max(drafter.propose(context, Budget(3, 9)).depths) == 3
        assert max(drafter.propose(context, Budget(2, 9)).depths) == 2


@pytest.mark.parametrize("changes", [{}, {"from_anchor": True}, {"draft_vocab": 12, "own_head": True}])
def test_random_weights_keep_the_greedy_text(changes: dict[str, Any]) -> None:
    model = target()
    net = random_net(DflashDrafter, model, **changes)
    requests = [Request(PROMPT[: n + 1], SamplingParams(), 16, seed=n) for n in range(4)]
    plain = serve(engine(model), requests)
    runs = serve(engine(model, drafter_of(DflashDrafter, model, net)), requests)
    assert [run.output for run in runs] == [run.output for run in plain]
    assert all(run.stats.num_draft_tokens for run in runs)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block": 1}, "a block has 2 to 256 rows, not 1"),
        ({"block": 257}, "2 to 256 rows, not 257"),
        ({"mask_token": 32}, "mask_token must be a token of the target, from 0 to 31, not 32"),
        ({"mask_token": -1}, "mask_token must be a token"),
        ({"taps": "1,x"}, "depths of the target joined by commas"),
        ({"reach": "1,2,3"}, "one number, or one for each of 2 layers"),
        ({"causal": "no"}, "one number, or one for each of 2 layers"),
        ({"draft_vocab": 33}, "draft_vocab must be from 0"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"causal": "2"}, "causal='2' must be 0 or 1"),
        ({"head_dim": 0}, "head_dim must be even and at least 2"),
        ({"ffn": 0}, "ffn at least 1"),
    ],
)
def test_bad_shapes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        BlockConfig(**shape_of(target(), **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 4}, r"depth from 1 to 3 \(the size of its block\)"),
        ({"nodes": 0}, "nodes >= 1"),
        ({"width": 0}, "width >= 1"),
        ({"draw": "often"}, "draw=iid, without_replacement or greedy"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    model = target()
    with pytest.raises(ValueError, match=words):
        drafter_of(DflashDrafter, model, random_net(DflashDrafter, model), **options)
