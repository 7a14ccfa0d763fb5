"""PARD: all places of a draft from one pass over masks, of which nothing stays."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.pard import PardDrafter, mask_token
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, llamas, outputs, serve, tables

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
T1 = SamplingParams(temperature=1.0)
MASK = 7


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        paths.append((*paths[parent], token))
    return paths[1:]


def started(drafter: PardDrafter | ModelDrafter, tokens: list[int], params: SamplingParams | None = None) -> Context:
    context = Context(0, list(tokens), len(tokens), Sampler(params or SamplingParams(), len(tokens)), Rng(0))
    drafter.start(context)
    return context


@torch.no_grad()
def mask_logits(model: HuggingFaceModel, tokens: list[int], k: int, mask: int = MASK) -> Tensor:
    """[k, V'] by the network's own forward over the whole text and masks."""
    logits: Tensor = model.model(input_ids=torch.tensor([[*tokens, *[mask] * (k - 1)]])).logits[0, -k:]
    return logits


def test_one_place_is_what_the_draft_model_drafts() -> None:
    for params in (SamplingParams(), T1):
        _, draft = llamas()
        pard, plain = PardDrafter(draft, k=1, mask=MASK, width=1), ModelDrafter(draft, k=1)
        got, expected = (d.propose(started(d, PROMPT, params), Budget(4, 8)) for d in (pard, plain))
        assert got.tokens == expected.tokens and got.kind is expected.kind
        if expected.q is not None:
            assert got.q is not None and torch.equal(got.q, expected.q)


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_trees_hold_the_likeliest_prefixes(nodes: int) -> None:
    """Places do not see each other: a prefix is as likely as the product of its places."""
    draft = HuggingFaceModel(llama(6))
    drafter = PardDrafter(draft, k=3, mask=5, nodes=nodes, width=6)
    rows = torch.log_softmax(mask_logits(draft, [1, 2, 3, 4], 3, 5).double(), -1)
    values = {
        path: sum(float(rows[i, token]) for i, token in enumerate(path))
        for depth in (1, 2, 3)
        for path in product(range(6), repeat=depth)
    }
    best = sorted(values, key=lambda path: -values[path])[:nodes]
    tree = drafter.propose(started(drafter, [1, 2, 3, 4]), Budget(3, nodes))
    assert sorted(paths_of(tree)) == sorted(best)


def test_chains_are_drawn_from_what_they_carry() -> None:
    draft, rounds = HuggingFaceModel(llama(4)), 3000
    drafter = PardDrafter(draft, k=2, mask=3)
    context = started(drafter, [1, 2, 3, 0], T1)
    rows = torch.softmax(mask_logits(draft, [1, 2, 3, 0], 2, 3).double(), -1)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(rounds):
        tree = drafter.propose(context, Budget(2, 2))
        assert tree.kind is Kind.IID and tree.q is not None and torch.allclose(tree.q.double(), rows, atol=1e-6)
        counts[tuple(tree.tokens[1:])] += 1
    expected = {p: prod(float(rows[i, token]) for i, token in enumerate(p)) for p in product(range(4), repeat=2)}
    assert sum(abs(counts[path] / rounds - chance) for path, chance in expected.items()) / 2 < 0.05


def keys_of(model: HuggingFaceModel, sequence: Any) -> list[Tensor]:
    kept = model.snapshot(sequence, len(sequence.tokens))
    assert kept is not None
    return [part for pair in kept.layers if pair is not None for part in pair]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_nothing_of_the_masks_stays(accepted: int) -> None:
    """After every number of accepted tokens the cache is that of a fresh pass over the text."""
    _, draft = llamas()
    drafter = PardDrafter(draft, k=3, mask=MASK)
    context = started(drafter, PROMPT)
    for round_ in range(3):
        drafter.propose(context, Budget(3, 6))
        fresh = [(11 * round_ + i) % 32 for i in range(accepted)]
        context.tokens += [*fresh, (13 + round_) % 32]
    draft.catch_up(context.state[drafter], context.tokens)
    sequence, other = context.state[drafter], draft.open()
    assert sequence.tokens == context.tokens[: len(sequence.tokens)] and MASK not in sequence.tokens[len(PROMPT) :]
    draft.prefill(other, sequence.tokens)
    for kept, expected in zip(keys_of(draft, sequence), keys_of(draft, other), strict=True):
        assert torch.allclose(kept, expected, atol=1e-9)


def test_a_text_that_holds_the_mask_may_keep_it() -> None:
    """Its row is what the text's own token would have: the same token at the same place."""
    _, draft = llamas()
    drafter = PardDrafter(draft, k=4, mask=MASK)
    context = started(drafter, PROMPT)
    drafter.propose(context, Budget(4, 8))
    context.tokens += [MASK, MASK, 5]
    draft.catch_up(context.state[drafter], context.tokens)
    sequence, other = context.state[drafter], draft.open()
    assert len(sequence.tokens) == len(PROMPT) + 2
    draft.prefill(other, sequence.tokens)
    for kept, expected in zip(keys_of(draft, sequence), keys_of(draft, other), strict=True):
        assert torch.allclose(kept, expected, atol=1e-9)


def test_one_forward_a_draft() -> None:
    _, draft = llamas()
    drafter, rows = PardDrafter(draft, k=5, mask=MASK, target=draft), []
    forward = draft.forward
    draft.forward = lambda feeds, taps=(): rows.append([len(f.tokens) for f in feeds]) or forward(feeds, taps)  # type: ignore
    contexts = [started(drafter, PROMPT), started(drafter, [1])]
    drafter.propose_batch(contexts, [Budget(5, 8), Budget(2, 8)])
    assert rows == [[len(PROMPT) + 4, 2]]


@pytest.mark.parametrize("wide", [(32, 40), (40, 32)], ids=["padded-draft", "padded-target"])
@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "sampled"])
def test_padded_vocabularies(wide: tuple[int, int], params: SamplingParams) -> None:
    """The mask may be a row that the target does not have; no such token is drafted."""
    target, draft = (HuggingFaceModel(llama(size)) for size in wide)
    drafter = PardDrafter(draft, k=3, mask=draft.vocab_size - 1, target=target)
    tree = drafter.propose(started(drafter, [31, 39 % wide[0], 2], params), Budget(3, 60))
    assert max(tree.tokens) < min(wide)
    if tree.q is not None:
        assert tree.q.shape[1] == wide[0] and float(tree.q[:, min(wide) :].sum()) == 0
    plain = outputs(engine(target), [Request(PROMPT, SamplingParams(), 30)])
    assert outputs(engine(target, drafter), [Request(PROMPT, SamplingParams(), 30)]) == plain


def test_a_full_context_ends_the_draft() -> None:
    _, draft = llamas()
    draft.context_length = len(PROMPT) + 1
    drafter = PardDrafter(draft, k=4, mask=MASK, width=1)
    context = started(drafter, PROMPT)
    assert len(drafter.propose(context, Budget(4, 8))) == 3  # a row more than the context is never fed
    context.tokens += [1, 2]
    assert len(drafter.propose(context, Budget(4, 8))) == 1


def test_what_is_no_mask() -> None:
    draft = HuggingFaceModel(deepcopy(llama()))
    assert mask_token(draft) is None and mask_token(tables()[1]) is None
    with pytest.raises(ValueError, match="was not trained on mask tokens: its configuration has no pard_token"):
        PardDrafter(draft)
    with pytest.raises(ValueError, match="must be one of the draft model's 32 tokens, not 32"):
        PardDrafter(draft, mask=32)
    with pytest.raises(ValueError, match="k >= 1"):
        PardDrafter(draft, k=0, mask=1)
    with pytest.raises(ValueError, match="draw=iid, without_replacement or greedy, not 'any'"):
        PardDrafter(draft, mask=1, draw="any")
    with pytest.raises(ValueError, match="pard draws a tree with draw=without_replacement only"):
        PardDrafter(draft, mask=1, tree="2x1")
    draft.model.config.pard_token = 3
    assert mask_token(draft) == 3 and PardDrafter(draft).mask == 3
    draft.model.config.pard_token = 32
    with pytest.raises(ValueError, match="must be one of the draft model's 32 tokens, not 32"):
        PardDrafter(draft)


def test_a_model_that_cannot_roll_back() -> None:
    draft: LanguageModel = tables()[1]
    draft.capabilities = type(draft.capabilities)(rollback=False, missing={"rollback": "no rollback"})
    with pytest.raises(CapabilityError, match="no rollback"):
        PardDrafter(draft, mask=1)


def test_batches_are_their_parts() -> None:
    target, draft = llamas()
    requests = [
        Request(p, params, 24, seed=i) for i, p in enumerate(([5, 6], PROMPT, [3])) for params in (T1, SamplingParams())
    ]

    def drafter() -> PardDrafter:
        return PardDrafter(draft, k=3, mask=MASK, target=target)

    together = serve(engine(target, drafter()), requests)
    alone = [serve(engine(target, drafter()), [request])[0] for request in requests]
    assert [run.output for run in together] == [run.output for run in alone]
    assert [run.stats.num_drafts for run in together] == [run.stats.num_drafts for run in alone]
