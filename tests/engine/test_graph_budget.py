"""Where graphs run the cache is one rectangle, and that is what memory is counted in."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest

from fake_graphs import Eager, Recordings
from foretoken.engine.admission import SCRATCH, KvBudget
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.models.cache.fixed import FixedCache
from foretoken.models.forward.graphed import with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs


def limited(slots: int, max_batch: int = 8, prefix_bytes: int = 0) -> Engine:
    """An engine over fixed steps, with room for so many slots of all rows."""
    target = HuggingFaceModel(copy.deepcopy(llama(context=2048)))
    with_graphs(target, True, Eager())
    memory = slots * target.kv_bytes_per_token
    return engine(target, kv_memory=memory, max_batch=max_batch, prefix_bytes=prefix_bytes)


def cache_of(runner: Engine) -> FixedCache:
    cache = runner.target.cache  # type: ignore[attr-defined]
    assert isinstance(cache, FixedCache)
    return cache


def add_requests(runner: Engine, prompts: Sequence[tuple[int, int]]) -> list[int]:
    return [runner.add(Request([1 + i % 30] * prompt, max_new_tokens=new)) for i, (prompt, new) in enumerate(prompts)]


def run_all(runner: Engine) -> list[int]:
    """Run to the end; the cache stays within the limit all the time.  Ids in the order in which they end."""
    ended = []
    while runner.busy:
        ended += [run.id for run, emission in runner.step() if emission.finish_reason is not None]
        assert runner.target.kv_bytes <= (runner.requests.budget.limit or 0)
    return ended


def test_a_short_text_beside_a_long_one_takes_as_much() -> None:
    """700 slots and three times 90 are 970 tokens, and four rows of 768 slots."""
    runner = limited(2000)
    long, first, second, third = add_requests(runner, [(600, 36), (10, 16), (10, 16), (10, 16)])
    runner.step()
    assert [run.id for run in runner.requests.running] == [long, first]  # two rows of 768; a third would make them four
    assert [run.id for run in runner.requests.waiting] == [second, third]
    assert sorted(run_all(runner)) == [long, first, second, third]


def test_what_never_fits_is_refused_with_the_rectangle() -> None:
    runner = limited(600)
    need = 768 * runner.target.kv_bytes_per_token  # 600 tokens in chunks of 256, with one spare slot
    with pytest.raises(ValueError, match=rf"need {need} bytes of keys and values, and kv_memory is"):
        runner.add(Request([1] * 500, max_new_tokens=100 - SCRATCH))
    runner.add(Request([1] * 400, max_new_tokens=40))
    room = 512 - 1 - SCRATCH - 400  # of two chunks, with one spare slot
    assert runner.requests.budget.room(400) == room
    runner.check(Request([1] * 400, max_new_tokens=room))
    with pytest.raises(ValueError, match="kv_memory is"):
        runner.check(Request([1] * 400, max_new_tokens=room + 1))


def test_rows_that_short_texts_left_behind_make_room_for_a_long_one() -> None:
    runner = limited(2048)
    add_requests(runner, [(10, 4)] * 8)
    runner.step()
    assert (cache_of(runner).num_rows, cache_of(runner).num_slots) == (8, 256)
    run_all(runner)
    (long,) = add_requests(runner, [(1500, 20)])
    assert run_all(runner) == [long]
    assert cache_of(runner).num_rows == 1
    add_requests(runner, [(10, 4)] * 8)  # and back
    run_all(runner)
    assert cache_of(runner).num_rows == 8


def test_a_rectangle_shrinks_around_texts_that_run() -> None:
    runner = limited(2048)
    first = add_requests(runner, [(10, 60), *[(10, 2)] * 7])[0]
    for _ in range(4):
        runner.step()
    assert [run.id for run in runner.requests.running] == [first] and cache_of(runner).num_rows == 8
    add_requests(runner, [(800, 20)])
    runner.step()
    assert len(runner.requests.running) == 2 and cache_of(runner).num_rows == 2
    run_all(runner)


@pytest.mark.parametrize("seed", [0, 1])
def test_texts_are_those_of_an_engine_without_a_limit(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.choice([3, 40, 300, 700]), rng.choice([2, 9, 30])) for _ in range(14)]
    requests = [Request([3 + (i + j) % 28 for j in range(n)], max_new_tokens=new) for i, (n, new) in enumerate(sizes)]
    expected = outputs(engine(HuggingFaceModel(copy.deepcopy(llama(context=2048))), max_batch=8), requests)
    runner = limited(2100, prefix_bytes=2**16)
    graphs = runner.target.graphs  # type: ignore[attr-defined]
    ids = [runner.add(request) for request in requests]
    runs = {run.id: run for run in runner.requests.waiting}
    run_all(runner)
    assert [runs[i].output for i in ids] == expected and graphs.stopped == ""


def test_without_a_limit_rows_are_doubled() -> None:
    target = HuggingFaceModel(copy.deepcopy(llama(context=2048)))
    with_graphs(target, True, Recordings())
    outputs(engine(target), [Request([1] * 250, max_new_tokens=20)])
    assert target.cache.num_slots == 512
    assert KvBudget(target, None).remaining is None


def test_a_ladder_is_captured_for_as_many_texts_as_fit() -> None:
    runner = limited(1100)
    assert runner.requests.budget.most_sequences(16) == 4  # four rows of 256 slots
    assert limited(100).requests.budget.most_sequences(16) == 1
    assert engine(HuggingFaceModel(llama())).requests.budget.most_sequences(16) == 16
