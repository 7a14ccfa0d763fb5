"""UNO: noise rows go through the updates and no others do, training sees what drafting sees, and nothing stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.costs import TargetCost
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.methods.drafters.nets.uno import UnoConfig, UnoNet
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.uno import UnoDrafter, paying_rows
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import why_not
from foretoken.models.variants.gated import GatedModel, linear_shapes
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.uno import UnoRecipe
from models.checkpoints import new_model, prompt_of
from toys import (
    CAUGHT,
    FALSE_ALARM,
    engine,
    joint_distribution,
    layer_runs,
    llama,
    llamas,
    outputs,
    sampled_p_value,
    serve,
    tables,
)

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12]]
T1 = SamplingParams(temperature=1.0)
SEEDED = {"greedy": SamplingParams(), "seeded": T1}


def net_for(target: HuggingFaceModel, places: int = 4, size: float = 0.3, **changes: Any) -> UnoNet:
    """Random updates, B included."""
    shape = {"rank": 2, "alpha": 4.0, "mask_token": target.vocab_size, **changes}
    shapes = linear_shapes(target.model)
    net = UnoNet(UnoConfig(target.vocab_size, target.num_layers, shapes, places=places, **shape))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    return net


def drafter_for(target: HuggingFaceModel, places: int = 4, size: float = 0.3, **options: Any) -> UnoDrafter:
    return UnoDrafter(target, net_for(target, places, size), **options)


def requests(params: SamplingParams, tokens: int = 24) -> list[Request]:
    return [Request(p, params, tokens, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]


def context_on(target: HuggingFaceModel, tokens: list[int], params: SamplingParams | None = None) -> Context:
    """A request whose text the target has read, but for the root."""
    sequence = target.open()
    target.prefill(sequence, tokens[:-1])
    context = Context(0, list(tokens), len(tokens), Sampler(params or SamplingParams(), len(tokens)), Rng(0))
    context.sequence = sequence
    return context


def drafted_logits(target: HuggingFaceModel, net: UnoNet, tokens: list[int], noise: list[int]) -> Tensor:
    """[1 + n, V] of the root and n rows of noise, as drafting scores them."""
    view, sequence = GatedModel(target, net), target.open()
    target.prefill(sequence, tokens[:-1])
    logits = view.forward([Feed(sequence, [tokens[-1], *noise])])[0].logits
    sequence.clear_scratch()
    target.release(sequence)
    return logits


def ban_even(ids: Tensor, scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 0, -torch.inf)


def test_a_sampled_requests_first_token_is_not_certain_under_its_rules() -> None:
    target = HuggingFaceModel(llama())
    drafter = drafter_for(target, draw="greedy", nodes=6)
    context = context_on(target, PROMPTS[0], SamplingParams(temperature=1.0, processors=(ban_even,)))
    tree = drafter.propose(context, Budget(2, 6))
    assert len(tree.children[0]) > 1 and all(token % 2 for token in tree.tokens[1:])


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False])
def test_without_updates_rows_say_what_the_target_says_of_noise(lean: bool) -> None:
    target = HuggingFaceModel(llama(), lean=lean)
    text, noise = [3, 1, 4, 1, 5], [9, 2, 6]
    with torch.no_grad():
        expected = llama()(input_ids=torch.tensor([[*text, *noise]])).logits[0, -4:]
    logits = drafted_logits(target, net_for(target, size=0.0), text, noise)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lean", [True, False])
def test_the_root_has_the_bits_that_it_has_without_updates(lean: bool, dtype: torch.dtype) -> None:
    target = HuggingFaceModel(new_model("llama", hidden_size=64).to(dtype), lean=lean)
    text, noise = prompt_of(9), [9, 2, 6]
    sequence = target.open()
    target.prefill(sequence, text[:-1])
    forwards = target.forwards
    if forwards.fast is not None:  # the same arithmetic: a native forward's rounds in fewer places
        forwards.fast = forwards.fast.twin
    plain = target.forward([Feed(sequence, [text[-1], *noise])])[0].logits
    target.release(sequence)
    logits = drafted_logits(target, net_for(target), text, noise)
    assert torch.equal(logits[0], plain[0])
    assert all(not torch.allclose(logits[i], plain[i], atol=0.05) for i in (1, 2, 3))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "phi3", "olmo2", "gpt_neox", "opt", "qwen3_moe"])
def test_families_draft_alike_on_every_forward(name: str) -> None:
    """Biases, fused projections, norms around sublayers, experts; and the text stays plain decoding's."""
    network = new_model(name, hidden_size=64).to(torch.float32 if name == "qwen3_moe" else torch.float64)
    target, public = HuggingFaceModel(network), HuggingFaceModel(network, lean=False)
    net, text = net_for(target, size=0.2), prompt_of(7)
    logits, expected = (drafted_logits(model, net, text, [9, 2, 6]) for model in (target, public))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3 * float(expected.std()))
    assert outputs(engine(target, UnoDrafter(target, net)), requests(SEEDED["greedy"])) == outputs(
        engine(public), requests(SEEDED["greedy"])
    )


@pytest.mark.parametrize("lean", [True, False])
def test_rows_of_a_batch_are_what_they_are_alone(lean: bool) -> None:
    """Texts of other lengths beside each other, one with fewer rows; padding that is left out moves nobody's gate."""
    target = HuggingFaceModel(llama(), lean=lean)
    net, noise = net_for(target), [[4, 8, 2], [1], [7, 7]]
    alone = [drafted_logits(target, net, text, ids) for text, ids in zip(PROMPTS, noise, strict=True)]
    for spared in (None, 1):
        if target.forwards.fast is not None and spared is not None:
            target.forwards.fast.spared = spared
        sequences = [target.open() for _ in PROMPTS]
        for sequence, text in zip(sequences, PROMPTS, strict=True):
            target.prefill(sequence, text[:-1])
        feeds = [
            Feed(sequence, [text[-1], *ids]) for sequence, text, ids in zip(sequences, PROMPTS, noise, strict=True)
        ]
        for rows, expected in zip(GatedModel(target, net).forward(feeds), alone, strict=True):
            torch.testing.assert_close(rows.logits, expected, rtol=0, atol=1e-9)
        for sequence in sequences:
            sequence.clear_scratch()
            target.release(sequence)


@pytest.mark.parametrize("lean", [True, False])
def test_updates_and_weights_that_change_are_followed(lean: bool) -> None:
    target = HuggingFaceModel(new_model("llama").double(), lean=lean)
    net, text, noise = net_for(target), prompt_of(6), [9, 2]
    before = drafted_logits(target, net, text, noise)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(1.5)
    after = drafted_logits(target, net, text, noise)
    assert torch.equal(after[0], before[0]) and not torch.allclose(after[1:], before[1:], atol=1e-3)
    with torch.no_grad():
        target.model.model.layers[0].mlp.up_proj.weight.mul_(1.2)
    changed = drafted_logits(target, net, text, noise)
    fresh = HuggingFaceModel(target.model, lean=lean)
    torch.testing.assert_close(changed, drafted_logits(fresh, net, text, noise), rtol=0, atol=1e-12)
    assert not torch.allclose(changed[0], after[0], atol=1e-3)


def test_hooks_are_removed_when_a_draft_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceModel(llama(), lean=False)
    drafter = drafter_for(target)
    speculative = engine(target, drafter)
    speculative.add(requests(SamplingParams())[0])

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.models.variants.gated.F.linear", broken)
    with pytest.raises(KeyboardInterrupt):
        speculative.step()
    assert not any(module._forward_hooks for module in target.model.modules())


# -- what a round leaves -----------------------------------------------------------------------------------------------


def stored(target: HuggingFaceModel, row: int, count: int) -> list[Tensor]:
    buffers = [*target.cache.keys, *target.cache.values]
    return [b[row, :, :count].clone() for b in buffers if b is not None]


def rows_after_rounds(target: HuggingFaceModel, drafter: Any, rounds: int) -> Iterator[tuple[list[int], list[Tensor]]]:
    speculative = engine(target, drafter)
    speculative.add(Request(PROMPTS[0], SamplingParams(), 60, ignore_eos=True))
    for _ in range(rounds):
        speculative.step()
        (run,) = speculative.requests.running
        yield list(run.sequence.tokens), stored(target, run.sequence.row, len(run.sequence.tokens))
    speculative.cancel(run.id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_committed_rows_have_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    network = new_model("llama", hidden_size=64).to(dtype)
    target, plain = (HuggingFaceModel(network, exact="bitwise") for _ in range(2))
    *_, (text, expected) = rows_after_rounds(plain, None, 24)
    for tokens, rows in rows_after_rounds(target, drafter_for(target, size=0.05), 6):
        assert tokens == text[: len(tokens)]
        assert all(torch.equal(a, b[:, : len(tokens)]) for a, b in zip(rows, expected, strict=True))
    assert len(tokens) >= len(PROMPTS[0]) + 2 * 5


def test_noise_that_stays_in_the_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the draft wrote at the drafts' places is kept by the verification."""
    network = new_model("llama", hidden_size=64)
    target, plain = (HuggingFaceModel(network, exact="bitwise") for _ in range(2))
    *_, (_, expected) = rows_after_rounds(plain, None, 16)
    drafter = drafter_for(target)
    rightly = target.forward

    def kept(feeds: Any, taps: Any = ()) -> Any:
        reads = feeds[0].sequence.num_slots < 9
        return rightly(feeds, taps) if reads else target.forward_part(feeds, drafter.model.plan)

    monkeypatch.setattr(target, "forward", kept)
    monkeypatch.setattr(type(target), "commit", _commit_anything)
    same = [
        all(torch.equal(a, b[:, : len(tokens)]) for a, b in zip(rows, expected, strict=True))
        for tokens, rows in rows_after_rounds(target, drafter, 3)
        if len(tokens) <= expected[0].shape[1]
    ]
    assert not all(same)


def _commit_anything(self: HuggingFaceModel, sequence: Any, path: Any) -> None:
    sequence.provisional = False
    super(HuggingFaceModel, self).commit(sequence, path)


@pytest.mark.parametrize("params", [*SEEDED.values(), SamplingParams(repetition_penalty=1.4)], ids=[*SEEDED, "penalty"])
@pytest.mark.parametrize("options", [{}, {"width": 1}, {"k": 2}, {"nodes": 3}], ids=str)
def test_the_first_draft_is_always_accepted(params: SamplingParams, options: dict[str, Any]) -> None:
    target = llamas()[0]
    firsts: list[int] = []

    class Watched(UnoDrafter):
        def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
            assert tree.parents.count(0) == 1  # siblings of what is certain are of no use
            firsts.append(len(verdict.path))

    speculative = engine(target, Watched(target, net_for(target), **options))
    plain = outputs(engine(llamas()[0]), requests(params))
    assert outputs(speculative, requests(params)) == plain
    assert firsts and min(firsts) >= 1


@pytest.mark.parametrize("draw", ["iid", "without_replacement"])
def test_the_first_draft_of_a_drawn_tree_is_always_accepted(draw: str) -> None:
    target = llamas()[0]
    drafter = drafter_for(target, draw=draw, nodes=6)
    unseeded = [Request(p, T1, 24, ignore_eos=True) for p in PROMPTS]
    for run in serve(engine(target, drafter), unseeded):
        assert run.stats.num_accepted_tokens_per_pos[0] >= run.stats.num_drafts - 1  # the last may have no room


@pytest.mark.parametrize("params", SEEDED.values(), ids=SEEDED)
@pytest.mark.parametrize("lean", [True, False])
def test_the_text_is_that_of_plain_decoding(lean: bool, params: SamplingParams) -> None:
    target = HuggingFaceModel(llama(), lean=lean)
    plain = outputs(engine(llamas()[0]), requests(params))
    for batch in (1, 4):
        assert outputs(engine(target, drafter_for(target), max_batch=batch), requests(params)) == plain
    router = RouterDrafter([drafter_for(target), NgramDrafter(n=2)])
    assert outputs(engine(target, router), requests(params)) == plain


# -- the distribution --------------------------------------------------------------------------------------------------


def distribution_p_value(drafter: UnoDrafter, target: HuggingFaceModel) -> float:
    distributions = {"T=1": joint_distribution(target, T1, [3, 3], 3)}
    return sampled_p_value(engine(target, drafter), {"T=1": T1}, distributions, [3, 3], 3, 700)


def test_sampled_outputs_have_the_targets_distribution() -> None:
    target, _ = llamas(vocab=4)
    assert distribution_p_value(drafter_for(target, 3), target) > FALSE_ALARM


def test_a_planted_bias_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token is proposed as if it had been drawn."""
    target, _ = llamas(vocab=4)
    whole = UnoDrafter.propose_batch

    def lying(self: UnoDrafter, contexts: Any, budgets: Any) -> list[TokenTree]:
        trees = whole(self, contexts, budgets)
        return [
            t if t.q is None else dataclasses.replace(t, tokens=(t.tokens[0], *t.q.argmax(-1).tolist())) for t in trees
        ]

    monkeypatch.setattr(UnoDrafter, "propose_batch", lying)
    assert distribution_p_value(drafter_for(target, 3), target) < CAUGHT


def test_drawn_drafts_carry_what_they_were_drawn_from() -> None:
    target = llamas()[0]
    net = net_for(target, 3)
    context = context_on(target, [4, 9, 2], T1)
    tree = UnoDrafter(target, net).propose(context, Budget(5, 8))
    noise = net.config.filler(torch.tensor([3, 4])).tolist()
    expected = torch.softmax(drafted_logits(target, net, [4, 9, 2], noise), -1)
    assert tree.kind is Kind.IID and tree.q is not None
    torch.testing.assert_close(tree.q.double(), expected, rtol=0, atol=1e-6)


# -- noise, shape, cost ------------------------------------------------------------------------------------------------


def test_noise_is_a_function_of_the_position() -> None:
    config = UnoConfig(1000, 2, {}, mask_token=300)
    ids = config.filler(torch.arange(6000))
    assert torch.equal(ids, config.filler(torch.arange(6000))) and int(ids.min()) >= 1 and int(ids.max()) <= 299
    counts = torch.bincount(ids, minlength=300)[1:].float()
    assert float(((counts - 6000 / 299) ** 2 / (6000 / 299)).sum()) < 299 + 4 * (2 * 299) ** 0.5  # uniform
    assert int((ids[1:] == ids[:-1]).sum()) < 60
    assert set(UnoConfig(9, 2, {}, noise="mask", mask_token=0).filler(torch.arange(4)).tolist()) == {0}


def test_budgets_and_the_end_of_the_context() -> None:
    target = HuggingFaceModel(llama(context=12))
    drafter = drafter_for(target, width=1)
    budgets = (Budget(2, 9), Budget(9, 3), Budget(9, 9))
    depths = [len(drafter.propose(context_on(target, [1, 2, 3]), budget)) - 1 for budget in budgets]
    assert depths == [2, 3, 4]
    assert len(drafter.propose(context_on(target, list(range(11))), Budget(9, 9))) - 1 == 2
    assert len(drafter.propose(context_on(target, list(range(12))), Budget(9, 9))) - 1 == 1
    late = context_on(target, [1, 2, 3])
    late.tokens.append(4)  # the target has not read 3 yet
    assert len(drafter.propose(late, Budget(9, 9))) == 1
    (run,) = serve(engine(target, drafter), [Request([1, 2, 3], max_new_tokens=9)])
    assert run.output == outputs(engine(HuggingFaceModel(llama(context=12))), [Request([1, 2, 3], max_new_tokens=9)])[0]


def test_one_forward_drafts() -> None:
    target = llamas()[0]
    drafter = drafter_for(target)
    before = layer_runs(target)
    drafter.propose_batch([context_on(target, p) for p in PROMPTS[::2]], [Budget(4, 9)] * 2)
    read = 2 * target.num_layers  # the two prompts
    assert layer_runs(target) - before - read == target.num_layers


def test_how_many_places_pay() -> None:
    flat = dict.fromkeys(range(9), 1.0).__getitem__
    assert paying_rows([0.9, 0.9, 0.9], 4, flat) == 4
    assert paying_rows([0.9, 0.0, 0.9], 4, flat) == 2
    assert paying_rows([0.1, 0.1, 0.1], 4, lambda n: float(n)) == 1
    costs = {2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2, 1: 1.0}
    assert paying_rows([0.6, 0.4, 0.3], 4, costs.__getitem__) == 3  # the example of the page
    steep = paying_rows([0.5, 0.4, 0.3], 4, lambda n: 1 + 0.2 * n)
    assert 1 <= steep < 4
    target = llamas()[0]
    drafter = drafter_for(target, draw="without_replacement", nodes=12)
    assert drafter.shape.within(4, 12)(()) == 1 and drafter.shape.max_depth <= 4
    drafter.fit(TargetCost({1: 1.0, 2: 1.5, 64: 60.0}))
    assert drafter.shape.within(4, 12)(()) == 1
    assert drafter.cost_beside(0) == pytest.approx(1 / 4)


# -- drafting and training say the same --------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["random", "mask"])
def test_training_sees_what_drafting_sees(noise: str) -> None:
    target = HuggingFaceModel(llama())
    recipe = UnoRecipe(target, TargetParts(target), {"places": "4", "rank": "2", "alpha": "4", "noise": noise})
    recipe.net.load_state_dict(net_for(target).state_dict())
    target.model.requires_grad_(False)
    text = torch.randint(32, (2, 14), generator=torch.Generator().manual_seed(3))
    columns = torch.tensor([[0, 7], [3, 12]])
    ids = recipe.random_noise((2, 2, 3), torch.Generator().manual_seed(4))
    with torch.no_grad():
        states = recipe.states(Batch(text, {}, recipe.parts), columns, ids)
        logits = recipe.parts.logits(states)
    for row in range(2):
        for group, column in enumerate(columns[row].tolist()):
            drafted = drafted_logits(target, recipe.net, text[row, : column + 1].tolist(), ids[row, group].tolist())
            torch.testing.assert_close(logits[row, group], drafted[1:], rtol=0, atol=1e-4)
    target.model.requires_grad_(True)


def test_the_loss_is_at_the_right_places() -> None:
    """The loss equals a plain loop: the row of noise i (from 1) below column c predicts the token behind c + i."""
    target = HuggingFaceModel(llama())
    parts = TargetParts(target)
    target.model.requires_grad_(False)
    recipe = UnoRecipe(
        target, parts, {"places": "3", "rank": "2", "alpha": "4", "noise": "random", "entropy": "0.25", "decay": "0.5"}
    )
    recipe.net.load_state_dict(net_for(target).state_dict())
    tokens = torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(5))
    batch = Batch(tokens, parts.features(tokens[:, :-1], ("last",)), parts)
    chosen: list[tuple[Tensor, Tensor]] = []
    states = recipe.states
    recipe.states = lambda b, columns, ids: chosen.append((columns, ids)) or states(b, columns, ids)  # type: ignore
    loss = recipe.loss(batch, torch.Generator().manual_seed(1))
    ((columns, ids),) = chosen
    target_probs = torch.softmax(parts.logits(batch.taps["last"])[0].double(), -1)
    total = 0.0
    for group, column in enumerate(columns[0].tolist()):
        log_probs = torch.log_softmax(
            drafted_logits(target, recipe.net, tokens[0, : column + 1].tolist(), ids[0, group].tolist()), -1
        )
        for i in (1, 2):
            p, log_q = target_probs[column + i], log_probs[i]
            part = -0.25 * (p * log_q).sum() + 0.75 * 0.5 * (p - log_q.exp()).abs().sum()
            total += float(part) * 0.5 ** (i - 1) / 1.5 / columns.shape[1]
    assert float(loss.detach()) == pytest.approx(total, abs=1e-4)
    loss.backward()
    assert all(weight.grad is not None for weight in recipe.net.parameters())
    assert all(weight.grad is None for weight in target.model.parameters())
    target.model.requires_grad_(True)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({}, "needs a mask_token"),
        ({"mask_token": 33}, "from 2 to 32 for noise=random, not 33"),
        ({"mask_token": 1}, "from 2 to 32 for noise=random, not 1"),
        ({"noise": "mask", "mask_token": 32}, "from 0 to 31 for noise=mask, not 32"),
        ({"noise": "none", "mask_token": 3}, "noise must be random or mask"),
        ({"mask_token": 3, "places": 1}, "places >= 2, not 1"),
        ({"mask_token": 3, "rank": 0}, "rank >= 1"),
    ],
)
def test_bad_shapes(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        UnoConfig(32, 2, {}, **shape)
    assert "\n" not in str(error.value)


def test_what_is_refused() -> None:
    target = llamas()[0]
    for options, words in (
        ({"k": 5}, "k from 1 to 4"),
        ({"draw": "any"}, "draw=iid, without_replacement or greedy"),
        ({"width": 0}, "width >= 1"),
        ({"tree": "2x1"}, "draws a tree with draw=without_replacement only"),
    ):
        with pytest.raises(ValueError, match=words):
            drafter_for(target, **options)  # type: ignore[arg-type]
    other = llamas(vocab=8)[0]
    with pytest.raises(ValueError, match="updates are for a vocabulary of 32, and the target has 8"):
        UnoDrafter(other, net_for(target))
    wide = HuggingFaceModel(new_model("llama", vocab_size=32, hidden_size=64, num_hidden_layers=2))
    words = r"the update of self_attn.q_proj is \[16, 16\], and the target's layer \[64, 64\]"
    with pytest.raises(ValueError, match=words):
        UnoDrafter(wide, net_for(target))
    deep = HuggingFaceModel(new_model("llama", vocab_size=32, num_hidden_layers=3))
    with pytest.raises(ValueError, match="for 2 layers, and the target has 3"):
        UnoDrafter(deep, net_for(target))
    with pytest.raises(CapabilityError, match="a draft with updates needs a target that is a network of layers"):
        UnoDrafter(tables(vocab=32)[0], net_for(target))  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match=r"GPT2Block layers of this target have no nn\.Linear in common"):
        linear_shapes(new_model("gpt2"))
    with pytest.raises(ValueError, match="drafts on the target's own cache"):
        EnsembleDrafter([drafter_for(target)])
    for settings, words in (
        ({"parts": "head"}, "parts must be one of all, attention, mlp"),
        ({"entropy": "2"}, "entropy must be from 0 to 1"),
        ({"decay": "0"}, "decay must be above 0"),
        ({"mask_token": "33"}, "from 0 to 31 for noise=mask"),
        ({"noise": "random", "mask_token": "33"}, "from 2 to 32 for noise=random"),
        ({"shapes": "1"}, "unknown setting"),
    ):
        with pytest.raises(ValueError, match=words):
            UnoRecipe(target, TargetParts(target), settings)
    recipe = UnoRecipe(target, TargetParts(target), {"places": "8"})
    with pytest.raises(ValueError, match="too short"):
        recipe.loss(Batch(torch.zeros(1, 5, dtype=torch.long), {}, recipe.parts), torch.Generator())


@pytest.mark.parametrize(
    ("parts", "names"), [("attention", {"self_attn"}), ("mlp", {"mlp"}), ("all", {"self_attn", "mlp"})]
)
def test_some_layers_alone_are_updated(parts: str, names: set[str]) -> None:
    target = llamas()[0]
    recipe = UnoRecipe(target, TargetParts(target), {"parts": parts, "rank": "2"})
    assert {name.split(".")[0] for name in recipe.net.shapes} == names
    with torch.no_grad():
        for weight in recipe.net.parameters():
            weight.normal_(std=0.2)
    public = HuggingFaceModel(llama(), lean=False)
    logits, expected = (drafted_logits(model, recipe.net, [3, 1, 4], [9, 2]) for model in (target, public))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_folders(tmp_path: Path) -> None:
    target = llamas()[0]
    net, parts = net_for(target), TargetParts(target)
    config = dataclasses.asdict(net.config)
    save_drafter(tmp_path, "uno", config, net, parts.fingerprint(), {"accuracies": [0.9, 0.9, 0.9]})
    drafter = build_drafter(f"uno:{tmp_path},k=2,nodes=5,draw=greedy", target, target_source="x")
    assert isinstance(drafter, UnoDrafter)
    assert (drafter.max_depth, drafter.max_nodes, drafter.draw) == (2, 5, "greedy")
    assert torch.equal(
        drafter.net.layers[1].mlp.up_proj.lora_B,
        net.layers[1].mlp.up_proj.lora_B.bfloat16().float(),  # type: ignore
    )
    few = build_drafter(f"uno:{tmp_path},vocab=16", target, target_source="x")
    assert few is not None
    (entry,) = few.describe()
    assert (entry["vocabulary"], entry["forward"]) == (16, "lean" if target.is_lean else "public")
    assert entry["native_off"]
    plain = outputs(engine(llamas()[0]), requests(SamplingParams()))
    assert outputs(engine(target, few), requests(SamplingParams())) == plain
    with pytest.raises(ValueError, match="needs a folder for this target"):
        build_drafter("uno", target, target_source="x")
    with pytest.raises(ValueError, match="another target"):
        build_drafter(f"uno:{tmp_path}", llamas(vocab=8)[0], target_source="x")
    del config["mask_token"]
    save_drafter(tmp_path, "uno", config, net, parts.fingerprint())
    with pytest.raises(ValueError, match="does not describe a valid drafter, copy it again: uno needs a mask_token"):
        build_drafter(f"uno:{tmp_path}", target, target_source="x")


# -- the native forward ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(why_not() is not None, reason=f"no kernels: {why_not()}")
@pytest.mark.parametrize("sampling", SEEDED)
def test_native_drafts_leave_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch, sampling: str) -> None:
    """In a batch, and the target's own first token is always accepted: its row has the same bits in both forwards."""
    layout = "foretoken.models.linear.packing.fastest_layout"
    monkeypatch.setattr(layout, lambda dtype, *_: "native" if dtype == torch.bfloat16 else "plain")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    target = HuggingFaceModel(new_model("llama", **sizes).to(torch.bfloat16))
    drafter = drafter_for(target, size=0.1)
    (entry,) = drafter.describe()
    assert (entry["forward"], entry["native_off"]) == ("native", "")
    plain = outputs(engine(target), requests(SEEDED[sampling], 60))
    finished = serve(engine(target, drafter), requests(SEEDED[sampling], 60))
    assert [run.output for run in finished] == plain
    for run in finished:
        assert run.stats.num_accepted_tokens_per_pos[0] == run.stats.num_drafted_rounds > 10
