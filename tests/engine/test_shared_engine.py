"""An :class:`Llm` that is called directly while an :class:`AsyncLlm` serves it: a round serves both."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import foretoken as ft
from foretoken.engine.errors import EngineDead, RequestFailed
from foretoken.llm import Llm
from toys import llama

PROMPTS = [[3 + i % 7, 9, 5 + i % 11, 3, 9] for i in range(24)]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Switch threads far more often than usual, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def small(drafter: str | None = "ngram,n=2,k=3") -> Llm:
    return ft.load(llama(), drafter=drafter)


def directly(llm: Llm, i: int) -> list[int]:
    if i % 3 == 0:
        return [token for piece in llm.stream(PROMPTS[i], **OPTIONS) for token in piece.token_ids]
    if i % 3 == 1:  # another engine over the same target
        return list(llm.plain.generate(PROMPTS[i], **OPTIONS).token_ids)
    return list(llm.generate(PROMPTS[i], **OPTIONS).token_ids)


@pytest.mark.parametrize("drafter", [None, "ngram,n=2,k=3", "early_exit,layer=1"])
def test_both_at_once(drafter: str | None) -> None:
    llm = small(drafter)
    expected = [list(llm.generate(prompt, **OPTIONS).token_ids) for prompt in PROMPTS]

    async def scenario() -> tuple[list[list[int]], list[list[int]]]:
        engine = ft.AsyncLlm(llm)
        await engine.start()
        try:
            with ThreadPoolExecutor(3) as pool:
                loop = asyncio.get_running_loop()
                beside = [loop.run_in_executor(pool, directly, llm, i) for i in range(len(PROMPTS))]
                served = await asyncio.gather(*(engine.generate(prompt, **OPTIONS) for prompt in PROMPTS))
                return [list(output.token_ids) for output in served], await asyncio.gather(*beside)
        finally:
            await engine.close(0.0)

    served, beside = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert served == expected and beside == expected
    assert not llm.engine.busy
    assert list(llm.generate(PROMPTS[0], **OPTIONS).token_ids) == expected[0]  # after it has closed, too


def test_a_call_of_the_engine_thread_may_generate() -> None:
    """Other requests go on meanwhile: its rounds serve them."""
    llm = small()
    expected = [list(llm.generate(prompt, **OPTIONS).token_ids) for prompt in PROMPTS[:4]]

    async def scenario() -> list[list[int]]:
        engine = ft.AsyncLlm(llm)
        await engine.start()
        try:
            answers = [asyncio.ensure_future(engine.generate(prompt, **OPTIONS)) for prompt in PROMPTS[:3]]
            own = await engine.call(lambda model: list(model.generate(PROMPTS[3], **OPTIONS).token_ids))
            return [*(list(output.token_ids) for output in await asyncio.gather(*answers)), own]
        finally:
            await engine.close(0.0)

    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)) == expected


def test_a_processor_that_calls_its_own_llm_ends_its_request_alone() -> None:
    """The inner round served the outer request, too, down to a RecursionError."""
    llm = small()
    expected = [list(llm.generate(prompt, **OPTIONS).token_ids) for prompt in PROMPTS[:2]]
    stream = llm.stream(PROMPTS[1], **OPTIONS)
    beside = list(next(stream).token_ids)

    def reentrant(ids: Any, scores: Any) -> Any:
        llm.generate(PROMPTS[2], max_new_tokens=1)
        return scores

    with pytest.raises(RuntimeError, match="called the Llm that was running it: give it an Llm of its own"):
        llm.generate(PROMPTS[0], logits_processor=[reentrant], **OPTIONS)
    assert [*beside, *(token for piece in stream for token in piece.token_ids)] == expected[1]
    assert not llm.engine.busy and list(llm.generate(PROMPTS[0], **OPTIONS).token_ids) == expected[0]


def test_a_stream_that_nobody_reads_meanwhile_outlives_the_service() -> None:
    llm = small()
    expected = list(llm.generate(PROMPTS[0], **OPTIONS).token_ids)

    async def scenario(stream: Iterator[Any]) -> list[int]:
        engine = ft.AsyncLlm(llm)
        await engine.start()
        first = list(next(stream).token_ids)
        await engine.generate(PROMPTS[1], max_new_tokens=3)
        await engine.close(0.0)
        return [*first, *(token for piece in stream for token in piece.token_ids)]

    assert asyncio.run(scenario(llm.stream(PROMPTS[0], **OPTIONS))) == expected


def test_a_round_that_a_direct_caller_breaks_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = small()
    round_of, here = llm.engine._round, threading.current_thread()

    def interrupted(runs: Any) -> Any:
        if threading.current_thread() is here:
            for run in runs:
                list.append(run.context.tokens, 0)  # half a round: such requests are dropped
            raise KeyboardInterrupt
        return round_of(runs)

    monkeypatch.setattr(llm.engine, "_round", interrupted)

    async def scenario() -> None:
        engine = ft.AsyncLlm(llm)
        await engine.start()
        try:
            answer = asyncio.ensure_future(engine.generate(PROMPTS[0], max_new_tokens=100, ignore_eos=True))
            while not engine.status.rounds:
                await asyncio.sleep(0.001)
            # Without the lock the engine's thread may run all rounds of the call.
            with llm.calls.turn, pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS[1], **OPTIONS)
            with pytest.raises(RequestFailed, match="dropped because its round was interrupted: submit it again"):
                await answer
            assert len((await engine.generate(PROMPTS[1], **OPTIONS)).token_ids) == OPTIONS["max_new_tokens"]
        finally:
            await engine.close(0.0)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_two_services_of_one_llm() -> None:
    async def scenario() -> None:
        llm = small()
        first, second = ft.AsyncLlm(llm), ft.AsyncLlm(llm)
        await first.start()
        with pytest.raises(ValueError, match="another AsyncLlm serves this Llm"):
            await second.start()
        await first.close(0.0)
        with pytest.raises(EngineDead):
            await first.generate(PROMPTS[0])
        await second.start()
        assert (await second.generate(PROMPTS[0], **OPTIONS)).token_ids
        await second.close(0.0)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.parametrize("made_first", [True, False])
def test_the_limits_are_those_of_the_service_that_serves(made_first: bool) -> None:
    async def scenario() -> None:
        llm, ended = small(), []
        first = ft.AsyncLlm(llm, max_running=2, on_end=lambda *what: ended.append("first"))
        second = ft.AsyncLlm(llm, max_running=7) if made_first else None
        await first.start()
        second = second or ft.AsyncLlm(llm, max_running=7)
        assert llm.engine.max_batch == 2
        await first.generate(PROMPTS[0], **OPTIONS)
        assert ended == ["first"]
        await first.close(0.0)
        await second.start()
        assert llm.engine.max_batch == 7
        await second.generate(PROMPTS[0], **OPTIONS)
        assert ended == ["first"]
        await second.close(0.0)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.parametrize("started", [True, False])
def test_a_closed_service_leaves_the_llm_as_it_was(started: bool) -> None:
    llm, ended = small(), []
    before = llm.engine.limits
    limits: dict[str, Any] = {"max_running": 2, "prefill_chunk": 5, "prefill_s": 0.5, "kv_memory": 10**6}

    async def scenario() -> None:
        service = ft.AsyncLlm(llm, kept_places=1, on_end=lambda *what: ended.append(what), **limits)
        if started:
            await service.start()
            await service.generate(PROMPTS[0], **OPTIONS)
        assert llm.engine.limits != before
        await service.close(0.0)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert llm.engine.limits == before
    assert llm.generate(PROMPTS[0], **OPTIONS).token_ids and len(ended) == started


def test_a_service_closed_beside_a_stream_leaves_the_llm_as_it_was_after_it() -> None:
    llm = small()
    before = llm.engine.limits

    async def scenario() -> None:
        service = ft.AsyncLlm(llm, max_running=2, prefill_chunk=5)
        await service.start()
        stream = llm.stream(PROMPTS[0], **OPTIONS)
        next(stream)
        await service.close(0.0)
        assert list(stream)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert llm.generate(PROMPTS[0], **OPTIONS).token_ids
    assert llm.engine.limits == before
