"""Requests that fail or wait: nothing of them is left behind, and nobody is blamed for the work of others."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from running_server import Running
from test_limits import error_of

from foretoken.engine.errors import RequestFailed
from foretoken.engine.request import Request
from foretoken.engine.tickets import Ticket
from foretoken.server import templates, workers
from foretoken.server.errors import ApiError
from foretoken.server.running import _merged, outputs_of
from foretoken.server.schemas import Message
from foretoken.server.templates import Conversation, prompt_of
from foretoken.server.workers import NotBegun, in_thread


def test_a_failed_choice_leaves_no_waiting_task_behind() -> None:
    """The engine reports nothing for a cancelled ticket, so its task would wait for ever."""
    cancelled: list[Ticket] = []
    engine: Any = SimpleNamespace(cancel=cancelled.append)
    tickets = [Ticket(Request((1,), 4)) for _ in range(3)]

    async def run() -> None:
        tickets[1].put(RequestFailed("no", "error"))
        with pytest.raises(RequestFailed):
            await outputs_of(engine, tickets, lambda index, tokens: None)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert cancelled == tickets


@pytest.mark.parametrize("ending", ["closed", "failed", "cancelled"])
def test_a_stream_of_several_choices_leaves_no_task_behind(ending: str) -> None:
    """Whoever ends the stream waits for what its choices do at their end, which may fail, too."""
    over: list[int] = []
    lost: list[dict[str, Any]] = []

    async def choice(number: int) -> AsyncGenerator[int, None]:
        try:
            yield number
            if ending == "failed" and number == 1:
                raise RequestFailed("no", "error")
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            over.append(number)
            if number == 2:
                raise ValueError("planted")

    async def read(pieces: AsyncGenerator[int, None], number: int) -> list[int]:
        return [await anext(pieces) for _ in range(number)]

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, event: lost.append(event))
        pieces = _merged([choice(number) for number in range(3)])
        assert sorted(await read(pieces, 3)) == [0, 1, 2]
        if ending == "closed":
            await pieces.aclose()
        elif ending == "failed":
            with pytest.raises(RequestFailed):
                await anext(pieces)
        else:
            reading = asyncio.create_task(read(pieces, 1))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        assert sorted(over) == [0, 1, 2]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    gc.collect()
    assert not lost


def test_the_wait_for_a_thread_is_not_part_of_the_work_s_time() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(time.sleep, 1.2)
    assert asyncio.run(in_thread(pool, lambda: time.sleep(1.2) or "done", 2.0)) == "done"
    with pytest.raises(TimeoutError):
        asyncio.run(in_thread(pool, lambda: time.sleep(0.5), 0.05))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(pool, lambda: 1 / 0, 60.0))


def test_work_that_does_not_begin_in_time_is_never_run() -> None:
    pool, go, ran = ThreadPoolExecutor(1), threading.Event(), []
    pool.submit(go.wait)

    async def leaves() -> None:
        task = asyncio.ensure_future(in_thread(pool, lambda: ran.append("left"), 60.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.raises(NotBegun):
        asyncio.run(in_thread(pool, lambda: ran.append("late"), 0.05))
    asyncio.run(leaves())
    go.set()
    pool.shutdown()
    assert ran == []


def test_a_conversation_behind_others_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that its own messages take too long."""
    monkeypatch.setattr(templates, "RENDER_S", 0.1)
    tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=lambda *args, **options: "x")
    conversation, go = Conversation([Message(role="user", content="Hi")]), threading.Event()
    busy = [workers.TEMPLATES.submit(go.wait) for _ in range(2)]
    try:
        with pytest.raises(ApiError) as failure:
            asyncio.run(prompt_of(tokenizer, conversation))
    finally:
        go.set()
    assert (failure.value.status, failure.value.code) == (503, "templates_queued")
    assert int(failure.value.headers["Retry-After"]) >= 1
    assert all(future.result(60) for future in busy)
    monkeypatch.undo()
    assert asyncio.run(prompt_of(tokenizer, conversation)) == "x"


def test_a_grammar_behind_others_is_told_to_come_again(server: Running) -> None:
    """It was told that it takes too long to compile."""
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    go = threading.Event()
    busy = [workers.GRAMMARS.submit(go.wait) for _ in range(32)]
    try:
        answer = server.post("/v1/completions", prompt="x", max_tokens=1, structured_outputs={"regex": "[ab]{9}"})
    finally:
        go.set()
    assert error_of(answer, 503)["code"] == "grammars_queued"
    assert int(answer.headers["Retry-After"]) >= 1
    assert all(future.result(60) for future in busy)
