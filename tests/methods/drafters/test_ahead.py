"""Drafting during verification: the same chains as between the rounds, and the same texts as without drafts."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from foretoken.core import Budget, Context, Kind, Rng
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.ahead import Ahead, AheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import CapabilityError
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, llamas, outputs, serve, tables

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
T1 = SamplingParams(temperature=1.0)
PENALTY = SamplingParams(temperature=1.0, repetition_penalty=1.3)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"params": SamplingParams()},
    "seeded": {"params": T1, "seed": 5},
    "top-k": {"params": SamplingParams(temperature=0.8, top_k=6), "seed": 9},
    "penalty": {"params": PENALTY, "seed": 3},
}
each_thread = pytest.mark.parametrize("thread", [True, False], ids=["thread", "inline"])


def started(drafter: ModelDrafter, params: SamplingParams, seed: int | None = None) -> Context:
    noise = None if seed is None else Noise(seed)
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(params, len(PROMPT), noise), Rng(0))
    drafter.start(context)
    return context


def outcomes(drafter: AheadDrafter, context: Context) -> list[tuple[int, ...]]:
    """The outcomes that are drafted for, after the drafting has ended."""
    drafter._wait()
    ahead: Ahead = context.state[drafter, "ahead"]
    return [branch.outcome for branch in ahead.branches]


@each_thread
@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_of_plain_decoding(mode: str, thread: bool) -> None:
    options = MODES[mode]
    requests = [Request(PROMPT[i:], max_new_tokens=30 + 3 * i, **options) for i in range(4)]
    target, draft = llamas()
    plain = outputs(engine(target), requests)
    for batch in (1, 3):
        drafter = AheadDrafter(draft, k=3, fanout=2, target=target, thread=thread)
        assert outputs(engine(target, drafter, max_batch=batch), requests) == plain
        assert drafter.rounds == 0 if mode == "penalty" else 0 < drafter.hits < drafter.rounds


def test_a_forked_process_drafts_ahead_in_a_thread_of_its_own() -> None:
    """A process with one PyTorch thread may be forked; the fork once waited for ever for a thread of its parent."""
    target, draft = llamas()
    request, drafter = Request(PROMPT, max_new_tokens=20), AheadDrafter(draft, k=3, target=target)
    serving = engine(target, drafter)
    expected = outputs(serving, [request])
    queue: Any = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=lambda: queue.put(outputs(serving, [request])))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0 and queue.get() == expected
    assert drafter.hits and outputs(serving, [request]) == expected


@pytest.mark.parametrize("seed", [None, 4])
def test_a_chain_that_was_there_is_the_chain_of_the_model(seed: int | None) -> None:
    """Behind every outcome, and the cache of the second thread goes on from it."""
    params = SamplingParams() if seed is None else T1
    _, draft = llamas()
    drafter = AheadDrafter(draft, k=3, fanout=2)
    context = started(drafter, params, seed)
    for round_ in range(6):
        tree = drafter.propose(context, Budget(3, 8))
        fresh = ModelDrafter(llamas()[1], k=3)
        other = started(fresh, params, seed)
        other.tokens[:] = context.tokens
        assert tree.tokens == fresh.propose(other, Budget(3, 8)).tokens
        context.tokens += outcomes(drafter, context)[(3 * round_) % 8]
    assert (drafter.rounds, drafter.hits) == (5, 5)


def test_which_outcomes_are_drafted_for() -> None:
    """The best tokens by the draft but the one that was rejected; after all drafts the best ones."""
    _, draft = llamas()
    drafter = AheadDrafter(draft, k=2, fanout=2)
    context = started(drafter, SamplingParams())
    tree = drafter.propose(context, Budget(2, 8))
    with torch.no_grad():
        logits = draft.model(input_ids=torch.tensor([[*PROMPT, *tree.tokens[1:]]])).logits[0, -3:]
    order = logits.argsort(-1, descending=True).tolist()
    first, second = tree.tokens[1:]
    assert outcomes(drafter, context) == [
        (order[0][1],), (order[0][2],),
        (first, order[1][1]), (first, order[1][2]),
        (first, second, order[2][0]), (first, second, order[2][1]),
    ]  # fmt: skip


def test_the_targets_own_race() -> None:
    """With the target as draft model every outcome is guessed, at any temperature: the noise is the request's."""
    target = llamas()[0]
    for options in (MODES["greedy"], MODES["seeded"], MODES["top-k"]):
        drafter = AheadDrafter(HuggingFaceModel(llama()), k=3, fanout=1, target=target)
        serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=40, **options)])
        assert drafter.rounds == drafter.hits > 5


def test_the_race_is_guessed_more_often_than_the_rest() -> None:
    """Coupled, the token after a rejection is the drafter's second in the race; otherwise it is guessed by q alone."""
    hits = {}
    for seeded in (True, False):
        target, draft = llamas()
        drafter = AheadDrafter(draft, k=3, fanout=2, target=target)
        requests = [Request(PROMPT, params=T1, max_new_tokens=60, seed=i if seeded else None) for i in range(8)]
        if not seeded:
            torch.manual_seed(1)
        serve(engine(target, drafter), requests)
        hits[seeded] = drafter.hits / drafter.rounds
    assert hits[True] > hits[False] + 0.05


def test_drawn_chains_carry_what_they_were_drawn_from() -> None:
    _, draft = llamas()
    drafter = AheadDrafter(draft, k=3, fanout=2)
    context = started(drafter, T1)
    drafter.propose(context, Budget(3, 8))
    context.tokens += outcomes(drafter, context)[-1]
    tree = drafter.propose(context, Budget(2, 8))
    assert drafter.hits == 1 and tree.kind is Kind.IID and len(tree) == 3 and tree.q is not None
    with torch.no_grad():
        rows = draft.model(input_ids=torch.tensor([[*context.tokens, *tree.tokens[1:]]])).logits[0, -3:-1]
    assert torch.allclose(tree.q.double(), torch.softmax(rows.double(), -1), atol=1e-6)


def test_an_outcome_that_was_not_guessed_is_drafted_for_as_usual() -> None:
    _, draft = llamas()
    drafter = AheadDrafter(draft, k=3, fanout=1)
    context = started(drafter, SamplingParams())
    drafter.propose(context, Budget(3, 8))
    guessed = {outcome[0] for outcome in outcomes(drafter, context)}
    context.tokens.append(next(token for token in range(32) if token not in guessed))
    tree = drafter.propose(context, Budget(3, 8))
    assert (drafter.rounds, drafter.hits) == (1, 0) and len(tree) == 4


def test_stop_rules_and_short_contexts_are_left_to_the_rounds() -> None:
    _, draft = llamas()
    drafter = AheadDrafter(draft, k=3)
    context = started(drafter, SamplingParams())
    drafter.propose(context, Budget(3, 8, min_confidence=0.1))
    assert (drafter, "ahead") not in context.state
    draft.context_length = len(PROMPT) + 4
    drafter.propose(context, Budget(3, 8))
    assert (drafter, "ahead") not in context.state


def test_what_goes_wrong_in_the_thread_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas()
    drafter = AheadDrafter(draft, k=3, target=target)

    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(drafter, "_guess", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=20)])
    monkeypatch.undo()
    assert len(outputs(engine(target, drafter), [Request(PROMPT, max_new_tokens=20)])[0]) == 20


def test_rows_are_freed() -> None:
    target, draft = llamas()
    drafter = AheadDrafter(draft, k=3, target=target)
    serve(engine(target, drafter, max_batch=2), [Request(PROMPT, max_new_tokens=9 + i) for i in range(5)])
    assert isinstance(drafter.twin, HuggingFaceModel) and not drafter.twin._sequences and not draft._sequences


def test_a_planted_mistake_is_caught() -> None:
    """A chain under another outcome changes no text; what it was drawn from does, and the statistics of ``test_matrix``
    would see it: here the chain of another outcome is seen in the drafts."""
    _, draft = llamas()
    drafter = AheadDrafter(draft, k=3, fanout=2)
    context = started(drafter, SamplingParams())
    drafter.propose(context, Budget(3, 8))
    outcome = outcomes(drafter, context)[-1]
    branches = context.state[drafter, "ahead"].branches
    branches[-1].tokens, branches[0].tokens = branches[0].tokens, branches[-1].tokens
    context.tokens += outcome
    other = started(ModelDrafter(llamas()[1], k=3), SamplingParams())
    other.tokens[:] = context.tokens
    wrong, right = drafter.propose(context, Budget(3, 8)), ModelDrafter(llamas()[1], k=3).propose(other, Budget(3, 8))
    assert wrong.tokens != right.tokens


def test_what_is_refused() -> None:
    _, draft = llamas()
    with pytest.raises(ValueError, match="fanout >= 1, not 0"):
        AheadDrafter(draft, fanout=0)
    with pytest.raises(ValueError, match="at most 256, not k=4, fanout=100000"):
        AheadDrafter(draft, fanout=100_000)
    with pytest.raises(ValueError, match="draw must be iid or greedy"):
        AheadDrafter(draft, draw="without_replacement")
    with pytest.raises(CapabilityError, match="has no second cache to draft ahead in: use the drafter model"):
        AheadDrafter(tables()[1])
    assert not AheadDrafter(draft).traits.rewinds  # nor does it work inside another drafter
