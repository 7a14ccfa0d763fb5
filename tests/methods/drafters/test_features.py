"""Feature-level drafters: their network, their cache, and the tree that confidence makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.models.base import Feed
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, llamas, serve

FAMILIES = [(EagleDrafter, EagleNet, EagleConfig), (MtpDrafter, MtpNet, MtpConfig)]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def network(net: Any, config: Any, target: HuggingFaceModel, seed: int = 0) -> Any:
    module = net(config(**asdict(LayerConfig.of_target(target.config))))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return module.eval()


def new_drafter(family: Any, target: HuggingFaceModel, **options: Any) -> FeatureDrafter:
    drafter, net, config = family
    feature_drafter: FeatureDrafter = drafter(
        FeatureModel(network(net, config, target), TargetParts(target), target), **options
    )
    return feature_drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_place_by_place_equals_the_whole_text(family: Any) -> None:
    """Reading in pieces through the cache, also behind a dropped branch, gives the outputs of one causal pass."""
    _, net, config = family
    target = llamas()[0]
    parts = TargetParts(target)
    module = network(net, config, target)
    states = torch.randn(6, parts.hidden_size, generator=torch.Generator().manual_seed(1))
    tokens = PROMPT[:6]
    with torch.no_grad():
        positions = torch.arange(6)[None]
        whole = module(parts.embedding(tokens).float()[None], states[None], positions)[0]
        logits = parts.logits(module.head_state(whole).double())
    model = FeatureModel(module, parts, target)
    sequence = model.open()
    first = model.forward([Feed(sequence, tokens[:3], states=states[:3])])[0]
    model.commit(sequence, range(3))
    model.forward([Feed(sequence, [7, 8], [-1, -1], states=states[:2])])  # a branch that is not kept
    model.commit(sequence, ())
    rest = model.forward([Feed(sequence, tokens[3:], states=states[3:])])[0]
    got = torch.cat([first.taps["state"], rest.taps["state"]])
    assert torch.allclose(got, whole, atol=1e-4)
    cached = torch.cat([first.logits, rest.logits]).double()
    assert float((cached - logits).abs().max()) < 0.05 * float(logits.std())  # the projection is packed in bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_holds_true_features_only(family: Any) -> None:
    """After every proposal: one place per committed token but the last, each from the target's own state."""
    target = HuggingFaceModel(llama())
    drafter = new_drafter(family, target, nodes=6, depth=3, width=2)
    checked = []
    propose = drafter.propose_batch

    def watched(contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        trees = propose(contexts, budgets)
        for context in contexts:
            sequence = context.state[drafter]
            assert sequence.tokens == context.tokens[1:]
            assert not context.state[drafter, "pending"]
            if len(context.tokens) == 1:  # nothing has been seen of it yet
                continue
            checked.append((list(context.tokens), fresh_head(drafter, target, context.tokens)))
            row, _ = context.state[drafter, "head"]
            assert torch.allclose(row.logits[-1], checked[-1][1], atol=1e-3)
        return trees

    drafter.propose_batch = watched  # type: ignore[method-assign]
    requests = [Request(PROMPT[:n], SamplingParams(), 12, seed=n) for n in (1, 4, 8)]
    serve(engine(target, drafter), requests)
    assert len(checked) > 6


def fresh_head(drafter: FeatureDrafter, target: HuggingFaceModel, tokens: Sequence[int]) -> Tensor:
    """[V] logits at the root from a new cache and the target's own features of the whole text."""
    sequence = target.open()
    states = target.prefill(sequence, tokens[:-1], ["last"])["last"].float()
    target.release(sequence)
    fresh = drafter.model.open()
    row = drafter.model.forward([Feed(fresh, tokens[1:], wanted=1, states=states)])[0]
    drafter.model.release(fresh)
    return row.logits[-1]


def test_a_round_without_a_draft_is_not_forgotten() -> None:
    """Features of rounds in which nothing was drafted are read later."""
    target = HuggingFaceModel(llama())
    drafter = new_drafter(FAMILIES[0], target)
    seen = []

    class Sometimes(Controller):
        name = "sometimes"

        def budget(self, context: Context, batch_size: int) -> Budget:
            seen.append(len(context.tokens))
            return Budget(3, 4) if len(seen) % 3 == 0 else Budget(0, 0)

    run = serve(engine(target, drafter, controller=Sometimes()), [Request(PROMPT, SamplingParams(), 14)])[0]
    plain = serve(engine(target), [Request(PROMPT, SamplingParams(), 14)])[0]
    assert run.output == plain.output and run.stats.num_draft_tokens > 0


class Fixed(FeatureModel):
    """Every node's children have probabilities .6, .3, .1."""

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ("state",)) -> Any:
        rows = super().forward(feeds, taps)
        distribution = torch.tensor([0.6, 0.3, 0.1] + [1e-9] * (self.vocab_size - 3)).log()
        return [type(row)(distribution.expand(len(row.logits), -1), row.taps) for row in rows]


def test_the_tree_of_the_worked_example() -> None:
    """Width 2, one expansion, four nodes: (0) .6, (0,0) .36, (1) .3, (0,1) .18."""
    target = HuggingFaceModel(llama())
    net = network(EagleNet, EagleConfig, target)
    drafter = EagleDrafter(Fixed(net, TargetParts(target), target), nodes=4, depth=2, width=2)
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
    context.hidden = {"last": torch.ones(len(PROMPT) - 1, 16)}
    drafter.start(context)
    tree = drafter.propose(context, Budget(8, 64))
    paths = {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}
    assert paths == {(0,), (0, 0), (1,), (0, 1)}
    assert len(drafter.propose(context, Budget(8, 2))) == 3
    assert max(drafter.propose(context, Budget(1, 64)).depths) == 1
    drafter.finish(context)
    assert not context.state


def proposed(grow: str, **options: int) -> set[tuple[int, ...]]:
    """Token paths that a head of fixed distribution (.6, .3, .1) drafts."""
    target = HuggingFaceModel(llama())
    model = Fixed(network(EagleNet, EagleConfig, target), TargetParts(target), target)
    drafter = EagleDrafter(model, **options, grow=grow)  # type: ignore[arg-type]
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
    context.hidden = {"last": torch.ones(len(PROMPT) - 1, 16)}
    drafter.start(context)
    tree = drafter.propose(context, Budget(8, 64))
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}


def test_trees_that_grow_otherwise() -> None:
    """Values: .6 .36 .3 .216 .18 .18 .1296 ...; E by depth of the best four: 1, 1.44, 1.476."""
    assert proposed("opt_tree,threshold=0", nodes=4, depth=6, width=3) == {(0,), (0, 0), (1,), (0, 0, 0)}
    stopped = proposed("opt_tree,threshold=0.95", nodes=9, depth=6, width=3)
    assert max(map(len, stopped)) == 2  # the first level adds 1.0, the second one .93
    expensive = proposed("cost_aware,node_cost=0.25,step_cost=0", nodes=16, depth=6, width=3)
    assert expensive == {(0,), (0, 0)}  # tokens per time with 1, 2 and 3 nodes: 1.28, 1.307, 1.291
    free = proposed("cost_aware,node_cost=0,step_cost=0", nodes=16, depth=6, width=3)
    assert len(free) == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_is_read_in_pieces(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the whole prompt squared would not fit; the pieces leave the same head."""
    target = HuggingFaceModel(llama())
    heads, calls = [], []
    monkeypatch.setattr("foretoken.methods.drafters.texts.BESIDE", 0)
    for chunk in (512, 3):
        monkeypatch.setattr("foretoken.methods.drafters.reading.PREFILL_CHUNK", chunk)
        drafter = new_drafter(family, target)
        forward = drafter.model.forward
        drafter.model.forward = lambda feeds, run=forward: calls.append(len(feeds[0].tokens)) or run(feeds)  # type: ignore
        context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
        sequence = target.open()
        context.hidden = target.prefill(sequence, PROMPT[:-1], ["last"])
        target.release(sequence)
        drafter.start(context)
        drafter.propose(context, Budget(1, 1))
        heads.append(context.state[drafter, "head"][0].logits)
    assert calls == [6, 1, 3, 3, 1]
    assert torch.allclose(heads[0], heads[1], atol=1e-4)


def test_a_batch_is_its_requests() -> None:
    for family in FAMILIES:
        requests = [Request(PROMPT[: n + 1], SamplingParams(temperature=1.0), 10, seed=n) for n in range(5)]
        together = serve(engine(HuggingFaceModel(llama()), new_drafter(family, HuggingFaceModel(llama()))), requests)
        for request, run in zip(requests, together, strict=True):
            target = HuggingFaceModel(llama())
            alone = serve(engine(target, new_drafter(family, target)), [request])[0]
            assert run.output == alone.output


def test_bad_options() -> None:
    target = HuggingFaceModel(llama())
    for option in ("nodes", "depth", "width"):
        with pytest.raises(ValueError, match=f"eagle needs {option} >= 1"):
            new_drafter(FAMILIES[0], target, **{option: 0})
    for grow, words in (("sequoia", "choose one of eagle2, opt_tree, cost_aware"), ("opt_tree,k=1", "threshold")):
        with pytest.raises(ValueError, match=words):
            new_drafter(FAMILIES[0], target, grow=grow)
    model = FeatureModel(network(EagleNet, EagleConfig, target), TargetParts(target), target)
    with pytest.raises(ValueError, match="hidden state"):
        model.forward([Feed(model.open(), [1, 2])])
