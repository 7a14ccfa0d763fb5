"""Who may enter: memory, priorities and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretoken.core import OptionError
from foretoken.core.sampling import SamplingParams
from foretoken.engine.admission import SCRATCH
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs, serve, tables


def model() -> HuggingFaceModel:
    return HuggingFaceModel(llama(context=2048))


def cost(target: HuggingFaceModel, prompt: int, new: int) -> int:
    """Bytes that the budget counts for a request."""
    return (prompt + new + SCRATCH) * target.kv_bytes_per_token


def limited(slots: int, **more: Any) -> Engine:
    """An engine with room for so many tokens."""
    target = model()
    return engine(target, kv_memory=slots * target.kv_bytes_per_token, **more)


def add_requests(runner: Engine, prompts: Sequence[tuple[int, int]], **options: Any) -> list[int]:
    """Requests by the lengths of prompt and output."""
    return [
        runner.add(Request([1 + i % 30] * prompt, max_new_tokens=new, **options))
        for i, (prompt, new) in enumerate(prompts)
    ]


def ids(runs: Sequence[Running]) -> list[int]:
    return [run.id for run in runs]


def finish(runner: Engine) -> list[int]:
    """Ids in the order in which they end."""
    ended = []
    while runner.busy:
        ended += [run.id for run, emission in runner.step() if emission.finish_reason is not None]
    return ended


# -- memory ----------------------------------------------------------------------------------------------------------


def test_what_never_fits_is_refused_with_the_sizes() -> None:
    runner = limited(200)
    runner.add(Request([1] * 100, max_new_tokens=200 - 100 - SCRATCH))
    need = runner.target.kv_bytes_per_token * 201
    for prompt, new in ((100, 200 - 100 - SCRATCH + 1), (101, 200 - 100 - SCRATCH)):
        with pytest.raises(
            ValueError, match=rf"need {need} bytes .* kv_memory is {need // 201 * 200}: shorten the prompt"
        ):
            runner.add(Request([1] * prompt, max_new_tokens=new))
    assert ids(runner.requests.waiting) == [1]


def test_a_request_waits_until_there_is_room() -> None:
    runner = limited(3 * (20 + 16 + SCRATCH))
    first, second, third, fourth = add_requests(runner, [(20, 16)] * 4)
    runner.step()
    assert ids(runner.requests.running) == [first, second, third] and ids(runner.requests.waiting) == [fourth]
    runner.cancel(second)
    runner.step()
    assert ids(runner.requests.running) == [first, third, fourth]
    finish(runner)
    assert runner.requests.budget.remaining == runner.requests.budget.limit


def test_nobody_overtakes_who_waits_for_room() -> None:
    """A long request gets its turn although short ones would fit all the time."""
    runner = limited(500)
    short = add_requests(runner, [(20, 40)] * 2)
    (long,) = add_requests(runner, [(200, 40)])
    runner.step()
    late = add_requests(runner, [(20, 40)] * 2)
    runner.step()
    assert ids(runner.requests.running) == short and ids(runner.requests.waiting) == [long, *late]
    ended = finish(runner)
    assert ended.index(long) < ended.index(late[0])


def test_a_limited_engine_writes_what_an_unlimited_one_writes() -> None:
    requests = [
        Request([3 + i] * (10 + 30 * (i % 4)), SamplingParams(temperature=float(i % 2)), 20 + i, seed=i)
        for i in range(12)
    ]
    assert outputs(limited(300), requests) == outputs(engine(model()), requests)


def test_memory_stays_near_the_limit() -> None:
    """Rectangles are a little larger than the tokens in them."""
    runner = limited(2_000, prefix_bytes=2**24)
    prompts = [(30 + 97 * (i % 7), 20 + 13 * (i % 5)) for i in range(30)]
    add_requests(runner, prompts)
    together = 0
    while runner.busy:
        runner.step()
        together = max(together, len(runner.requests.running))
        reserved = sum(runner.requests.budget.reserved.values())
        assert reserved + runner.requests.prefix_cache.prefixes.nbytes <= (runner.requests.budget.limit or 0)
    target = runner.target
    assert together > 2 and target.kv_peak_bytes <= 1.5 * (runner.requests.budget.limit or 0)
    assert target.kv_bytes == 0 and not runner.requests.budget.reserved


def test_kept_texts_make_room_for_running_ones() -> None:
    runner = limited(600, prefix_bytes=2**24)
    for i in range(3):
        serve(runner, [Request([i + 1] * 100, max_new_tokens=4)])
    assert len(runner.requests.prefix_cache.prefixes) == 3
    runner.add(Request([9] * 300, max_new_tokens=100))
    runner.step()
    left = runner.requests.budget.remaining
    assert (
        left is not None
        and runner.requests.prefix_cache.prefixes.nbytes <= left
        and len(runner.requests.prefix_cache.prefixes) < 3
    )


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, not 0"):
        engine(model(), kv_memory=0)
    with pytest.raises(ValueError, match="known KV cache size per token, and MarkovTable has none"):
        engine(tables()[0], kv_memory=2**20)


def test_no_limit_no_wait() -> None:
    runner = engine(model())
    add_requests(runner, [(500, 500)] * 8)
    runner.step()
    assert len(runner.requests.running) == 8 and runner.requests.budget.remaining is None
    runner.close()


# -- order -----------------------------------------------------------------------------------------------------------


def test_smaller_priorities_run_first_and_equals_in_order_of_arrival() -> None:
    runner = engine(model(), max_batch=1)
    (running,) = add_requests(runner, [(3, 4)])
    runner.step()
    middle, late, first, last = (runner.add(Request([5], max_new_tokens=3, priority=p)) for p in (0, 5, -2, 5))
    assert finish(runner) == [running, first, middle, late, last]


def test_a_priority_does_not_stop_who_runs() -> None:
    runner = engine(model(), max_batch=1)
    (running,) = add_requests(runner, [(3, 9)])
    runner.step()
    urgent = runner.add(Request([5], max_new_tokens=3, priority=-100))
    runner.step()
    assert ids(runner.requests.running) == [running] and ids(runner.requests.waiting) == [urgent]
    assert finish(runner) == [running, urgent]


# -- deadlines -------------------------------------------------------------------------------------------------------


def later(runner: Engine, seconds: float) -> None:
    """Pretend that all requests arrived ``seconds`` earlier."""
    for run in (*runner.requests.waiting, *runner.requests.running):
        run.arrived_s -= seconds


@pytest.mark.parametrize("drafting", [False, True])
def test_a_deadline_ends_who_runs_with_what_there_is(drafting: bool) -> None:
    target = model()
    plain, runner = engine(model()), engine(target, NgramDrafter() if drafting else None)
    late = Request([4, 5, 4], max_new_tokens=50, deadline_s=60.0)
    runner.add(late)
    other = runner.add(replace(late, deadline_s=None))
    for _ in range(4):
        runner.step()
    later(runner, 61.0)
    ((run, emission), *_) = [end for end in runner.step() if end[1].finish_reason is not None]
    assert emission.finish_reason == run.finish_reason == "deadline" and not emission.token_ids and run.error is None
    (expected,) = outputs(plain, [replace(late, deadline_s=None)])
    assert 4 <= len(run.output) < 50 and run.output == expected[: len(run.output)]
    assert finish(runner) == [other]
    assert target.kv_bytes == 0


def test_a_deadline_ends_who_waits_and_who_is_read() -> None:
    target = model()
    runner = engine(target, max_batch=2, prefill_chunk=16)
    add_requests(runner, [(5, 40)])
    reading, waiting = add_requests(runner, [(400, 5), (5, 5)], deadline_s=60.0)
    runner.step()
    assert [run.started for run in runner.requests.running] == [True, False] and ids(runner.requests.waiting) == [
        waiting
    ]
    later(runner, 61.0)
    ended = {run.id: run for run, emission in runner.step() if emission.finish_reason == "deadline"}
    assert ended.keys() == {reading, waiting} and all(run.output == [] for run in ended.values())
    finish(runner)
    assert target.kv_bytes == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_deadlines_in_the_past_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="deadline_s must be above 0"):
        engine(model()).add(Request([1], deadline_s=seconds))


def test_time_in_the_queue_is_told() -> None:
    runner = engine(model(), max_batch=1)
    add_requests(runner, [(3, 6), (3, 2)])
    first, second = runner.requests.waiting
    finish(runner)
    assert 0 <= first.stats.queue_s < second.stats.queue_s < second.stats.first_token_s


def test_the_room_behind_a_prompt_is_what_is_admitted() -> None:
    runner = limited(200)
    assert runner.requests.budget.room(100) == 200 - 100 - SCRATCH and runner.requests.budget.room(200 - SCRATCH) == 0
    for prompt, option in ((100, "max_new_tokens"), (200 - SCRATCH, "prompt")):
        with pytest.raises(OptionError) as refused:
            runner.add(Request([1] * prompt, max_new_tokens=max(0, runner.requests.budget.room(prompt) or 0) + 1))
        assert refused.value.option == option
    assert engine(model()).requests.budget.room(100) is None
