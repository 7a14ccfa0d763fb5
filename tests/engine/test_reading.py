"""Prompts in pieces: the same outputs whatever the piece, and nobody stands behind a long one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.reading import ALL, FEWEST, FIRST, PIECE, ReadingTime, shares
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs, serve, tables

CONTEXT = 4096
CHUNKS = [1, 7, 64]


def models() -> tuple[HuggingFaceModel, HuggingFaceModel]:
    return HuggingFaceModel(llama(context=CONTEXT)), HuggingFaceModel(llama(noise=0.3, context=CONTEXT))


def text(length: int, seed: int) -> list[int]:
    return torch.randint(32, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- what is written -------------------------------------------------------------------------------------------------


DRAFTERS: dict[str, Callable[[HuggingFaceModel], Drafter | None]] = {
    "none": lambda draft: None,
    "ngram": lambda draft: NgramDrafter(n=2, k=3),
    "model": lambda draft: ModelDrafter(draft, tree="2x2x1"),
}


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_outputs_do_not_depend_on_the_piece(name: str, chunk: int) -> None:
    requests = [
        Request(text(length, i), SamplingParams(temperature=float(i % 2)), 12, seed=i)
        for i, length in enumerate((1, 2, 150, 7, 65, 64, 8, 33))
    ]

    def run(chunk: int | None) -> list[list[int]]:
        target, draft = models()
        return outputs(engine(target, DRAFTERS[name](draft), prefill_chunk=chunk), requests)

    assert run(chunk) == run(None)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_late_arrivals_change_nothing(chunk: int) -> None:
    """Requests join while others are read and written."""
    target, draft = models()
    runner, plain = engine(target, ModelDrafter(draft), prefill_chunk=chunk), engine(models()[0])
    requests = [Request(text(20 + 11 * i, i), max_new_tokens=9) for i in range(6)]
    done: dict[int, list[int]] = {}
    waiting = list(requests)
    while waiting or runner.busy:
        if waiting:
            runner.add(waiting.pop(0))
        for run, emission in runner.step():
            if emission.finish_reason is not None:
                done[run.id] = run.output
    assert [done[i + 1] for i in range(6)] == outputs(plain, requests)


def test_the_time_of_reading_is_bounded_where_others_wait() -> None:
    reading = ReadingTime(0.1)
    assert reading.piece_size(256, 2) == FIRST and reading.piece_size(256, 1) == 256 and reading.piece_size(8, 2) == 8
    reading.note(64, 0.064)
    assert reading.piece_size(256, 2) == 64 and reading.piece_size(256, 1) == 256, "100 fit, and 64 is a power of two"
    reading.note_round(0.3)
    assert reading.piece_size(256, 2) == 256 and reading.piece_size(128, 2) == 128, "a round takes as long"
    reading.note_round(0.01)
    for _ in range(50):
        reading.note(64, 6.4)
    assert reading.piece_size(256, 2) == FEWEST, "a slow model goes on reading"
    for _ in range(50):
        reading.note(16, 0.0001)
    assert reading.piece_size(256, 2) == 256
    assert ReadingTime(None).piece_size(ALL, 9) == ALL


def test_a_long_prompt_is_read_in_smaller_pieces_beside_others() -> None:
    """A prompt that is alone is read in whole chunks, and its text is the same."""
    target, _ = models()
    llm, sizes = engine(target, None, prefill_chunk=256), []
    llm.serve(8, None, 256, 0, prefill_s=0.1)
    prefill = target.prefill_batch

    def noted(texts: Any, taps: Any = ()) -> Any:
        sizes.append(sum(len(tokens) for _, tokens in texts))
        llm.reader.time.token_s = 0.1 / 40  # 32 is the largest power of two in .1 s
        return prefill(texts, taps)

    target.prefill_batch = noted  # type: ignore[method-assign]
    llm.reader.time.note = lambda tokens, spent_s: None  # type: ignore[method-assign]
    llm.reader.time.note_round = lambda spent_s: None  # type: ignore[method-assign]
    long, short = Request(text(600, 1), max_new_tokens=3), Request([1, 2], max_new_tokens=40)
    alone = outputs(llm, [long])
    assert sizes == [256, 256, 87]
    sizes.clear()
    assert outputs(llm, [short, long])[1:] == alone and max(sizes) == 32


def test_a_table_is_read_in_pieces_too() -> None:
    target, draft = tables()
    requests = [Request([i % 4] * (1 + 9 * i), SamplingParams(temperature=1.0), 9, seed=i) for i in range(4)]
    whole, pieces = (outputs(engine(target, ModelDrafter(draft), prefill_chunk=c), requests) for c in (None, 3))
    assert whole == pieces


@pytest.mark.parametrize("chunk", [None, 64])
def test_prompts_that_are_read_together_take_their_seconds_once(chunk: int | None) -> None:
    """Each request waited for all of the reading, but the engine did not spend that time twice."""
    target, _ = models()
    llm = engine(target, None, prefill_chunk=chunk)
    runs = serve(llm, [Request(text(200, seed), max_new_tokens=2) for seed in range(4)])
    each = [run.stats.prefill_s for run in runs]
    assert 0 < max(each) <= llm.read_s <= sum(each)
    assert chunk is not None or each == [llm.read_s] * 4
    before = llm.read_s
    (alone,) = serve(llm, [Request(text(200, 9), max_new_tokens=2)])
    assert llm.read_s - before == pytest.approx(alone.stats.prefill_s)


# -- who is read when ------------------------------------------------------------------------------------------------


def rounds_to_first_token(runner: Engine, request: Request, most: int = 10_000) -> int:
    late = runner.add(request)
    for count in range(1, most):
        if any(run.id == late and emission.token_ids for run, emission in runner.step()):
            return count
    raise AssertionError("it never got a token")


def test_a_short_request_does_not_stand_behind_a_long_prompt() -> None:
    runner = engine(models()[0], prefill_chunk=64)
    long = runner.add(Request(text(3_000, 0), max_new_tokens=4))
    writing = runner.add(Request(text(5, 1), max_new_tokens=400))
    runner.step()
    assert rounds_to_first_token(runner, Request(text(20, 2), max_new_tokens=4)) == 1
    assert rounds_to_first_token(runner, Request(text(70, 3), max_new_tokens=4)) == 3
    before = {run.id: len(run.output) for run in runner.requests.running}
    for _ in range(10):
        runner.step()
    after = {run.id: len(run.output) for run in runner.requests.running}
    assert after[writing] == before[writing] + 10 and after[long] == 0
    runner.close()


def test_without_pieces_it_does() -> None:
    """The control of the test above: then the whole prompt is read before anybody's next token."""
    runner = engine(models()[0])
    runner.add(Request(text(1_000, 0), max_new_tokens=4))
    seen: list[int] = []
    prefill = runner.target.prefill_batch
    runner.target.prefill_batch = lambda texts, taps: seen.extend(len(t) for _, t in texts) or prefill(texts, taps)  # type: ignore[method-assign,func-returns-value]
    runner.step()
    assert seen == [999]
    runner.close()


def test_a_long_prompt_gets_done_under_a_stream_of_short_ones() -> None:
    """At least half of every piece is the oldest prompt's."""
    runner = engine(models()[0], prefill_chunk=32, max_batch=64)
    long = runner.add(Request(text(1_000, 0), max_new_tokens=1))
    rounds = 0
    while runner.requests.holds(long):
        runner.add(Request(text(40, rounds), max_new_tokens=1))
        runner.step()
        rounds += 1
        assert rounds <= 1_000 / 16 + 2
    runner.close()


def test_a_round_reads_no_more_than_the_piece() -> None:
    runner, read = engine(models()[0], prefill_chunk=50), 0
    for i in range(6):
        runner.add(Request(text(33 + i, i), max_new_tokens=30))
    total = sum(run.unread for run in runner.requests.waiting)
    while any(not run.started for run in (*runner.requests.waiting, *runner.requests.running)):
        before = read
        runner.step()
        read = total - sum(max(run.unread, 0) for run in (*runner.requests.waiting, *runner.requests.running))
        assert before < read <= before + 50 or read == total
    runner.close()


def runs(*unread: int) -> list[Running]:
    """Requests with so many unread tokens."""
    runner = engine(tables()[0])
    for size in unread:
        runner.add(Request([0] * (size + 1), max_new_tokens=1))
    return list(runner.requests.waiting)


@pytest.mark.parametrize(
    ("unread", "most", "expected"),
    [
        ((100,), 10, {0: 10}),
        ((100, 3), 10, {0: 7, 1: 3}),
        ((100, 50, 3), 10, {0: 5, 1: 2, 2: 3}),
        ((4, 50, 3), 10, {0: 4, 1: 3, 2: 3}),
        ((100, 100), 1, {0: 1}),
        ((0, 9), 4, {0: 0, 1: 4}),
        ((9, 0), 4, {0: 4, 1: 0}),
        ((5, 6, 7), ALL, {0: 5, 1: 6, 2: 7}),
    ],
)
def test_half_is_the_oldest_ones_and_the_rest_goes_to_the_shortest(
    unread: tuple[int, ...], most: int, expected: dict[int, int]
) -> None:
    waiting = runs(*unread)
    sizes = {waiting.index(run): size for run, size in shares(waiting, most)}
    assert sizes == expected


# -- probabilities of prompts ----------------------------------------------------------------------------------------


def whole_forward(tokens: list[int], count: int) -> list[Any]:
    """Log-probabilities of a text by one full forward."""
    target, _ = models()
    sequence = target.open()
    logits = target.forward([Feed(sequence, tokens)])[0].logits
    wide = torch.log_softmax(logits, -1)[: len(tokens) - 1]
    best = wide.topk(count, -1)
    return [(token, wide[i, token], best.indices[i].tolist(), best.values[i]) for i, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("chunk", [*CHUNKS, None])
@pytest.mark.parametrize("length", [1, 2, 100, PIECE + 77])
def test_probabilities_of_a_prompt_equal_those_of_one_forward(chunk: int | None, length: int) -> None:
    tokens = text(length, 3)
    others = [Request(text(30, i), max_new_tokens=6) for i in range(3)]
    runner = engine(models()[0], prefill_chunk=chunk, prefix_bytes=2**20)
    run, *_ = serve(runner, [Request(tokens, max_new_tokens=3, prompt_logprobs=4), *others])
    assert len(run.prompt_logprobs) == length and run.prompt_logprobs[0] is None
    for entry, (token, logprob, top, values) in zip(run.prompt_logprobs[1:], whole_forward(tokens, 4), strict=True):
        assert entry is not None and entry.token_id == token and [candidate for candidate, _ in entry.top] == top
        torch.testing.assert_close(torch.tensor(entry.logprob, dtype=torch.float64), logprob, rtol=0, atol=1e-11)
        torch.testing.assert_close(
            torch.tensor([value for _, value in entry.top], dtype=torch.float64), values, rtol=0, atol=1e-11
        )


def test_asking_for_them_does_not_change_the_answer() -> None:
    requests = [
        Request(text(40, 1), SamplingParams(temperature=1.0), 12, seed=3, prompt_logprobs=k) for k in (None, 0, 5)
    ]
    for chunk in (None, 7):
        target, draft = models()
        texts = outputs(engine(target, ModelDrafter(draft), prefill_chunk=chunk), requests)
        assert texts[0] == texts[1] == texts[2]


def test_a_prompt_whose_reading_broke_off_is_read_from_the_start() -> None:
    """Its prompt log-probabilities come once each, too."""
    tokens = text(100, 5)
    expected = serve(engine(models()[0]), [Request(tokens, max_new_tokens=5, prompt_logprobs=1)])[0]
    runner = engine(models()[0], prefill_chunk=30)
    forward, calls = runner.target.forward, iter(range(1_000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError("planted")
        return forward(*args, **kwargs)

    runner.target.forward = failing  # type: ignore[method-assign]
    run, other = serve(
        runner,
        [
            Request(tokens, max_new_tokens=5, prompt_logprobs=1),
            Request(text(90, 6), max_new_tokens=5, prompt_logprobs=1),
        ],
    )
    assert next(calls) > 3, "the plant was never reached"
    assert run.error is None and run.output == expected.output and len(other.output) == 5
    assert len(run.prompt_logprobs) == len(expected.prompt_logprobs) == 100
    for entry, expected_entry in zip(run.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert entry is not None and expected_entry is not None and entry.token_id == expected_entry.token_id
        assert entry.logprob == pytest.approx(expected_entry.logprob, abs=1e-11)
