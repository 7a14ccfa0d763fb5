"""An error ends the request that it concerns: the others' tokens stay the same, and memory is given back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

import foretoken as ft
from foretoken.core import Budget, Context
from foretoken.core.sampling import SamplingParams
from foretoken.engine import acceptance
from foretoken.engine.errors import failure_of
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.outside import DrafterError
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models.base import LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from toys import engine, llama, llamas

POISON = 31
"""The first token of the poisoned request's prompt: what marks it wherever it goes."""
PLACE = 3
PREFIX_BYTES = 2**20
T1 = SamplingParams(temperature=1.0)


class Planted(RuntimeError):
    """What the tests raise."""


def requests(processor: Callable[[Tensor, Tensor], Tensor] | None = None) -> list[Request]:
    """Eight: greedy and sampled ones, with prompts of different lengths; the fourth is the poisoned one."""
    batch = []
    for i in range(8):
        first = POISON if i == PLACE else i
        prompt = [first, *((5 * i + 3 * j) % 29 for j in range(1 + 5 * i))]
        processors = (processor,) if processor is not None and i == PLACE else ()
        batch.append(Request(prompt, SamplingParams(temperature=float(i % 2), processors=processors), 24, seed=i))
    return batch


def is_poisoned(context: Context) -> bool:
    return context.tokens[0] == POISON


class Counter:
    """Raises from the k-th time on that a marked request comes by."""

    def __init__(self, after: int = 2, error: type[Exception] = Planted) -> None:
        self.left, self.error = after, error

    def see(self, marked: bool) -> None:
        self.left -= marked
        if marked and self.left < 0:
            raise self.error("planted")


def in_forward(model: LanguageModel, counter: Counter) -> None:
    run = model.forward

    def forward(feeds: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        counter.see(any([*feed.sequence.tokens, *feed.tokens][0] == POISON for feed in feeds))
        return run(feeds, *args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]


def in_method(thing: Any, name: str, counter: Counter, marked: Callable[..., bool]) -> None:
    run = getattr(thing, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        counter.see(marked(*args, **kwargs))
        return run(*args, **kwargs)

    setattr(thing, name, method)


def of_contexts(contexts: Sequence[Context], *more: Any) -> bool:
    return any(map(is_poisoned, contexts))


def of_context(context: Context, *more: Any) -> bool:
    return is_poisoned(context)


def of_text(sequence: Any, *more: Any) -> bool:
    return bool(sequence.tokens) and sequence.tokens[0] == POISON


def of_run(run: Running, *more: Any) -> bool:
    return is_poisoned(run.context)


Plant = Callable[[Engine, Counter, pytest.MonkeyPatch], None]


def plant_verify(serving: Engine, counter: Counter, patch: pytest.MonkeyPatch) -> None:
    together = acceptance.verify_batch

    def verify(verifiers: Any, scores: Any, rngs: Any) -> Any:
        counter.see(any(row.prefix[0] == POISON for row in scores))
        return together(verifiers, scores, rngs)

    patch.setattr(acceptance, "verify_batch", verify)


def plant_stopper(serving: Engine, counter: Counter, patch: pytest.MonkeyPatch) -> None:
    (run,) = (run for run in serving.requests.waiting if is_poisoned(run.context))
    in_method(run.stopper, "push", counter, lambda tokens: True)


def plant_prompt(serving: Engine, counter: Counter, patch: pytest.MonkeyPatch) -> None:
    counter.left = 0
    in_method(
        serving.target, "prefill_batch", counter, lambda texts, taps: any(tokens[0] == POISON for _, tokens in texts)
    )


def plant_open(serving: Engine, counter: Counter, patch: pytest.MonkeyPatch) -> None:
    counter.left = PLACE
    in_method(serving.target, "open", counter, lambda: True)
    run = serving.target.open

    def once() -> Any:
        try:
            return run()
        finally:
            if counter.left < 0:
                counter.left = 10_000

    serving.target.open = once  # type: ignore[method-assign]


def plant_release(serving: Engine, counter: Counter) -> None:
    """Memory is given back, and then something raises."""
    run, counter.left = serving.target.release, 0

    def release(sequence: Any) -> None:
        marked = of_text(sequence)
        run(sequence)
        counter.see(marked)

    serving.target.release = release  # type: ignore[method-assign]


def on(part: str, name: str, marked: Callable[..., bool], after: int = 2) -> Plant:
    def plant(serving: Engine, counter: Counter, patch: pytest.MonkeyPatch) -> None:
        counter.left = after
        in_method(attrgetter(part)(serving), name, counter, marked)

    return plant


PLANTS: dict[str, Plant] = {
    "start": on("drafter", "start", of_context, 0),
    "budget": on("controller", "budgets", of_contexts),
    "propose_batch": on("drafter", "propose_batch", of_contexts),
    "target forward": lambda serving, counter, patch: in_forward(serving.target, counter),
    "verify": plant_verify,
    "commit": on("target", "commit", of_text, 3),
    "stopper": plant_stopper,
    "observe": on("drafter", "observe", of_context),
    "controller observe": on("controller", "observe", of_context),
    "prompt": plant_prompt,
    "open": plant_open,
    "take over": on("requests.prefix_cache", "take_over", lambda run, others: is_poisoned(run.context), 0),
    "release": lambda serving, counter, patch: plant_release(serving, counter),
}


def model_drafter(draft: HuggingFaceModel) -> Drafter:
    return ModelDrafter(draft, tree="2x2x1")


def ngram_drafter(draft: HuggingFaceModel) -> Drafter:
    return NgramDrafter(n=2, k=3)


each_drafter = pytest.mark.parametrize("make", [model_drafter, ngram_drafter], ids=["model", "ngram"])


def serving(make: Callable[[HuggingFaceModel], Drafter], controller: Controller | None = None, **more: Any) -> Engine:
    target, draft = llamas()
    return engine(target, make(draft), controller=controller or ConstantController(), prefix_bytes=PREFIX_BYTES, **more)


def finished(runner: Engine, most: int = 2_000) -> dict[int, Running]:
    """Everything that ends, by its first prompt token."""
    done: dict[int, Running] = {}
    written: dict[int, list[int]] = {}
    for _ in range(most):
        if not runner.busy:
            break
        for run, emission in runner.step():
            written.setdefault(run.id, []).extend(emission.token_ids)
            if emission.finish_reason is not None:
                assert run.id not in {other.id for other in done.values()}, "told twice that it ended"
                assert emission.finish_reason == run.finish_reason and emission.error is run.error
                done[run.context.tokens[0]] = run
    assert not runner.busy, "it never ends"
    assert all(run.error is not None or written[run.id] == run.output for run in done.values()), "tokens were lost"
    return done


def check_free(runner: Engine) -> None:
    """Nothing is held for anybody."""
    assert not runner.requests.running and not runner.requests.waiting and not runner.requests.budget.reserved
    target: Any = runner.target
    assert target.kv_bytes == 0 and not target.pool.sequences
    model: Any = getattr(runner.drafter, "model", None)
    assert model is None or (model.kv_bytes == 0 and not model.pool.sequences)


def check_others(runner: Engine, clean: dict[int, list[int]], reason: str = "error") -> Exception:
    """The poisoned request ended with its error, the other seven wrote what they write without it."""
    done = finished(runner)
    poisoned = done.pop(POISON)
    assert poisoned.finish_reason == reason and poisoned.error is not None
    assert {first: run.output for first, run in done.items()} == {k: v for k, v in clean.items() if k != POISON}
    assert all(run.finish_reason == "length" and len(run.output) == 24 for run in done.values())
    return poisoned.error


def clean_outputs(make: Callable[[HuggingFaceModel], Drafter], **more: Any) -> dict[int, list[int]]:
    runner = serving(make, **more)
    for request in requests():
        runner.add(request)
    return {first: run.output for first, run in finished(runner).items()}


@each_drafter
@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", list(PLANTS))
def test_a_poisoned_request_ends_alone(
    make: Callable[[HuggingFaceModel], Drafter], name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = clean_outputs(make, prefill_chunk=chunk)
    runner = serving(make, prefill_chunk=chunk)
    for request in requests():
        runner.add(request)
    counter = Counter()
    PLANTS[name](runner, counter, monkeypatch)
    assert isinstance(check_others(runner, clean), Planted)
    assert counter.left < 0 or name == "open", "the plant was never reached"
    check_free(runner)
    runner.add(Request([7, 8, 9], max_new_tokens=5))
    (after,) = finished(runner).values()
    assert after.finish_reason == "length" and len(after.output) == 5


@each_drafter
def test_a_drafter_that_fails_at_the_end_of_a_request_costs_no_answer(
    make: Callable[[HuggingFaceModel], Drafter], caplog: pytest.LogCaptureFixture
) -> None:
    clean, runner = clean_outputs(make), serving(make)
    for request in requests():
        runner.add(request)
    in_method(runner.drafter, "finish", Counter(0), of_context)
    done = finished(runner)
    assert {first: run.output for first, run in done.items()} == clean
    assert {run.finish_reason for run in done.values()} == {"length"}
    assert "the drafter failed at the end" in caplog.text and "planted" in caplog.text
    target: Any = runner.target
    assert not runner.requests.budget.reserved and target.kv_bytes == 0 and not target.pool.sequences


@each_drafter
@pytest.mark.parametrize("hook", ["finish", "explain"])
def test_a_controller_that_fails_at_the_end_of_a_request_costs_no_answer(
    make: Callable[[HuggingFaceModel], Drafter], hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    clean, runner = clean_outputs(make), serving(make)
    for request in requests():
        runner.add(request)
    in_method(runner.controller, hook, Counter(0), of_context)
    done = finished(runner)
    assert {first: run.output for first, run in done.items()} == clean
    assert {run.finish_reason for run in done.values()} == {"length"}
    assert "the controller failed at the end" in caplog.text and "planted" in caplog.text
    check_free(runner)


@each_drafter
def test_a_poisoned_sampling_processor_ends_its_request_alone(make: Callable[[HuggingFaceModel], Drafter]) -> None:
    """In the draft's distributions as in the target's: a request's processor runs wherever tokens are drawn."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[-1] > 1 + 1 + 5 * PLACE + 4:
            raise Planted("in a processor")
        return scores

    clean, runner = clean_outputs(make), serving(make)
    for request in requests(processor):
        runner.add(request)
    assert isinstance(check_others(runner, clean), Planted)
    check_free(runner)


@each_drafter
def test_a_processor_that_leaves_nothing_ends_its_request_alone(make: Callable[[HuggingFaceModel], Drafter]) -> None:
    clean, runner = clean_outputs(make), serving(make)
    for request in requests(lambda ids, scores: torch.full_like(scores, -torch.inf)):
        runner.add(request)
    check_others(runner, clean)
    check_free(runner)


def test_a_poisoned_tokenizer_ends_its_request_alone() -> None:
    """Stop strings are looked for in decoded text."""

    class Tokenizer:
        def decode(self, ids: Sequence[int], **more: Any) -> str:
            if POISON in ids or len(ids) > 6:
                raise Planted("in the tokenizer")
            return "".join(chr(97 + token % 26) for token in ids)

    target, draft = llamas()
    runner = engine(target, ModelDrafter(draft), tokenizer=Tokenizer())
    runner.add(Request([5, 6, 7], max_new_tokens=20, stop=["never"]))
    runner.add(Request([6, 7, 8], max_new_tokens=20))
    done = finished(runner)
    assert isinstance(done[5].error, Planted) and done[6].finish_reason == "length"
    check_free(runner)


# -- memory ----------------------------------------------------------------------------------------------------------


@each_drafter
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9])
def test_memory_that_is_full_in_a_forward_costs_one_request(
    make: Callable[[HuggingFaceModel], Drafter], step: int
) -> None:
    clean, runner = clean_outputs(make), serving(make)
    for request in requests():
        runner.add(request)
    counter = Counter(step, MemoryError)
    in_forward(runner.target, counter)
    error = check_others(runner, clean)
    assert isinstance(error, MemoryError) and failure_of(error).reason == "out_of_memory"
    check_free(runner)
    for request in requests()[:PLACE]:
        runner.add(request)
    again = {first: run.output for first, run in finished(runner).items()}
    assert again == {first: clean[first] for first in again} and len(again) == PLACE
    check_free(runner)


@pytest.mark.parametrize("step", range(0, 12, 3))
def test_memory_that_is_full_for_a_moment_costs_nobody_anything(step: int) -> None:
    """A forward of all that fails is tried again request by request."""
    clean, runner = clean_outputs(model_drafter), serving(model_drafter)
    for request in requests():
        runner.add(request)
    run, calls = runner.target.forward, iter(range(10_000))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == step:
            raise torch.OutOfMemoryError("planted")
        return run(*args, **kwargs)

    runner.target.forward = forward  # type: ignore[method-assign]
    assert {first: ended.output for first, ended in finished(runner).items()} == clean
    check_free(runner)


@pytest.mark.parametrize("reserve", range(12))
def test_memory_that_is_full_while_a_cache_grows_leaves_the_others_right(
    reserve: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of different lengths move between bands; each move and each growth may be one of the two that fail."""

    def prompts() -> list[Request]:
        return [Request([i, *([i + 1, 3] * (90 * (i % 3)))], max_new_tokens=70) for i in range(6)]

    def make() -> Engine:
        return engine(HuggingFaceModel(llama(context=1024)), prefill_chunk=64)

    clean, runner = make(), make()
    for request in prompts():
        clean.add(request)
        runner.add(request)
    right = {first: run.output for first, run in finished(clean).items()}
    cache: Any = type(runner.target.cache)  # type: ignore[attr-defined]
    resize, calls = cache._resize, iter(range(10_000))

    def failing(self: Any, *args: Any) -> None:
        if next(calls) in (reserve, reserve + 1):
            raise MemoryError("planted")
        resize(self, *args)

    monkeypatch.setattr(cache, "_resize", failing)
    done = finished(runner)
    assert len(done) == 6
    failed = [run for run in done.values() if run.finish_reason == "error"]
    assert len(failed) <= 2 and all(isinstance(run.error, MemoryError) for run in failed)
    others = {first: run.output for first, run in done.items() if run.error is None}
    assert others == {first: right[first] for first in others}
    check_free(runner)


def test_kept_texts_make_room_when_memory_is_full() -> None:
    """Even a request that runs alone is tried again after the texts that finished requests left are dropped."""
    runner = serving(model_drafter)
    runner.add(Request([3, 4] * 20, max_new_tokens=8))
    clean = {first: run.output for first, run in finished(runner).items()}
    assert len(runner.requests.prefix_cache.prefixes) == 1
    run = runner.target.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if runner.requests.prefix_cache.prefixes.nbytes:
            raise torch.OutOfMemoryError("planted")
        return run(*args, **kwargs)

    runner.target.forward = forward  # type: ignore[method-assign]
    runner.add(Request([3, 4] * 20, max_new_tokens=8))
    assert {first: ended.output for first, ended in finished(runner).items()} == clean
    check_free(runner)


def test_a_text_that_cannot_be_kept_has_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    clean, runner = clean_outputs(ngram_drafter), serving(ngram_drafter)
    in_method(runner.requests.prefix_cache, "keep", Counter(0, MemoryError), of_run)
    for request in requests():
        runner.add(request)
    done = finished(runner)
    assert {first: run.output for first, run in done.items()} == clean
    assert {run.finish_reason for run in done.values()} == {"length"}
    assert "were not kept" in caplog.text
    check_free(runner)


def test_pytorchs_own_report_of_full_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert failure_of(raised.value).reason == "out_of_memory"  # type: ignore[arg-type]
    assert failure_of(RuntimeError("else")).reason == "error"
    assert failure_of(MemoryError()).reason == "out_of_memory"


# -- a request that is dropped ---------------------------------------------------------------------------------------


def test_a_cancelled_request_that_cannot_be_freed_is_logged_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    runner = serving(ngram_drafter)
    ids = [runner.add(request) for request in requests()]
    runner._admit()
    runner.reader.read()
    plant_release(runner, Counter())
    runner.cancel(ids[PLACE])
    assert "was dropped" in caplog.text and "planted" in caplog.text
    assert not runner.requests.holds(ids[PLACE])
    finished(runner)
    check_free(runner)


def test_a_deadline_that_cannot_be_kept_in_peace_is_an_error() -> None:
    runner = serving(ngram_drafter)
    runner.add(Request([POISON, 1, 2], max_new_tokens=5, deadline_s=1e-9))
    plant_release(runner, Counter())
    (run,) = finished(runner).values()
    assert run.finish_reason == "deadline" and run.output == []
    runner.add(Request([POISON, 1, 2], max_new_tokens=50, deadline_s=3600.0))
    runner.step()
    (run,) = runner.requests.running
    run.arrived_s -= 7200.0
    (run,) = finished(runner).values()
    assert run.finish_reason == "error" and isinstance(run.error, Planted)
    check_free(runner)


class Refusing(NgramDrafter):
    """Raises whenever it is asked."""

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        """Nobody gets a draft."""
        raise Planted("nobody")


def test_a_drafter_that_always_fails_ends_everybody_and_the_engine_stays() -> None:
    target, _ = llamas()
    runner = engine(target, Refusing())
    for request in requests():
        runner.add(request)
    errors = [run.error for run in finished(runner).values()]  # the drafter is none of ours: it is named
    assert all(isinstance(error, DrafterError) and isinstance(error.__cause__, Planted) for error in errors)
    check_free(runner)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_draw_that_was_made_is_not_made_again(overflows: bool, together: int) -> None:
    """Half of all texts draw the token whose logits are NaN, drafted or not: they end there, as plain ones do."""

    def scores(prefix: tuple[int, ...]) -> Sequence[float]:
        return [float("nan")] * 2 if overflows and prefix[-1] == 1 else [0.5, 0.5]

    target, ended = TableModel(scores, 2), 0
    for _ in range(400 // together):
        serving = engine(target, ScriptedDrafter("1"), controller=ConstantController(1), max_batch=together)
        for _ in range(together):
            serving.add(Request([0], T1, 2))
        while serving.busy:
            ended += sum(run.finish_reason == "error" for run, emission in serving.step() if emission.finish_reason)
    assert 160 < ended < 240 if overflows else ended == 0  # four standard deviations to both sides


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_refused_draft_whose_states_are_not_finite_changes_nothing(temperature: float, lean: bool) -> None:
    """Plain decoding never reads it: the root's masked slots must not, either."""
    network = copy.deepcopy(llama())  # that of all tests
    plain = ft.load(HuggingFaceModel(network, lean=lean), None)
    options: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True, "temperature": temperature, "seed": 3}
    prompts = [[5, 9, 3], [8, 8, 4, 7]]
    expected = [output.token_ids for output in plain.generate(prompts, **options)]
    bad = next(token for token in range(32) if all(token not in text for text in (*expected, *prompts)))
    network.get_input_embeddings().weight.data[bad] = torch.nan
    guesses = [[*text[:2], bad, *text[3:]] for text in expected]
    drafted = ft.load(HuggingFaceModel(network, lean=lean), "prediction", controller="constant,k=8")
    outputs = drafted.generate(prompts, prediction=guesses, **options)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats.num_accepted_tokens for output in outputs), "it goes on to draft"
