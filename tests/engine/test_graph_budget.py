"""Where graphs run the cache is one rectangle, and that is what memory is counted in."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest

from fake_graphs import Recordings
from foretoken.engine.admission import SCRATCH, KvBudget
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.models.cache.fixed import FixedCache
from foretoken.models.forward.capture import Eager
from foretoken.models.forward.graphed import with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs


def limited(slots: int, max_batch: int = 8, prefix_bytes: int = 0) -> Engine:
    """An engine over fixed steps, with room for so many slots of all rows."""
    target = HuggingFaceModel(copy.deepcopy(llama(context=2048)))
    with_graphs(target, True, Eager())
    memory = slots * target.kv_bytes_per_token
    return engine(target, kv_memory=memory, max_batch=max_batch, prefix_bytes=prefix_bytes)


def cache_of(busy: Engine) -> FixedCache:
    cache = busy.target.cache  # type: ignore[attr-defined]
    assert isinstance(cache, FixedCache)
    return cache


def asked(busy: Engine, prompts: Sequence[tuple[int, int]]) -> list[int]:
    return [busy.add(Request([1 + i % 30] * prompt, max_new_tokens=new)) for i, (prompt, new) in enumerate(prompts)]


def run_all(busy: Engine) -> list[int]:
    """Run to the end; the cache stays within the limit all the time.  Ids in the order in which they end."""
    ended = []
    while busy.busy:
        ended += [run.id for run, emission in busy.step() if emission.finish_reason is not None]
        assert busy.target.kv_bytes <= (busy.budget.limit or 0)
    return ended


def test_a_short_text_beside_a_long_one_takes_as_much() -> None:
    """700 slots and three times 90 are 970 tokens, and four rows of 768 slots."""
    busy = limited(2000)
    long, first, second, third = asked(busy, [(600, 36), (10, 16), (10, 16), (10, 16)])
    busy.step()
    assert [run.id for run in busy.running] == [long, first]  # two rows of 768; a third would make them four
    assert [run.id for run in busy.waiting] == [second, third]
    assert sorted(run_all(busy)) == [long, first, second, third]


def test_what_never_fits_is_refused_with_the_rectangle() -> None:
    busy = limited(600)
    need = 768 * busy.target.kv_bytes_per_token  # 600 tokens in chunks of 256, with one spare slot
    with pytest.raises(ValueError, match=rf"need {need} bytes of keys and values, and kv_memory is"):
        busy.add(Request([1] * 500, max_new_tokens=100 - SCRATCH))
    busy.add(Request([1] * 400, max_new_tokens=40))
    room = 512 - 1 - SCRATCH - 400  # of two chunks, with one spare slot
    assert busy.budget.room(400) == room
    busy.check(Request([1] * 400, max_new_tokens=room))
    with pytest.raises(ValueError, match="kv_memory is"):
        busy.check(Request([1] * 400, max_new_tokens=room + 1))


def test_rows_that_short_texts_left_behind_make_room_for_a_long_one() -> None:
    busy = limited(2048)
    asked(busy, [(10, 4)] * 8)
    busy.step()
    assert (cache_of(busy).num_rows, cache_of(busy).num_slots) == (8, 256)
    run_all(busy)
    (long,) = asked(busy, [(1500, 20)])
    assert run_all(busy) == [long]
    assert cache_of(busy).num_rows == 1
    asked(busy, [(10, 4)] * 8)  # and back
    run_all(busy)
    assert cache_of(busy).num_rows == 8


def test_a_rectangle_shrinks_around_texts_that_run() -> None:
    busy = limited(2048)
    first = asked(busy, [(10, 60), *[(10, 2)] * 7])[0]
    for _ in range(4):
        busy.step()
    assert [run.id for run in busy.running] == [first] and cache_of(busy).num_rows == 8
    asked(busy, [(800, 20)])
    busy.step()
    assert len(busy.running) == 2 and cache_of(busy).num_rows == 2
    run_all(busy)


@pytest.mark.parametrize("seed", [0, 1])
def test_texts_are_those_of_an_engine_without_a_limit(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.choice([3, 40, 300, 700]), rng.choice([2, 9, 30])) for _ in range(14)]
    requests = [Request([3 + (i + j) % 28 for j in range(n)], max_new_tokens=new) for i, (n, new) in enumerate(sizes)]
    wanted = outputs(engine(HuggingFaceModel(copy.deepcopy(llama(context=2048))), max_batch=8), requests)
    busy = limited(2100, prefix_bytes=2**16)
    graphs = busy.target.graphs  # type: ignore[attr-defined]
    ids = [busy.add(request) for request in requests]
    runs = {run.id: run for run in busy.waiting}
    run_all(busy)
    assert [runs[one].output for one in ids] == wanted and graphs.stopped == ""


def test_without_a_limit_rows_are_doubled() -> None:
    target = HuggingFaceModel(copy.deepcopy(llama(context=2048)))
    with_graphs(target, True, Recordings())
    outputs(engine(target), [Request([1] * 250, max_new_tokens=20)])
    assert target.cache.num_slots == 512
    assert KvBudget(target, None).left is None


def test_a_ladder_is_captured_for_as_many_texts_as_fit() -> None:
    busy = limited(1100)
    assert busy.budget.most_texts(16) == 4  # four rows of 256 slots
    assert limited(100).budget.most_texts(16) == 1
    assert engine(HuggingFaceModel(llama())).budget.most_texts(16) == 16
