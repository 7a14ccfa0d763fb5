"""P-EAGLE: EAGLE-3's own row, and masks behind it of which nothing stays; training computes what drafting does."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Rng
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.eagle3 import Eagle3Drafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.peagle import PeagleConfig, PeagleModel, PeagleNet
from foretoken.methods.drafters.peagle import PeagleDrafter
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.peagle import PeagleRecipe
from toys import engine, llama, outputs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHOSEN = torch.tensor([1, 2, 5, 9, 14, 15, 20, 31])
T1 = SamplingParams(temperature=1.0)


def fill(net: torch.nn.Module, scale: float = 0.3) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return net.eval()


def random_net(target: HuggingFaceModel, **changes: Any) -> PeagleNet:
    shape = asdict(LayerConfig.of_target(target.config))
    defaults = {"vocab_size": 32, "draft_vocab": len(CHOSEN), "layers": "0,1,2", "num_layers": 2, "mask_token": 7}
    net: PeagleNet = fill(PeagleNet(PeagleConfig(**{**shape, **defaults, **changes})))
    net.choose(CHOSEN)
    return net


def target_model() -> HuggingFaceModel:
    return HuggingFaceModel(llama(dtype=torch.float32))


def new_drafter(target: HuggingFaceModel, net: PeagleNet | None = None, **options: Any) -> PeagleDrafter:
    return PeagleDrafter.of(net or random_net(target), TargetParts(target), target, **options)


def taps_of(model: HuggingFaceModel, tokens: list[int], taps: Any) -> dict[str, Tensor]:
    sequence = model.open()
    states = model.prefill(sequence, tokens, taps)
    model.release(sequence)
    return states


def started(
    drafter: Any, model: HuggingFaceModel, params: SamplingParams | None = None, noise: bool = False
) -> Context:
    sampler = Sampler(params or SamplingParams(), len(PROMPT), Noise(0) if noise else None)
    context = Context(0, list(PROMPT), len(PROMPT), sampler, Rng(0))
    context.hidden = taps_of(model, PROMPT[:-1], drafter.taps)
    drafter.start(context)
    return context


@torch.no_grad()
def whole_pass(drafter: PeagleDrafter, model: HuggingFaceModel, tokens: list[int], k: int) -> Tensor:
    """[k, V_d] logits behind a text, by the network over all of it and masks."""
    net, n = drafter.net, len(tokens) - 1
    taps = taps_of(model, tokens[:-1], drafter.taps)
    features = torch.cat([drafter.features(taps), net.mask_feature.expand(k - 1, -1)])
    ids = torch.tensor([*tokens[1:], *[net.config.mask_token] * (k - 1)])
    embeddings = drafter.model.parts.embedding(ids).float()
    if net.embed_tokens is not None:
        embeddings = net.embed_tokens(ids)
    output = net(embeddings[None], features[None], torch.arange(n + k - 1)[None])[0, -k:]
    logits: Tensor = drafter.head(net.head_state(output))
    return logits


def test_it_says_what_runs_its_network() -> None:
    drafter = new_drafter(target_model())
    model = drafter.model
    runs = {"forward": model.forward_name, "native_off": model.native_off}
    assert drafter.describe() == [{"drafter": "peagle", "vocabulary": len(CHOSEN), **runs}]


@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "sampled"])
def test_one_place_of_one_layer_is_eagle_3(params: SamplingParams) -> None:
    target = target_model()
    net = random_net(target, num_layers=1)
    config = Eagle3Config(**{key: getattr(net.config, key) for key in Eagle3Config.__dataclass_fields__})
    plain = Eagle3Net(config)
    plain.load_state_dict({name: value for name, value in net.state_dict().items() if name != "mask_hidden"})
    drafter = new_drafter(target, net, k=1, width=4)
    other = Eagle3Drafter.of(plain.eval(), TargetParts(target), target, nodes=16, depth=1, width=4)
    got, expected = (d.propose(started(d, target, params), Budget(1, 4)) for d in (drafter, other))
    assert got.tokens == expected.tokens and len(got) > 1
    if expected.q is not None:
        assert got.q is not None and torch.allclose(got.q, expected.q, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 1}, {"own_embedding": True, "num_layers": 3}, {"share_head": True}]
)
def test_cached_rounds_are_a_fresh_pass(changes: dict[str, Any]) -> None:
    """After 1, 3 and 6 new tokens, and twice behind the same text."""
    target = target_model()
    drafter = new_drafter(target, random_net(target, **changes), k=4)
    context = started(drafter, target, T1)
    for fresh in (0, 1, 3, 6):
        if fresh:
            new = [(5 * fresh + i) % 32 for i in range(fresh)]
            context.hidden_start = len(context.tokens) - 1
            context.tokens += new
            context.hidden = {
                tap: rows[context.hidden_start :]
                for tap, rows in taps_of(target, context.tokens[:-1], drafter.taps).items()
            }
            drafter.observe(context, None, None, None)  # type: ignore[arg-type]
        expected = torch.zeros(4, 32)
        expected[:, CHOSEN] = torch.softmax(whole_pass(drafter, target, context.tokens, 4), -1)
        for _ in range(2):
            tree = drafter.propose(context, Budget(4, 4))
            assert tree.q is not None and torch.allclose(tree.q.float(), expected, atol=1e-4)
        sequence = context.state[drafter]
        assert sequence.tokens == context.tokens[1:] and not sequence.scratch_tokens


@pytest.mark.parametrize("noise", [False, True], ids=["greedy", "race"])
def test_trees_hold_the_likeliest_prefixes(noise: bool) -> None:
    target = target_model()
    drafter = new_drafter(target, k=3, nodes=9)
    tree = drafter.propose(started(drafter, target, T1 if noise else None, noise), Budget(3, 9))
    paths = [_path(tree, node) for node in range(1, len(tree))]
    assert len(paths) == 9
    if not noise:
        rows = torch.log_softmax(whole_pass(drafter, target, PROMPT, 3).double(), -1)
        ids = CHOSEN.tolist()
        values = {
            path: sum(float(rows[i, ids.index(token)]) for i, token in enumerate(path))
            for depth in (1, 2, 3)
            for path in product(ids, repeat=depth)
        }
        assert sorted(map(tuple, paths)) == sorted(sorted(values, key=lambda path: -values[path])[:9])


def _path(tree: Any, node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def test_chains_carry_what_they_were_drawn_from() -> None:
    target = target_model()
    drafter = new_drafter(target, k=3)
    context = started(drafter, target, T1)
    expected = torch.zeros(3, 32)
    expected[:, CHOSEN] = torch.softmax(whole_pass(drafter, target, PROMPT, 3), -1)
    tree = drafter.propose(context, Budget(3, 3))
    assert tree.q is not None and torch.allclose(tree.q.float(), expected, atol=1e-4)
    assert set(tree.tokens[1:]) <= set(CHOSEN.tolist())


def toy_recipe(**settings: str) -> PeagleRecipe:
    target = target_model()
    recipe = PeagleRecipe(
        target, TargetParts(target), {"num_layers": "2", "places": "4", "draft_vocab": "8", **settings}
    )
    fill(recipe.net)
    recipe.net.eval()
    return recipe


def toy_batch(recipe: PeagleRecipe, length: int = 12) -> Batch:
    tokens = torch.randint(32, (2, length + 1), generator=torch.Generator().manual_seed(5))
    return Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)


@pytest.mark.parametrize("settings", [{}, {"own_embedding": "true"}, {"num_layers": "1", "mask_token": "9"}])
@torch.no_grad()
def test_a_row_of_training_is_a_row_of_drafting(settings: dict[str, str]) -> None:
    """From every anchor, through the cache."""
    recipe = toy_recipe(**settings)
    batch = toy_batch(recipe)
    pairs = [(a, d) for a in range(11) for d in (1, 2, 3) if a + d < 11]
    anchors, depths = (torch.tensor([*first, *rest]) for first, rest in zip((range(11), [0] * 11), zip(*pairs)))  # noqa: B905
    states = recipe.outputs(batch, anchors, depths)
    model = PeagleModel(recipe.net, recipe.parts, recipe.target)
    features = recipe.net.fuse([batch.taps[tap] for tap in recipe.config.taps])
    for text in range(2):
        sequence = model.open()
        for anchor in range(11):
            count = min(3, 10 - anchor)
            tokens = [int(batch.tokens[text, anchor + 1]), *[recipe.config.mask_token] * count]
            inputs = torch.cat([features[text, anchor : anchor + 1], model.mask_states(count)])
            got = model.forward([Feed(sequence, tokens, states=inputs)])[0].taps["state"]
            model.commit(sequence, [0])
            for depth in range(1 + count):
                (row,) = ((anchors == anchor) & (depths == depth)).nonzero()[:, 0].tolist()
                assert torch.allclose(got[depth], states[text, row], atol=1e-4)


@pytest.mark.parametrize("vocab", ["0", "8"])
@torch.no_grad()
def test_the_loss_is_of_the_rows_whose_token_is_learned(vocab: str) -> None:
    """The text's rows and those of masks; not behind the last label, nor where the best token cannot be guessed."""
    recipe = toy_recipe(draft_vocab=vocab)
    whole = toy_batch(recipe)
    best = recipe.parts.logits(whole.taps["last"]).argmax(-1)
    ids = torch.arange(32)
    if vocab != "0":  # with some of the best tokens, and not with others
        ids = torch.cat([best.unique()[::2], torch.arange(32)[~torch.isin(torch.arange(32), best)]])[:8].sort().values
        recipe.net.choose(ids)
    learned = torch.rand(whole.tokens.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    learned[1, 7:] = False  # as what fills up a row
    batch = Batch(whole.tokens, whole.taps, recipe.parts, learned=learned)
    anchors, depths = recipe.rows(batch, torch.Generator().manual_seed(0))
    pairs = list(zip(anchors.tolist(), depths.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) and {anchor for anchor, depth in pairs if not depth} == set(range(11))
    logits = recipe.draft_logits(recipe.outputs(batch, anchors, depths))
    losses = []
    for text in range(2):
        for row, (anchor, depth) in enumerate(pairs):
            label = anchor + depth + 2
            assert label <= 12 and (depth == 0 or bool(learned[:, label].any()))
            target = recipe.parts.logits(batch.taps["last"][text, label - 1])
            if bool(learned[text, label]) and int(target.argmax()) in ids.tolist():
                losses.append(float(-(target[ids].softmax(-1) * logits[text, row].log_softmax(-1)).sum()))
    assert 2 < len(losses) < 2 * len(anchors)
    mean = float(recipe.loss(batch, torch.Generator().manual_seed(0)))
    assert mean == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_every_weight_is_trained() -> None:
    recipe = toy_recipe(own_embedding="true", share_head="false")
    recipe.loss(toy_batch(recipe), torch.Generator().manual_seed(0)).backward()
    assert [name for name, weight in recipe.net.named_parameters() if weight.grad is None] == []
    assert float(recipe.net.mask_hidden.grad.abs().min()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"places": "0"}, "places from 1 to 64"),
        ({"num_layers": "0"}, "num_layers >= 1"),
        ({"mask_token": "32"}, "mask_token must be a token of the target"),
        ({"heads": "0"}, "heads must be a multiple of kv_heads"),
        ({"kv_heads": "0"}, "heads must be a multiple of kv_heads"),
        ({"head_dim": "3"}, "head_dim must be even"),
        ({"ffn": "0"}, "ffn at least 1"),
        ({"keep": "0.1"}, "0 < least <= keep <= 1"),
        ({"layers": "3"}, "reach to 3, and the target has 2"),
    ],
)
def test_bad_settings(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy_recipe(**settings)


def test_bad_options_and_short_texts() -> None:
    target = target_model()
    for options, words in (({"k": 65}, "k from 1 to 64"), ({"nodes": 0}, "nodes >= 1"), ({"draw": "x"}, "draw=iid")):
        with pytest.raises(ValueError, match=words):
            new_drafter(target, **options)
    recipe = toy_recipe()
    with pytest.raises(ValueError, match="too short for 4 positions: use a larger --context"):
        recipe.loss(toy_batch(recipe, 4), torch.Generator())


def test_greedy_text_is_plain_decodings() -> None:
    target = target_model()
    requests = [Request(prompt, SamplingParams(), 24) for prompt in ([5], PROMPT, [0, 1, 2])]
    assert outputs(engine(target, new_drafter(target, k=4)), requests) == outputs(engine(target), requests)
