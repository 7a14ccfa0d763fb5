"""The engine in its own thread: the same tokens as alone, exact limits, cancelling, draining, and its death."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import pickle
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest

from foretoken import AsyncLlm, registry
from foretoken.core.sampling import SamplingParams
from foretoken.engine.errors import DeadlineExceeded, Draining, EngineDead, QueueFull, RequestFailed
from foretoken.engine.request import Request
from foretoken.engine.requests import Requests
from foretoken.llm import Llm, assemble
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.models.base import LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from toys import llamas, tables

T = TypeVar("T")
PROMPT = [0, 1, 2, 3, 0, 1]
LIMIT_S = 60.0
"""A scenario that takes longer hangs."""


def toy(drafter: Drafter | None = None, **more: Any) -> Llm:
    target, _ = tables(**more)
    return Llm(target, drafter, None, registry.make("controller", "constant"), None)


def during(llm: Llm, scenario: Callable[[AsyncLlm], Awaitable[T]], **options: Any) -> T:
    """The result of a scenario that runs while the engine runs."""

    async def play() -> T:
        engine = AsyncLlm(llm, **options)
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), LIMIT_S)
        finally:
            await engine.close(0.0)

    return asyncio.run(play())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Gate:
    """Holds the engine's thread between two rounds."""

    def __init__(self, engine: AsyncLlm) -> None:
        self.engine, self.entered, self.opened = engine, threading.Event(), threading.Event()

    async def __aenter__(self) -> Gate:
        self.call = asyncio.ensure_future(self.engine.call(self._hold))
        await until(self.entered.is_set)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.opened.set()
        await self.call

    def _hold(self, llm: Llm) -> None:
        self.entered.set()
        self.opened.wait(LIMIT_S)


# -- asking ----------------------------------------------------------------------------------------------------------


def test_generate_and_stream_give_what_llm_gives() -> None:
    llm = toy(NgramDrafter(n=2, k=3))
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 4, "logprobs": 2, "explain": True}
    expected = llm.generate(PROMPT, **options)

    async def scenario(engine: AsyncLlm) -> None:
        output = await engine.generate(PROMPT, **options)
        assert (output.token_ids, output.finish_reason, output.origins) == (
            expected.token_ids,
            expected.finish_reason,
            expected.origins,
        )
        assert output.logprobs == expected.logprobs and output.seed == expected.seed
        pieces = [piece async for piece in engine.stream(PROMPT, **options)]
        assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
        assert [entry for piece in pieces for entry in piece.logprobs] == expected.logprobs
        assert [round_.tokens for piece in pieces for round_ in piece.rounds] == [
            round_.tokens for round_ in expected.rounds
        ]
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert len(pieces) == output.stats.num_drafts

    during(llm, scenario)


def test_what_cannot_be_served_is_refused_at_once() -> None:
    async def scenario(engine: AsyncLlm) -> None:
        for bad in (Request([]), Request([4]), Request([0], max_new_tokens=0), Request([0], stop=["x"])):
            with pytest.raises(ValueError, match=r"."):
                engine.submit(bad)
        with pytest.raises(TypeError, match="unknown option"):
            await engine.generate(PROMPT, wrong=1)
        assert engine.num_open == 0

    during(toy(), scenario)


def test_a_request_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the engine's thread again, between two rounds of the others."""
    llm, threads = toy(), []
    check = llm.engine.check
    monkeypatch.setattr(
        llm.engine, "check", lambda request: (threads.append(threading.current_thread()), check(request))
    )

    async def scenario(engine: AsyncLlm) -> None:
        await engine.generate(PROMPT, max_new_tokens=3)
        assert threads == [threading.current_thread()]
        llm.engine.check(request := Request(PROMPT, max_new_tokens=3))
        assert [piece async for piece in engine.follow(engine.submit(request, checked=True))]
        assert len(threads) == 2

    during(llm, scenario)


def test_the_requests_that_wait_are_read_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every ticket: with 16 running and 256 waiting ones that took 2 ms of every round."""
    read: list[int] = []
    ids = Requests.ids.fget
    monkeypatch.setattr(Requests, "ids", property(lambda self: (read.append(1), ids(self))[1]))
    llm = toy()

    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            tickets = [engine.submit(Request(PROMPT, max_new_tokens=2)) for _ in range(20)]
        for ticket in tickets:
            async for piece in engine.follow(ticket):
                last = piece
            assert last.finish_reason == "length"

    during(llm, scenario, max_running=1)
    assert 0 < len(read) < 2 * llm.engine.rounds + 20


def test_options_out_of_range_are_refused() -> None:
    for options in ({"max_running": 0}, {"max_queued": -1}, {"prefill_chunk": 0}, {"kv_memory": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            AsyncLlm(toy(), **options)
    for options in ({"max_running": None}, {"max_queued": "a"}, {"kv_memory": "1g"}, {"max_running": 2.5}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number"):
            AsyncLlm(toy(), **options)
    for options in ({"kept_places": -1}, {"prefix_bytes": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least 0"):
            AsyncLlm(toy(), **options)
    for options in ({"max_running": 4, "kept_places": 4}, {"kept_places": 33}):
        with pytest.raises(ValueError, match=r"kept_places must be less than max_running=\d+, not \d+"):
            AsyncLlm(toy(), **options)
    AsyncLlm(toy(), max_running=2, kept_places=1)
    for options in ({"prefill_s": -1}, {"prefill_s": float("nan")}):
        with pytest.raises(ValueError, match="prefill_s must be at least 0"):
            AsyncLlm(toy(), **options)
    for options in ({"prefill_s": "a"}, {"prefix_cache": 3}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be "):
            AsyncLlm(toy(), **options)
    with pytest.raises(TypeError, match="on_end must be a function, not an int"):
        AsyncLlm(toy(), on_end=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"needs an Llm from foretoken\.load, not a str"):
        AsyncLlm("builtin")  # type: ignore[arg-type]


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_service_is_not_copied(take: Callable[[AsyncLlm], Any]) -> None:
    with pytest.raises(TypeError, match="an AsyncLlm cannot be copied or pickled"):
        take(AsyncLlm(toy()))


def test_an_engine_that_is_not_started_or_closed_says_so() -> None:
    async def scenario() -> None:
        engine = AsyncLlm(toy())
        with pytest.raises(EngineDead, match=r"is not running: await its start\(\)"):
            await asyncio.wait_for(engine.generate(PROMPT, max_new_tokens=2), 10)
        with pytest.raises(EngineDead, match="is not running"):
            await asyncio.wait_for(engine.call(lambda llm: 1), 10)
        await engine.start()
        assert len((await engine.generate(PROMPT, max_new_tokens=2)).token_ids) == 2
        await engine.close()
        with pytest.raises(EngineDead, match="this AsyncLlm is closed: make a new one"):
            await engine.start()
        again = AsyncLlm(engine.llm)
        await again.start()
        assert len((await again.generate(PROMPT, max_new_tokens=2)).token_ids) == 2
        await again.close()

    asyncio.run(scenario())


def drafters() -> dict[str, Callable[[LanguageModel, LanguageModel], Drafter | None]]:
    return {
        "none": lambda target, draft: None,
        "model": lambda target, draft: ModelDrafter(draft, tree="2x2x1"),
        "ngram": lambda target, draft: NgramDrafter(n=2, k=3),
        "suffix": lambda target, draft: SuffixDrafter(k=4),
        "recycling": lambda target, draft: RecyclingDrafter(nodes=6),
        "lookahead": lambda target, draft: LookaheadDrafter(w=3, n=3, g=2),
        "router": lambda target, draft: RouterDrafter([ModelDrafter(draft, k=3), NgramDrafter(n=2), JacobiDrafter()]),
        "ensemble": lambda target, draft: EnsembleDrafter([ModelDrafter(draft, k=2), NgramDrafter(n=2, k=3)]),
    }


@pytest.mark.parametrize("controller", ["constant", "auto"])
@pytest.mark.parametrize("name", list(drafters()))
def test_seeds_hold_in_the_middle_of_32(name: str, controller: str) -> None:
    """Requests of all kinds write in a crowd what they write alone: greedy, sampled, short, long, with penalties."""

    def fresh() -> Llm:
        target, draft = llamas()
        return assemble(target, drafters()[name](target, draft), "auto", controller, None)

    def request(i: int) -> Request:
        prompt = [(7 * i + 3 * j) % 32 for j in range(1 + (11 * i) % 37)]
        params = SamplingParams(float(i % 3 > 0), top_k=8 * (i % 2), repetition_penalty=1.0 + 0.2 * (i % 4 == 3))
        return Request(prompt, params, 6 + (5 * i) % 23, seed=i)

    alone = fresh()
    expected = [alone.calls.finish([request(i)])[0].output for i in range(32)]

    async def scenario(engine: AsyncLlm) -> list[list[int]]:
        async def tokens_of(i: int) -> list[int]:
            await asyncio.sleep(0.002 * (i % 7))
            return (await engine.run(request(i))).token_ids

        return await asyncio.gather(*(tokens_of(i) for i in range(32)))

    assert during(fresh(), scenario, max_running=20, prefill_chunk=16) == expected


def test_many_threads_may_ask() -> None:
    llm = toy(NgramDrafter(n=2, k=3))
    expected = {
        seed: llm.generate(PROMPT, max_new_tokens=15, temperature=1.0, seed=seed).token_ids for seed in range(24)
    }
    tokens: dict[int, list[int]] = {}

    async def scenario(engine: AsyncLlm) -> None:
        def ask(seeds: Sequence[int]) -> None:
            for seed in seeds:
                coroutine = engine.generate(PROMPT, max_new_tokens=15, temperature=1.0, seed=seed)
                tokens[seed] = asyncio.run(coroutine).token_ids

        threads = [threading.Thread(target=ask, args=(range(i, 24, 6),)) for i in range(6)]
        for thread in threads:
            thread.start()
        await until(lambda: not any(thread.is_alive() for thread in threads))

    during(llm, scenario)
    assert tokens == expected


def test_a_ticket_of_a_thread_without_a_loop_can_be_awaited() -> None:
    """The ticket is filled before, while and after somebody waits for it."""
    expected = toy().generate(PROMPT, max_new_tokens=9).token_ids

    async def scenario(engine: AsyncLlm) -> None:
        ticket = await asyncio.to_thread(engine.submit, Request(PROMPT, max_new_tokens=9))
        tokens: list[int] = []
        while True:
            _, emission = await ticket.next()
            tokens += emission.token_ids
            await asyncio.sleep(0.001)
            if emission.finish_reason is not None:
                break
        assert tokens == expected

    during(toy(), scenario)


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "queued"), [(2, 4), (1, 0), (8, 3)])
def test_exactly_as_many_are_taken_as_may_run_and_wait(running: int, queued: int) -> None:
    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            tickets, refused = [], 0
            for _ in range(20 * (running + queued)):
                try:
                    tickets.append(engine.submit(Request(PROMPT, max_new_tokens=4)))
                except QueueFull as full:
                    refused += 1
                    assert full.retry_after_s > 0
            assert len(tickets) == running + queued and refused == 19 * (running + queued)
            assert engine.status.waiting == running + queued
        for ticket in tickets:
            async for piece in engine.follow(ticket):
                last = piece
            assert last.finish_reason == "length"
        assert (await engine.generate(PROMPT, max_new_tokens=3)).finish_reason == "length"

    during(toy(), scenario, max_running=running, max_queued=queued)


def test_a_request_that_gives_up_makes_room_at_once() -> None:
    """Whether it waits or runs: its client may come again before the round has ended."""

    async def scenario(engine: AsyncLlm) -> None:
        running = engine.submit(Request(PROMPT, max_new_tokens=400))
        await running.next()
        async with Gate(engine):
            waiting = engine.submit(Request(PROMPT, max_new_tokens=4))
            for ticket in (running, waiting):
                with pytest.raises(QueueFull):
                    engine.submit(Request(PROMPT))
                for _ in range(2):  # the second time frees nothing
                    engine.cancel(ticket)
                last = engine.submit(Request(PROMPT, max_new_tokens=2))
            with pytest.raises(QueueFull):
                engine.submit(Request(PROMPT))
            assert engine.num_open == 4
        async for piece in engine.follow(last):
            last_piece = piece
        assert last_piece.finish_reason == "length"
        await until(lambda: engine.num_open == 0)

    during(toy(), scenario, max_running=1, max_queued=1)


def test_those_that_come_and_go_within_a_round_are_limited() -> None:
    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            for _ in range(6):
                engine.cancel(engine.submit(Request(PROMPT, max_new_tokens=4)))
            with pytest.raises(QueueFull):
                engine.submit(Request(PROMPT))
        await engine.generate(PROMPT, max_new_tokens=2)
        await until(lambda: engine.num_open == 0)

    during(toy(), scenario, max_running=1, max_queued=2)


def test_no_more_run_together_than_may() -> None:
    llm, seen = toy(), []
    llm.engine.on_round = lambda runs, *rest: seen.append(len(runs))

    async def scenario(engine: AsyncLlm) -> None:
        await asyncio.gather(*(engine.generate(PROMPT, max_new_tokens=6) for _ in range(10)))

    during(llm, scenario, max_running=3)
    assert max(seen) == 3


def test_deadlines_end_what_waits_and_what_runs() -> None:
    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            late = asyncio.ensure_future(engine.generate(PROMPT, deadline_s=1e-6))
            await until(lambda: engine.num_open == 1)
        with pytest.raises(DeadlineExceeded, match="1e-06 s"):
            await late
        cut = await engine.generate(PROMPT, deadline_s=0.2, max_new_tokens=1_000_000)
        assert cut.finish_reason == "deadline" and 0 < len(cut.token_ids) < 1_000_000

    during(toy(context_length=2_000_000), scenario)


# -- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_who_stops_listening_is_not_served_another_round(way: str) -> None:
    """At most the round that runs when the iterator is closed is finished."""
    target, _ = llamas()
    target.context_length = 100_000
    llm, rounds = Llm(target, None, None, None, None), []
    llm.engine.on_round = lambda runs, *rest: rounds.append(len(runs))

    async def scenario(engine: AsyncLlm) -> None:
        pieces = engine.stream(PROMPT, max_new_tokens=90_000)
        for _ in range(3):
            await anext(pieces)
        if way == "close":
            before = len(rounds)
            await pieces.aclose()
        else:
            waiting = asyncio.ensure_future(engine.generate(PROMPT, max_new_tokens=90_000))
            await until(lambda: engine.status.running == 2)
            waiting.cancel()
            await pieces.aclose()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            before = len(rounds)
        await until(lambda: engine.num_open == 0 and engine.status.running == 0)
        assert len(rounds) <= before + 1
        await until(
            lambda: engine.status.kv_bytes == 0
        )  # freed right after: the engine's thread may be between the two

    during(llm, scenario)


def test_a_stream_that_breaks_in_its_own_task_is_cancelled() -> None:
    class Tokenizer:
        def decode(self, ids: Sequence[int], **more: Any) -> str:
            if len(ids) > 4:
                raise RuntimeError("planted")
            return "x" * len(ids)

    llm = toy()
    llm.tokenizer = Tokenizer()

    async def scenario(engine: AsyncLlm) -> None:
        others = [asyncio.ensure_future(engine.generate([i, 2, 1], max_new_tokens=4)) for i in range(3)]
        with pytest.raises(RuntimeError, match="planted"):
            async for _ in engine.stream(PROMPT, max_new_tokens=5_000):
                pass
        assert [output.finish_reason for output in await asyncio.gather(*others)] == ["length"] * 3
        await until(lambda: engine.num_open == 0)

    during(llm, scenario)


# -- errors and death ------------------------------------------------------------------------------------------------


def test_an_error_is_told_to_whom_it_concerns() -> None:
    def processor(ids: Any, scores: Any) -> Any:
        raise MemoryError("planted") if ids.shape[-1] > 9 else RuntimeError("planted")

    async def scenario(engine: AsyncLlm) -> None:
        well = asyncio.ensure_future(engine.generate(PROMPT, max_new_tokens=30))
        for prompt, reason in ((PROMPT, "error"), (PROMPT * 2, "out_of_memory")):
            with pytest.raises(RequestFailed, match="planted") as failed:
                await engine.generate(prompt, logits_processor=[processor])
            assert failed.value.reason == reason
        assert (await well).finish_reason == "length"
        assert engine.status.dead is None

    during(toy(), scenario)


def test_a_round_that_fails_as_a_whole_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy()
    step, calls = llm.engine._round, iter(range(1_000))

    def failing(runs: Any) -> Any:
        if next(calls) == 2:
            step(runs)
            raise RuntimeError("planted")
        return step(runs)

    monkeypatch.setattr(llm.engine, "_round", failing)

    async def scenario(engine: AsyncLlm) -> None:
        answers = [engine.generate([i, 1], max_new_tokens=40) for i in range(3)]
        for failure in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(failure, RequestFailed) and "planted" in str(failure)
        assert (await engine.generate(PROMPT, max_new_tokens=40)).finish_reason == "length"

    during(llm, scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_dies_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy(context_length=1_000_000)
    step = llm.engine.step
    broken = threading.Event()

    def failing() -> Any:
        if broken.is_set():
            raise RuntimeError("planted")
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)

    async def scenario(engine: AsyncLlm) -> None:
        answers = [asyncio.ensure_future(engine.generate([i, 1], max_new_tokens=900_000)) for i in range(3)]
        stream = engine.stream(PROMPT, max_new_tokens=900_000)
        await anext(stream)
        broken.set()
        for failure in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(failure, EngineDead) and "RuntimeError: planted" in str(failure)
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead):
            engine.submit(Request(PROMPT))
        with pytest.raises(EngineDead):
            await engine.call(lambda llm: None)
        assert "planted" in (engine.status.dead or "") and engine.num_open == 0
        age = engine.status.heartbeat_age_s
        await asyncio.sleep(0.05)
        assert engine.status.heartbeat_age_s > age

    during(llm, scenario, max_running=2)


def test_an_idle_engine_and_a_busy_one_show_that_they_live() -> None:
    async def scenario(engine: AsyncLlm) -> None:
        pieces = engine.stream(PROMPT, max_new_tokens=90_000)
        await anext(pieces)
        busy_beat = engine._beat
        await until(lambda: engine._beat > busy_beat)
        assert engine.status.running == 1  # it was not the end of the request that moved the clock
        await pieces.aclose()
        idle_beat = engine._beat
        await until(lambda: engine._beat > idle_beat)

    during(toy(context_length=100_000), scenario)


def test_a_hung_engine_shows_within_a_second_and_recovers() -> None:
    """A watcher needs no answer from the engine's thread to see that it hangs."""

    async def scenario(engine: AsyncLlm) -> None:
        pieces = engine.stream(PROMPT, max_new_tokens=90_000)
        await anext(pieces)
        async with Gate(engine):
            await asyncio.sleep(0.6)
            status = engine.status
            assert status.heartbeat_age_s > 0.5 and status.dead is None and status.running == 1
            waiting = engine.submit(Request(PROMPT, max_new_tokens=2))
            assert engine.status.waiting == 1
        await until(lambda: engine.status.heartbeat_age_s < 0.5)
        await pieces.aclose()
        assert len((await waiting.next())[1].token_ids) >= 1

    during(toy(context_length=100_000), scenario)


def test_other_threads_may_look_while_texts_are_kept_and_a_controller_learns() -> None:
    """A status page reads a number or a copy, never a table that is being changed."""
    target, draft = llamas()
    llm = assemble(target, ModelDrafter(draft, k=2), "auto", "auto", None)
    stop, failures, looks = threading.Event(), [], []

    async def scenario(engine: AsyncLlm) -> None:
        def look() -> None:
            while not stop.is_set():
                try:
                    looks.append((engine.status, llm.memory()))
                except Exception as error:
                    failures.append(error)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            answers = [engine.generate([i % 7, i] * (8 + i), max_new_tokens=6) for i in range(24)]
            await asyncio.gather(*answers)
        finally:
            stop.set()
            watcher.join()
        assert not failures and looks
        assert (
            llm.memory()["prefix_bytes"]
            == sum(prefix.nbytes for prefix in llm.engine.requests.prefix_cache.prefixes._texts.values())
            > 0
        )

    during(llm, scenario, max_running=4, prefix_bytes=2**16)


# -- between two rounds ----------------------------------------------------------------------------------------------


def test_a_call_runs_in_the_engines_thread_between_two_rounds() -> None:
    llm = toy(context_length=100_000)

    async def scenario(engine: AsyncLlm) -> None:
        pieces = engine.stream(PROMPT, max_new_tokens=90_000)
        await anext(pieces)

        def look(llm: Llm) -> tuple[str, list[int]]:
            (run,) = llm.engine.requests.running
            assert run.sequence is not None and len(run.sequence.tokens) == len(run.context.tokens) - 1
            return threading.current_thread().name, list(run.output)

        name, output = await engine.call(look)
        assert name == "foretoken-engine" and output
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda llm: 1 / 0)
        await anext(pieces)
        await pieces.aclose()

    during(llm, scenario)


@pytest.mark.parametrize(("error", "words"), [(SystemExit(3), r"exit\(3\)"), (asyncio.CancelledError(), "Cancelled")])
def test_a_call_that_would_exit_ends_alone(error: BaseException, words: str) -> None:
    def leave(llm: Llm) -> None:
        raise error

    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            calls = [asyncio.ensure_future(engine.call(f)) for f in (leave, lambda llm: 7, leave)]
            await asyncio.sleep(0.01)
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert second == 7
        for failure in (first, third):
            with pytest.raises(RuntimeError, match=words):
                raise failure  # type: ignore[misc]
        assert (await engine.generate(PROMPT, max_new_tokens=3)).finish_reason == "length"

    during(toy(), scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupted_call_ends_the_engine_and_leaves_nobody_waiting() -> None:
    def interrupt(llm: Llm) -> None:
        raise KeyboardInterrupt

    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            calls = [asyncio.ensure_future(engine.call(f)) for f in (interrupt, lambda llm: 7)]
            await asyncio.sleep(0.01)
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failure, EngineDead) and "the engine has stopped" in str(failure)
        assert "KeyboardInterrupt" in (engine.status.dead or "")

    during(toy(), scenario)


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit("planted"), asyncio.CancelledError("planted")])
def test_an_on_end_that_raises_is_logged(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """For a request that was cancelled before it entered, for one that waited, and for one that was answered."""
    ended: list[str | None] = []

    def on_end(*what: Any) -> None:
        ended.append(what[3])
        raise error

    async def scenario(engine: AsyncLlm) -> None:
        async with Gate(engine):
            engine.cancel(engine.submit(Request(PROMPT)))
        assert (await engine.generate(PROMPT, max_new_tokens=3)).finish_reason == "length"
        running = engine.submit(Request(PROMPT, max_new_tokens=90_000))
        await running.next()
        waiting = engine.submit(Request(PROMPT))
        await until(lambda: waiting.id is not None)
        engine.cancel(waiting)
        await until(lambda: len(ended) == 3)
        engine.cancel(running)
        await until(lambda: len(ended) == 4)
        assert engine.status.dead is None

    during(toy(context_length=100_000), scenario, on_end=on_end, max_running=1)
    assert ended == [None, "length", None, None] and caplog.text.count("on_end failed") == 4


def test_a_call_that_nobody_waits_for_any_more_does_not_hurt() -> None:
    async def scenario(engine: AsyncLlm) -> None:
        ran: list[int] = []
        async with Gate(engine):
            given_up = asyncio.ensure_future(engine.call(lambda llm: ran.append(1)))
            await asyncio.sleep(0.01)
            given_up.cancel()
            await asyncio.sleep(0.01)
        assert (await engine.generate(PROMPT, max_new_tokens=3)).finish_reason == "length"
        assert not ran

    during(toy(), scenario)


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing() -> None:
    async def scenario(engine: AsyncLlm) -> None:
        answers = [asyncio.ensure_future(engine.generate([i, 1], max_new_tokens=60)) for i in range(4)]
        await until(lambda: engine.num_open == 4)
        closing = asyncio.ensure_future(engine.close(LIMIT_S))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            engine.submit(Request(PROMPT))
        assert engine.status.draining
        assert [len((await answer).token_ids) for answer in answers] == [60] * 4
        await closing
        assert engine._thread is not None and not engine._thread.is_alive()
        with pytest.raises(EngineDead, match="the engine was closed"):
            engine.submit(Request(PROMPT))

    during(toy(), scenario, max_running=2)


def test_what_takes_longer_than_the_drain_is_cancelled() -> None:
    target, _ = llamas()
    target.context_length = 1_000_000
    llm = Llm(target, None, None, None, None)

    async def scenario(engine: AsyncLlm) -> None:
        answers = [asyncio.ensure_future(engine.generate([i, 1], max_new_tokens=900_000)) for i in range(3)]
        await until(lambda: engine.status.running == 2)
        await engine.close(0.05)
        for failure in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(failure, EngineDead)
        assert isinstance(target, HuggingFaceModel) and target.kv_bytes == 0 and not llm.engine.busy

    during(llm, scenario, max_running=2)


def test_an_engine_that_was_never_started_can_be_closed() -> None:
    engine = AsyncLlm(toy())
    asyncio.run(engine.close(0.0))
    assert engine.status.draining


def test_requests_of_the_llm_itself_are_in_the_way() -> None:
    llm = toy()
    stream = llm.stream(PROMPT, max_new_tokens=9)
    next(stream)
    with pytest.raises(ValueError, match="requests are running"):
        AsyncLlm(llm)
    stream.close()
    AsyncLlm(llm)


def test_a_service_that_was_given_up_is_collected_with_its_model() -> None:
    """A notebook that never closed its services kept a model and a thread for each of them."""
    before = set(threading.enumerate())
    llm = toy()

    async def tokens_of(llm: Llm) -> list[int]:
        service = AsyncLlm(llm)
        await service.start()
        return (await service.generate([1, 2], max_new_tokens=4)).token_ids

    assert asyncio.run(tokens_of(llm)) == toy().generate([1, 2], max_new_tokens=4).token_ids
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "foretoken-engine"} - before
    gc.collect()
    thread.join(1.0)
    assert thread.is_alive()  # the Llm is there, which it serves
    target = weakref.ref(llm.target)
    del llm
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:  # it may be looking for something to do just now
        gc.collect()
        thread.join(0.1)
    assert not thread.is_alive() and target() is None


def test_who_holds_a_ticket_is_answered_by_a_service_that_nobody_holds() -> None:
    async def tokens_of() -> list[int]:
        service = AsyncLlm(toy())
        await service.start()
        tickets = [service.submit(service.llm.request([1, 2], max_new_tokens=4)) for _ in range(2)]
        del service
        gc.collect()
        tokens: list[int] = []
        while True:
            _, emission = await tickets[0].next()
            tokens += emission.token_ids
            if emission.finish_reason is not None:
                return tokens

    assert asyncio.run(asyncio.wait_for(tokens_of(), 20)) == toy().generate([1, 2], max_new_tokens=4).token_ids


def test_a_service_in_a_forked_process_says_that_its_thread_stayed_behind() -> None:
    """A request in the forked process waited for ever."""
    messages: Any = multiprocessing.get_context("fork").SimpleQueue()

    def ask(engine: AsyncLlm) -> None:
        try:
            engine.submit(Request(PROMPT, max_new_tokens=4))
            messages.put("queued")
        except Exception as error:
            messages.put(f"{type(error).__name__}: {error}")

    async def scenario(engine: AsyncLlm) -> None:
        child = multiprocessing.get_context("fork").Process(target=ask, args=(engine,))
        child.start()
        await asyncio.to_thread(child.join, 30)
        assert child.exitcode == 0
        assert messages.get().startswith("EngineDead: its thread does not survive a fork")
        assert (await engine.generate(PROMPT, max_new_tokens=4)).token_ids  # in its own process it serves

    during(toy(), scenario)
