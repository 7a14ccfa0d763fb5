"""PARD-2: a draft model that reads the target's states beside its tokens, against the network's own forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.pard import PardDrafter
from foretoken.methods.drafters.target_states import FILE, projection_of, read_projection, taps_of
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.variants.conditioned import ConditionedModel
from toys import engine, llama, llamas, outputs, serve, tables

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
T1 = SamplingParams(temperature=1.0)
MASK, SCALE, LAYERS = 7, 0.5, (-1, 1)
WEIGHT = torch.randn(16, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def with_projection(network: Any, folder: Path, layers: tuple[int, ...] = LAYERS, weight: Tensor = WEIGHT) -> Any:
    """A copy of a network that is said to be in a folder with a projection."""
    twin = copy.deepcopy(network)
    save_file({"target_proj.weight": weight}, folder / FILE)
    twin.config._name_or_path = str(folder)
    twin.config.pard_token, twin.config.pard2_scale, twin.config.pard2_target_layers = MASK, SCALE, list(layers)
    return twin


def pair(folder: Path, lean: bool = True) -> tuple[HuggingFaceModel, HuggingFaceModel]:
    return llamas()[0], HuggingFaceModel(with_projection(llama(noise=0.3), folder), lean=lean)


def drafter_of(folder: Path, **options: Any) -> tuple[HuggingFaceModel, PardDrafter]:
    target, draft = pair(folder)
    return target, PardDrafter(draft, **{"k": 3, "width": 1, "target": target, **options})


@torch.no_grad()
def by_hand(target: HuggingFaceModel, network: Any, tokens: list[int], k: int, shift: int = 1) -> Tensor:
    """[k, V] by the networks' own forwards: state t - ``shift`` beside token t, the last one beside the masks."""
    hidden = target.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[-1], hidden[1]], -1)[0]
    before = torch.cat([states.new_zeros(shift, states.shape[1]), states])[: len(tokens)]
    before = torch.cat([before, before[-1:].expand(k - 1, -1)])
    embedded = network.get_input_embeddings()(torch.tensor([[*tokens, *[MASK] * (k - 1)]]))
    logits: Tensor = network(inputs_embeds=embedded + before @ WEIGHT.T * SCALE).logits[0, -k:]
    return logits


def best(
    target: HuggingFaceModel, drafter: PardDrafter, tokens: list[int], tree: TokenTree, shift: int = 1
) -> list[int]:
    """The chain of the best tokens by hand, as long as the tree."""
    if len(tree) == 1:
        return []
    chain: list[int] = by_hand(target, drafter.model.model, tokens, len(tree) - 1, shift).argmax(-1).tolist()
    return chain


class Seen:
    """The drafts of every round, and the text that they were made for."""

    def __init__(self, drafter: PardDrafter) -> None:
        self.rounds: list[tuple[list[int], TokenTree]] = []
        propose = drafter.propose_batch

        def watched(contexts: Any, budgets: Any) -> list[TokenTree]:
            tokens = [list(context.tokens) for context in contexts]
            trees = propose(contexts, budgets)
            self.rounds += list(zip(tokens, trees, strict=True))
            return trees

        drafter.propose_batch = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("prompt", [PROMPT, [5], [2, 30] * 20], ids=["usual", "one-token", "long"])
def test_drafts_are_those_of_the_networks_own_forwards(tmp_path: Path, prompt: list[int]) -> None:
    """In every round the states stand beside the right tokens, and nothing of the masks stays."""
    target, drafter = drafter_of(tmp_path)
    seen = Seen(drafter)
    requests = [Request(prompt, max_new_tokens=24), Request(prompt[:2], max_new_tokens=9)]
    serve(engine(target, drafter, max_batch=2), requests)
    assert len(seen.rounds) > 10
    for tokens, tree in seen.rounds:
        assert list(tree.tokens[1:]) == best(target, drafter, tokens, tree)


def test_states_that_are_shifted_too_far_are_detected(tmp_path: Path) -> None:
    """The mistake that was in an engine: it changes drafts in many rounds, and no test above would pass."""
    target, drafter = drafter_of(tmp_path)
    seen = Seen(drafter)
    serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=30)])
    for shift in (0, 2):
        wrong = [
            best(target, drafter, tokens, tree, shift) != list(tree.tokens[1:])
            for tokens, tree in seen.rounds
            if len(tree) > 1
        ]
        assert sum(wrong) > len(wrong) / 3


@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 3])
def test_texts_are_exact_with_and_without_states(tmp_path: Path, params: SamplingParams, batch: int) -> None:
    requests = [Request(PROMPT[i:], params, 20 + i, seed=i) for i in range(4)]
    plain = outputs(engine(llamas()[0]), requests)
    for options in ({}, {"taps": False}, {"nodes": 9, "width": 4}, {"draw": "greedy"}):
        target, drafter = drafter_of(tmp_path, **options)
        assert (drafter.reader is None) == (options == {"taps": False})
        assert outputs(engine(target, drafter, max_batch=batch), requests) == plain


def test_the_public_forward_is_the_lean_one(tmp_path: Path) -> None:
    drafts = []
    for lean in (True, False):
        target, draft = pair(tmp_path, lean)
        assert draft.is_lean == lean
        drafter = PardDrafter(draft, k=4, width=1, target=target)
        seen = Seen(drafter)
        serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=20)])
        drafts.append([tree.tokens for _, tree in seen.rounds])
    assert drafts[0] == drafts[1]


def test_a_text_that_was_read_before_is_gone_on_with(tmp_path: Path) -> None:
    """The second turn of a conversation: kept keys and values hold the states that were beside the tokens."""
    prompt = [(7 * i + i * i // 3) % 31 for i in range(60)]
    target, drafter = drafter_of(tmp_path)
    keeping = engine(target, drafter, prefix_bytes=2**22)
    (first,) = serve(keeping, [Request(prompt, max_new_tokens=12)])
    seen = Seen(drafter)
    again = [*prompt, *first.output, 3, 4]
    (second,) = serve(keeping, [Request(again, max_new_tokens=12)])
    assert second.output == outputs(engine(llamas()[0]), [Request(again, max_new_tokens=12)])[0]
    assert second.stats.num_draft_prompt_tokens_computed < 30
    for tokens, tree in seen.rounds:
        assert list(tree.tokens[1:]) == best(target, drafter, tokens, tree)


def test_a_draft_that_is_asked_for_twice(tmp_path: Path) -> None:
    target, drafter = drafter_of(tmp_path)
    taps = target.prefill(target.open(), PROMPT[:-1], drafter.taps)
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams(), len(PROMPT)), Rng(0), hidden=taps)
    drafter.start(context)
    first = drafter.propose(context, Budget(3, 8))
    assert drafter.propose(context, Budget(3, 8)).tokens == first.tokens
    assert drafter.propose(context, Budget(1, 8)).tokens == first.tokens[:2]
    drafter.finish(context)
    assert not context.state


def test_it_does_not_work_inside_another_drafter(tmp_path: Path) -> None:
    _, drafter = drafter_of(tmp_path)
    assert not drafter.traits.rewinds and drafter.taps == ("last", "layer:1")
    assert drafter_of(tmp_path, taps=False)[1].traits.rewinds


def test_names_of_states() -> None:
    assert taps_of((-1, -8, -16, -24), 36) == ("last", "layer:29", "layer:21", "layer:13")
    assert taps_of((0, 2, -2), 2) == ("layer:0", "last", "layer:1")
    with pytest.raises(ValueError, match=r"has hidden states 0 to 2"):
        taps_of((-8,), 2)


def test_what_is_refused(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is damaged or half-written"):
        PardDrafter(draft, target=target)
    assert PardDrafter(draft, target=target, taps=False).reader is None
    save_file({"other": WEIGHT}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"holds no matrix target_proj\.weight"):
        read_projection(tmp_path / FILE)
    wide = HuggingFaceModel(with_projection(llama(noise=0.3), tmp_path, weight=WEIGHT[:, :16].contiguous()))
    with pytest.raises(
        ValueError, match=r"projects 16 target state values, .* 2 x 16: .*; taps=false drafts without them"
    ):
        PardDrafter(wide, target=target)
    with pytest.raises(CapabilityError, match="takes tokens only, without hidden states"):
        ConditionedModel(tables()[1])
    conditioned = ConditionedModel(draft)
    with pytest.raises(ValueError, match="every token of a feed needs a state, or none does"):
        conditioned.forward([Feed(conditioned.open(), [1, 2], states=torch.zeros(1, 16))])
    (tmp_path / FILE).unlink()
    assert projection_of(draft.model, target) is None
