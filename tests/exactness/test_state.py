"""State: caches equal fresh prefills after every round, and requests do not disturb each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from cases import Case
from matrix import SAMPLED_MODES, is_seeded, rows

from foretoken.core import Budget
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import SequenceState
from foretoken.models.cache.window import Window
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, llamas, outputs, tables

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12], [0, 0], [4, 5, 4, 5, 4]]
each_case = pytest.mark.parametrize(
    ("name", "case"), list(rows()), ids=[f"{name}.{case.label}" for name, case in rows()]
)


@cache
def fresh_model(noise: float, window: Window) -> HuggingFaceModel:
    return HuggingFaceModel(llama(noise=noise)).windowed(window)


def fresh_prefill(noise: float, tokens: list[int], window: Window) -> list[torch.Tensor]:
    """Keys and values [H, n, D] of every layer, made in one go in a row of their own."""
    model = fresh_model(noise, window)
    sequence = model.open()
    model.prefill(sequence, tokens)
    parts = [part.clone() for part in stored(sequence, len(tokens))]
    model.release(sequence)
    return parts


def stored(sequence: SequenceState, count: int) -> list[torch.Tensor]:
    stores = (sequence.cache.keys, sequence.cache.values)
    return [buffer[sequence.row, :, :count] for store in stores for buffer in store]


def check_cache(model: HuggingFaceModel, sequence: SequenceState, noise: float) -> None:
    count = len(sequence.tokens)
    if count == 0:
        return
    for cached, fresh in zip(stored(sequence, count), fresh_prefill(noise, sequence.tokens, model.window), strict=True):
        torch.testing.assert_close(cached, fresh, rtol=0, atol=1e-11)


def check_draft_model(run: Running, drafter: Drafter, target: HuggingFaceModel) -> None:
    """A draft model keeps a prefix of the text, and what it keeps is right."""
    if isinstance(drafter, ModelDrafter) and type(drafter.model) is HuggingFaceModel:
        sequence = run.context.state[drafter]
        assert list(drafter.read(run.context)[: len(sequence.tokens)]) == sequence.tokens
        if drafter.name == "online" and drafter.traits.shares_state:
            return  # keys and values of weights that have changed since
        check_cache(drafter.model, sequence, 0.0 if drafter.model is target else 0.3)


@each_case
def test_caches_equal_a_fresh_prefill_after_every_round(name: str, case: Case) -> None:
    target, draft = llamas()
    drafter = case.build(target, draft)
    speculative = engine(target, drafter, max_batch=3)
    for seed, prompt in enumerate(PROMPTS):
        speculative.add(Request(prompt, SamplingParams(temperature=seed % 2), 6 + 5 * seed, seed=seed))
    rounds = 0
    while speculative.busy:
        speculative.step()
        rounds += 1
        for run in speculative.requests.running:
            assert run.sequence.tokens == run.context.tokens[:-1]
            assert not run.sequence.scratch_tokens
            check_cache(target, run.sequence, 0.0)
            check_draft_model(run, drafter, target)
    assert rounds > 5


def test_the_cache_check_sees_a_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping the first slots instead of the accepted path is noticed."""
    keep = HuggingFaceModel.commit

    def commit(self: HuggingFaceModel, sequence: SequenceState, path: Sequence[int]) -> None:
        tokens = [sequence.scratch_tokens[node] for node in path]
        keep(self, sequence, range(len(path)))
        sequence.tokens[len(sequence.tokens) - len(path) :] = tokens

    monkeypatch.setattr(HuggingFaceModel, "commit", commit)
    _, case = next((name, case) for name, case in rows() if case.label == "greedy-tree")
    with pytest.raises(AssertionError):
        test_caches_equal_a_fresh_prefill_after_every_round("model", case)


@each_case
def test_joining_and_leaving_requests_change_nothing(name: str, case: Case) -> None:
    """Requests come and go between rounds, one is cancelled; each of the others gives what it gives alone.

    Where a seed does not fix sampled outputs, all are greedy.
    """
    target, draft = llamas()
    sampled = SAMPLED_MODES if is_seeded(case.build(target, draft)) else dict.fromkeys(SAMPLED_MODES, SamplingParams())
    requests = [
        Request(prompt, params, 10 + 2 * seed, seed=seed)
        for seed, (prompt, params) in enumerate(zip(PROMPTS, [SamplingParams(), *sampled.values()], strict=True))
    ]
    alone = [outputs(engine(target, case.build(target, draft)), [request])[0] for request in requests]
    shared = engine(target, case.build(target, draft))
    ids = [shared.add(requests[0])]
    finished = steps(shared, 2)
    ids += [shared.add(requests[1]), shared.add(requests[2])]
    finished |= steps(shared, 2)
    ids += [shared.add(requests[3])]
    shared.cancel(ids[1])
    finished |= steps(shared, 1)
    ids += [shared.add(requests[4])]
    finished |= steps(shared, 100)
    assert ids[1] not in finished
    assert {i: finished[ids[i]] for i in (0, 2, 3, 4)} == {i: alone[i] for i in (0, 2, 3, 4)}
    assert not shared.busy and not target._sequences and not draft._sequences


def steps(shared: Engine, count: int) -> dict[int, list[int]]:
    texts = {}
    for _ in range(count):
        for run, emission in shared.step():
            if emission.finish_reason is not None:
                texts[run.id] = run.output
    return texts


@each_case
def test_proposals_keep_to_the_budget(name: str, case: Case) -> None:
    """A proposal begins with the root and has no more nodes than asked for (the engine itself cuts deep nodes)."""
    target, draft = llamas(vocab=4) if case.network else tables()
    drafter = case.build(target, draft)
    speculative = engine(target, drafter)
    speculative.add(Request([0, 1, 2, 3, 0, 1, 2, 3, 0, 1], SamplingParams(temperature=1.0), 60, seed=0))
    speculative.step()
    (run,) = speculative.requests.running
    for max_nodes in (1, 2, 3, 5):
        tree = drafter.propose_batch([run.context], [Budget(max_depth=3, max_nodes=max_nodes)])[0]
        assert tree.num_drafts <= max_nodes
        assert tree.tokens[0] == run.context.root


@each_case
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_the_context_may_be_filled_to_the_last_token(name: str, case: Case, temperature: float) -> None:
    """Nothing, probes neither, is scored past the context (tables raise there)."""
    prompt = [0, 1, 2, 3] * 29  # and 12 new tokens fill the llama's 128 places
    target, draft = llamas(vocab=4) if case.network else tables(context_length=128)
    request = Request(prompt, SamplingParams(temperature=temperature), 12, seed=0)
    assert len(outputs(engine(target, case.build(target, draft)), [request])[0]) == 12
