"""Random mixes of requests through the whole engine: each writes what it writes alone, without a drafter.

A mix is drawn from a pool of requests that use every option there is.  They arrive at random rounds, some are
cancelled, prompts are read in pieces, beginnings are found again, memory is short.  Everything is in float64, so one
token, log-probability or reason that differs is a bug.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from cases import CASES, Case
from matrix import SEEDED_MODES, ban, rows
from torch import Tensor

from foretoken import registry
from foretoken.core.sampling import SamplingParams
from foretoken.engine import loop
from foretoken.engine.loop import Engine
from foretoken.engine.prefixes import Prefixes
from foretoken.engine.request import Request, Running
from foretoken.models.base import Snapshot
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llamas, serve

MIXES = int(os.environ.get("FORETOKEN_MIXES", "2"))
"""Random mixes per drafter; the ordinary run keeps it short."""
VOCAB, POOL, ROUNDS = 32, 48, 2_000
BEGINNING = [(7 * i) % 31 for i in range(40)]
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDE"


class Letters:
    """Token i is the i-th letter."""

    def decode(self, ids: Sequence[int], **more: Any) -> str:
        return "".join(LETTERS[i] for i in ids)


class Turns:
    """Even and odd tokens take turns, and every fourth one is forced: a grammar that needs no library."""

    @property
    def processor(self) -> Turns:
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        at = input_ids.shape[-1]
        allowed = torch.arange(VOCAB) % 2 == at % 2 if at % 4 < 3 else torch.arange(VOCAB) == at % VOCAB
        return scores.masked_fill(~allowed, -torch.inf)

    ends: frozenset[int] = frozenset()

    def may_end(self, output: Sequence[int]) -> bool:
        return False

    def forced(self, output: Sequence[int]) -> list[int]:
        return [len(output) % VOCAB] if len(output) % 4 == 3 else []


def request(number: int) -> Request:
    """The same one whenever it is asked for, but with a grammar of its own."""
    rng = random.Random(number)
    modes = [SamplingParams(), SamplingParams(repetition_penalty=1.3, presence_penalty=0.4), *SEEDED_MODES.values()]
    params = rng.choice([*modes, SamplingParams(temperature=1.0, min_p=0.2, frequency_penalty=0.5, processors=(ban,))])
    own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 11, 30]))]
    new = rng.randint(1, 24)
    grammar = rng.random() < 0.2 and ban not in params.processors
    return Request(
        [*(BEGINNING[: rng.choice([17, 32, 40])] if rng.random() < 0.5 else []), *own],
        params,
        new,
        stop=rng.choice([(), (), ("ab", "cd"), ("e",)]),
        seed=rng.choice([0, 1, 7, 2**64 - 1]),
        prediction=[rng.randrange(VOCAB) for _ in range(8)] if rng.random() < 0.2 else None,
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 2)) if rng.random() < 0.2 else frozenset(),
        min_tokens=rng.randint(0, new) if rng.random() < 0.3 else 0,
        include_stop=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice(["", "a", "b"]),
        max_draft_tokens=rng.choice([None, None, 0, 1, 3]),
        explain=rng.random() < 0.3,
        constraint=Turns() if grammar else None,
    )


def pool(number: int) -> Request:
    """Twins share all but the seed, as the samples of one prompt do (``n``)."""
    first = request(number - number % 2)
    return replace(
        first, seed=((first.seed or 0) + number % 2) % 2**64, constraint=Turns() if first.constraint else None
    )


@cache
def alone(number: int) -> Running:
    """The output of a request that runs alone under plain decoding."""
    (run,) = serve(engine(llamas()[0], tokenizer=Letters()), [pool(number)])
    assert run.error is None, run.error
    return run


@dataclass
class Mix:
    """An engine's settings, who comes when, and who is cancelled when; drawn from a seed."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.options: dict[str, Any] = {
            "max_batch": rng.choice([1, 2, 5, 8, 32]),
            "prefill_chunk": rng.choice([None, 1, 7, 16, 64]),
            "prefix_bytes": rng.choice([0, 2**14, 2**22]),
        }
        self.tight = rng.random() < 0.4
        self.controller = rng.choice(["constant", "auto", "confidence", "heuristic"])
        self.arrivals = sorted((rng.randrange(40), rng.randrange(POOL)) for _ in range(rng.randint(6, 16)))
        self.cancelled = {i: rng.randrange(60) for i in range(len(self.arrivals)) if rng.random() < 0.15}

    def engine(self, case: Case) -> Engine:
        target, draft = llamas()
        if self.tight:
            self.options["kv_memory"] = 400 * target.kv_bytes_per_token
        controller = registry.make("controller", self.controller)
        return engine(target, case.build(target, draft), None, controller, tokenizer=Letters(), **self.options)


def check_same(run: Running, expected: Running) -> None:
    """Tokens, reason, log-probabilities and what an explanation says of the text."""
    assert run.error is None, run.error
    assert run.output == expected.output
    assert (run.finish_reason, run.stopper.reason, run.stopper.cut) == (
        expected.finish_reason,
        expected.stopper.reason,
        expected.stopper.cut,
    )
    assert len(run.origins) == len(run.output)
    for entry, reference in zip(
        [*run.logprobs, *run.prompt_logprobs], [*expected.logprobs, *expected.prompt_logprobs], strict=True
    ):
        if entry is None or reference is None:
            assert entry is reference
            continue
        assert entry.token_id == reference.token_id and entry.logprob == pytest.approx(reference.logprob, abs=1e-9)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in reference.top], abs=1e-9)
    assert bool(run.rounds) == run.request.explain


def play(mix: Mix, case: Case) -> None:
    """Let everybody come, and compare what each has written."""
    serving = mix.engine(case)
    numbers: dict[int, int] = {}
    ids: list[int] = []
    gone: set[int] = set()
    finished: set[int] = set()
    for turn in range(ROUNDS):
        while len(ids) < len(mix.arrivals) and mix.arrivals[len(ids)][0] <= turn:
            ids.append(serving.add(pool(mix.arrivals[len(ids)][1])))
            numbers[ids[-1]] = mix.arrivals[len(ids) - 1][1]
        for place, when in mix.cancelled.items():
            if when == turn and place < len(ids) and ids[place] not in finished:
                serving.cancel(ids[place])
                gone.add(ids[place])
        for run, emission in serving.step():
            if emission.finish_reason is not None:
                assert run.id not in gone and run.id not in finished
                finished.add(run.id)
                check_same(run, alone(numbers[run.id]))
        budget = serving.requests.budget
        if budget.limit is not None:
            assert sum(budget.reserved.values()) + serving.requests.prefix_cache.prefixes.nbytes <= budget.limit
        if not serving.busy and len(ids) == len(mix.arrivals):
            break
    assert finished | gone == set(ids) and not finished & gone, "somebody waits for ever"
    target: Any = serving.target
    assert not serving.requests.budget.reserved and not target.pool.sequences and target.kv_bytes == 0


@pytest.mark.parametrize("number", range(MIXES))
@pytest.mark.parametrize("case", [case for _, case in rows()], ids=[f"{name}.{case.label}" for name, case in rows()])
def test_every_request_of_a_random_mix_writes_what_it_writes_alone(case: Case, number: int) -> None:
    mix = Mix(1_000 * number + [row_case for _, row_case in rows()].index(case))
    try:
        play(mix, case)
    except AssertionError as error:
        raise AssertionError(f"mix {mix.seed}: {vars(mix)}: {error}") from error


def test_the_pool_has_every_option() -> None:
    """A pool that lacks an option would let the mixes show less than they claim."""
    every = [pool(i) for i in range(POOL)]
    for name in ("stop", "prediction", "stop_token_ids", "min_tokens", "constraint", "explain", "priority"):
        assert any(getattr(entry, name) for entry in every), name
    reasons = {alone(i).finish_reason for i in range(POOL)}
    assert reasons == {"stop", "length"}
    assert any(entry.logprobs == 3 and entry.prompt_logprobs for entry in every)
    assert {len(alone(i).output) == entry.max_new_tokens for i, entry in enumerate(every)} == {True, False}


def scaled_restore(patch: pytest.MonkeyPatch) -> None:
    restore = HuggingFaceModel.restore

    def wrong(self: Any, sequence: Any, snapshot: Snapshot, length: int) -> None:
        layers = [pair and (pair[0].roll(1, 1), pair[1]) for pair in snapshot.layers]
        restore(self, sequence, replace(snapshot, layers=layers), length)

    patch.setattr(HuggingFaceModel, "restore", wrong)


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    find = Prefixes.find

    def wrong(self: Any, salt: str, tokens: Sequence[int]) -> Any:
        kept, length = find(self, salt, tokens)
        return kept, min(length + 1, len(tokens), len(kept.tokens)) if kept else 0

    patch.setattr(Prefixes, "find", wrong)


def seed_of_the_place(patch: pytest.MonkeyPatch) -> None:
    join = loop.join

    def wrong(number: int, request: Request, *more: Any) -> Running:
        return join(number, replace(request, seed=((request.seed or 0) + number) % 2**64), *more)

    patch.setattr(loop, "join", wrong)


def lost_rows(patch: pytest.MonkeyPatch) -> None:
    move = TreeCache.move_row

    def wrong(self: Any, source: int, target: int, slots: int) -> None:
        move(self, source, target, slots - 1)

    patch.setattr(TreeCache, "move_row", wrong)


@pytest.mark.parametrize("plant", [scaled_restore, one_too_many, seed_of_the_place, lost_rows])
def test_mixes_find_planted_mistakes(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["model"][0]
    for number in range(POOL):
        alone(number)  # before anything is wrong
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(8):
            play(Mix(seed), case)
